"""Low-rank deltas on the attention projections (LoRA: Hu et al., arXiv 2106.09685), merged for serving."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import struct

from jaxkv.io.checkpoint import Model, checkpointer
from jaxkv.model.config import ModelConfig
from jaxkv.model.params import Params, params_digest
from jaxkv.typing import Array


@struct.dataclass(kw_only=True)
class LoraLayer:
    qkv_in: Array  # f32[D, r]
    qkv_out: Array  # f32[r, K, G+2, H]
    out_in: Array  # f32[N, H, r]
    out_out: Array  # f32[r, D]


Lora = tuple[LoraLayer, ...]  # one a layer


def init_lora(config: ModelConfig, rank: int, seed: int) -> Lora:
    """Deltas of zero: the inner factor is normal / sqrt(fan-in), the outer one 0."""
    rng = np.random.default_rng([seed, 11])
    d, k, g, h = config.embed_dim, config.num_kv_heads, config.group_size, config.head_dim
    n = config.num_heads

    def normal(*shape: int, fan_in: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(fan_in)))

    return tuple(
        LoraLayer(
            qkv_in=normal(d, rank, fan_in=d),
            qkv_out=jnp.zeros((rank, k, g + 2, h), jnp.float32),
            out_in=normal(n, h, rank, fan_in=n * h),
            out_out=jnp.zeros((rank, d), jnp.float32),
        )
        for _ in range(config.num_layers)
    )


def merge(params: Params, lora: Lora, scale: float) -> Params:
    """Weights with the deltas added: W + scale · in · out, in float32, rounded to the weights' dtype.

    Differentiable in `lora`. A merged model serves like any other: nothing is left to apply at run time.
    """

    def add(weight: Array, delta: Array) -> Array:
        return (weight.astype(jnp.float32) + jnp.float32(scale) * delta).astype(weight.dtype)

    layers = tuple(
        layer.replace(  # type: ignore[union-attr]
            qkv=add(layer.qkv, jnp.einsum("dr,rkgh->kghd", delta.qkv_in, delta.qkv_out)),
            out=add(layer.out, jnp.einsum("nhr,rd->dnh", delta.out_in, delta.out_out)),
        )
        for layer, delta in zip(params.layers, lora, strict=True)
    )
    merged: Params = params.replace(layers=layers)  # type: ignore[attr-defined]
    return merged


def merged_model(model: Model, lora: Lora, scale: float) -> Model:
    """`model` with the deltas in its weights: another weights digest, so another cache contract."""
    params = merge(model.params, lora, scale)
    return dataclasses.replace(
        model,
        params=params,
        name=f"{model.name}+{lora_digest(lora)[:8]}",
        weights_digest=params_digest(params),
        source=f"{model.source}, with a low-rank adapter",
    )


def lora_digest(lora: Lora) -> str:
    """SHA-256 over shapes and values, hex: what an adapter is called in a cache contract."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(lora):
        value = np.asarray(leaf)
        digest.update(f"{value.shape}".encode() + value.tobytes())
    return digest.hexdigest()


def count(lora: Lora) -> int:
    """Trained numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(lora))


def save_tree(path: Path, tree: object) -> None:
    """Writes a pytree of arrays as an Orbax checkpoint; Orbax writes aside and renames."""
    with checkpointer() as writer:
        writer.save(path.absolute(), args=ocp.args.PyTreeSave(tree), force=True)


def load_tree(path: Path, like: object) -> object:
    """Reads what `save_tree` wrote, in the shape of `like`."""
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    with checkpointer() as reader:
        return reader.restore(path.absolute(), args=ocp.args.PyTreeRestore(like, restore_args=arguments))
