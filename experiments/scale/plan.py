"""Bytes and bounds of one decode step of a model on a mesh, by the library's own sharding rule."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from experiments.collectives import Collective
from experiments.scale.machines import Machine, Subject
from jaxkv.model.params import abstract_params
from jaxkv.model.sharding import MODEL
from jaxkv.parallel import weight_shardings

KV_ITEM = 2  # bytes of a stored key or value: bfloat16
WEIGHT = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a machine's devices are used: `data` replicas, each over `model` devices."""

    data: int
    model: int

    def __str__(self) -> str:
        return f"data:{self.data},model:{self.model}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What runs: sequences of one replica, all of the same length."""

    batch: int
    context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One device's share of a decode step. Bytes; seconds."""

    weights: float
    read_weights: float  # all but an embedding that is only looked up
    kv: float
    state: float
    collectives: tuple[Collective, ...]

    @property
    def memory(self) -> float:
        """Weights, pages and recurrent state; activations are small beside them."""
        return self.weights + self.kv + self.state

    def hbm_seconds(self, machine: Machine) -> float:
        """Weights and keys are read once; the recurrent state is read and written."""
        return (self.read_weights + self.kv + 2 * self.state) / machine.bandwidth

    def link_bytes(self, layout: Layout) -> float:
        """Bytes that a device sends in a step."""
        return sum(each.link_bytes(layout.model) for each in self.collectives)

    def link_seconds(self, machine: Machine, layout: Layout) -> float:
        """The bytes at the slowest link of the ring."""
        if layout.model == 1:
            return 0.0
        crosses = layout.model > machine.devices // machine.hosts and machine.cross_rate
        return self.link_bytes(layout) / (machine.cross_rate if crosses else machine.link_rate)

    def hop_seconds(self, machine: Machine, layout: Layout) -> float:
        """The least time of the hops: a ring all-reduce goes around twice, a gather once."""
        around = {"all-reduce": 2}
        hops = sum(around.get(each.kind, 1) * (layout.model - 1) for each in self.collectives)
        return hops * machine.hop_seconds


def plan(subject: Subject, layout: Layout, load: Load) -> Plan:
    """By formula: sizes from the rule that `jaxkv.parallel` shards by, collectives from where it does."""
    config, size = subject.config, layout.model
    mesh: Any = jax.sharding.AbstractMesh((size,), (MODEL,))
    params = abstract_params(config, WEIGHT)
    sizes = jax.tree.map(
        lambda leaf, where: math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        params,
        weight_shardings(params, config, mesh),
    )
    weights = sum(jax.tree.leaves(sizes)) + subject.paper_weights * KV_ITEM / size
    looked_up = 0 if params.unembed is None else sizes.embed
    heads = config.num_kv_heads % size == 0
    kv = load.batch * load.context * config.kv_bytes_per_token(KV_ITEM) / (size if heads else 1)
    return Plan(
        weights=weights,
        read_weights=weights - looked_up,
        kv=kv,
        state=load.batch * subject.paper_state / size,
        collectives=tuple(expected(subject, size, load.batch)),
    )


def expected(subject: Subject, size: int, batch: int, dtype: Any = WEIGHT) -> list[Collective]:
    """The collectives of a decode step: one after each product over a split dimension, and the logits."""
    config = subject.config
    if size == 1:
        return []
    heads, mlp, vocab = (n % size == 0 for n in (config.num_kv_heads, config.mlp_dim, config.vocab_size))
    row = Collective("all-reduce", batch * config.embed_dim * 4)
    found = [row] * (config.num_layers * (heads + mlp) + subject.paper_reduces)
    if vocab:  # an embedding has the weights' dtype, logits are float32
        item = jnp.dtype(dtype).itemsize
        found.append(Collective("all-reduce", batch * config.embed_dim * item))
        found.append(Collective("all-gather", batch * config.vocab_size * 4))
    return found
