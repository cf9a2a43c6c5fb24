"""States of recurrent layers on the device: slots that a step reads and slots that it writes.

A state is everything that a recurrent layer keeps of the tokens before: it has no positions, cannot be cut
and is large (150 MB for a 27B hybrid), so it has a pool of its own and is never part of a page. A slot holds
the state of all recurrent layers behind one token. A snapshot is nothing but a slot that no step writes
again. Layers are addressed as `slot + layer·num_slots`, as in `KVPages`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.cache.dtypes import check_dtype
from jaxkv.cache.pages import KVPages, storage_dtype
from jaxkv.errors import ConfigError
from jaxkv.model.config import ModelConfig
from jaxkv.typing import Array


@struct.dataclass(kw_only=True)
class StatePool:
    """The states of a model's recurrent layers. A slot addresses the same place in every layer."""

    conv: Array  # storage[Lr·num_slots, C, k-1], last inputs of the convolution, oldest first
    state: Array  # f32[Lr·num_slots, Hv, Dk, Dv]
    operator: Array | None = None  # f32[Lr·num_slots, Hv, Dk, Dk], of the tokens since the state before
    num_slots: int = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)  # of conv: that of the weights, whose outputs it holds

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(self))


# What a step is given and gives back: a `KVPages` per layer group, then a `StatePool` if there is one.
Pages: TypeAlias = tuple[Any, ...]


def kv_groups(pages: Pages) -> tuple[KVPages, ...]:
    """The pages of the layer groups, without the states."""
    return tuple(held for held in pages if isinstance(held, KVPages))


def spent(pages: Pages) -> bool:
    """Whether any array was donated to a step."""
    leaves = jax.tree.leaves(pages)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


class States(NamedTuple):
    """What one layer has in some slots."""

    conv: Array  # f32[B, C, k-1]
    state: Array  # f32[B, Hv, Dk, Dv]
    operator: Array | None = None  # f32[B, Hv, Dk, Dk]


def make_states(
    config: ModelConfig,
    *,
    num_slots: int,
    dtype: str = "float32",
    operators: bool = False,
    platform: str | None = None,
) -> StatePool:
    """Returns zeroed states for the recurrent layers of `config`.

    Args:
      config: a model with recurrent layers.
      num_slots: snapshots and running sequences that fit, at least 1.
      dtype: of the weights; a state itself is float32.
      operators: keep transition operators too.
      platform: whose way of storing bfloat16 is used, see `storage_dtype`.

    Raises:
      ConfigError: the model has no recurrent layer, or `num_slots` or `dtype` is out of range.
    """
    shape = config.recurrent
    if shape is None:
        raise ConfigError("recurrent is None, expected a model with recurrent layers")
    if num_slots <= 0:
        raise ConfigError(f"num_states is {num_slots}, expected a positive number")
    rows = len(config.recurrent_layers) * num_slots
    storage = storage_dtype(check_dtype(dtype), platform or jax.default_backend())
    heads = (rows, shape.num_value_heads, shape.key_dim)
    return StatePool(
        conv=jnp.zeros((rows, shape.channels, shape.conv_width - 1), storage),
        state=jnp.zeros((*heads, shape.value_dim), jnp.float32),
        operator=jnp.zeros((*heads, shape.key_dim), jnp.float32) if operators else None,
        num_slots=num_slots,
        dtype=dtype,
    )


def _rows(pool: StatePool, layer: int, slots: Array) -> Array:
    """Rows of the arrays; a slot outside the pool leaves them as a whole, not into the next layer."""
    known = (slots >= 0) & (slots < pool.num_slots)
    return jnp.where(known, slots + layer * pool.num_slots, pool.state.shape[0])


def read_states(pool: StatePool, layer: int, slots: Array, fresh: Array | None = None) -> States:
    """What one layer has in slots i32[B].

    `num_slots`, like any slot outside the pool, reads zeros: the state before the first token. Where
    `fresh` bool[B], and there, the operator is the identity.
    """
    rows = _rows(pool, layer, slots)
    conv = pool.conv.at[rows].get(mode="fill", fill_value=0)
    if conv.dtype != jnp.dtype(pool.dtype):
        conv = jax.lax.bitcast_convert_type(conv, jnp.dtype(pool.dtype))
    state = pool.state.at[rows].get(mode="fill", fill_value=0)
    operator = None
    if pool.operator is not None:
        begins = rows == pool.state.shape[0]
        begins = begins if fresh is None else begins | fresh
        stored = pool.operator.at[rows].get(mode="fill", fill_value=0)
        identity = jnp.eye(stored.shape[-1], dtype=jnp.float32)
        operator = jnp.where(begins[:, None, None, None], identity, stored)
    return States(conv.astype(jnp.float32), state, operator)


def write_states(pool: StatePool, layer: int, slots: Array, states: States) -> StatePool:
    """Writes slots i32[B] of one layer, in place when the pool is donated.

    A slot outside the pool, such as `num_slots`, drops the write. Rows must write different slots.
    """
    rows = _rows(pool, layer, slots)
    values = states.conv.astype(pool.dtype)
    if values.dtype != pool.conv.dtype:
        values = jax.lax.bitcast_convert_type(values, pool.conv.dtype)
    operator = pool.operator
    if operator is not None and states.operator is not None:
        operator = operator.at[rows].set(states.operator, mode="drop")
    return pool.replace(  # type: ignore[attr-defined]
        conv=pool.conv.at[rows].set(values, mode="drop"),
        state=pool.state.at[rows].set(states.state, mode="drop"),
        operator=operator,
    )


def compose_states(
    pool: StatePool, start: Array, source: Array, chain: Array, end: Array, target: Array
) -> StatePool:
    """The state behind a span whose tokens are not run: S_end + O_m … O_1 (S_start − S_source).

    A state changes by a product and a sum with each token, S -> O S + B. Of a span that ran behind
    `source` and left `end`, B is S_end − O S_source. The last convolution inputs are the span's.

    Args:
      pool: with operators; donate it.
      start, source, end, target: i32[] slots: the state in front of the span now, that in front of it
        when it ran, that behind it then, and where the result goes.
      chain: i32[m], slots whose operators lead from `source` to `end`, in order; the number of slots for
        none.
    """
    for layer in range(pool.state.shape[0] // pool.num_slots):
        at = jnp.stack([start, source, end])
        conv, state, _ = read_states(pool, layer, at)
        steps = read_states(pool, layer, chain).operator
        assert steps is not None

        def apply(change: Array, step: Array) -> tuple[Array, None]:
            return jnp.matmul(step, change, precision=jax.lax.Precision.HIGHEST), None

        change, _ = jax.lax.scan(apply, state[0] - state[1], steps)
        identity = jnp.broadcast_to(jnp.eye(steps.shape[-1], dtype=jnp.float32), steps.shape[1:])
        made = States(conv[2:], (state[2] + change)[None], identity[None])
        pool = write_states(pool, layer, target[None], made)
    return pool


def poison_states(pool: StatePool, slots: Array) -> StatePool:
    """Fills whole slots with NaN in every layer, so that a stray read of a free slot shows. For tests."""
    layers = pool.state.shape[0] // pool.num_slots
    rows = (jnp.arange(layers, dtype=jnp.int32)[:, None] * pool.num_slots + slots).reshape(-1)
    bad = jnp.full((rows.shape[0], *pool.conv.shape[1:]), jnp.nan, jnp.dtype(pool.dtype))
    if bad.dtype != pool.conv.dtype:
        bad = jax.lax.bitcast_convert_type(bad, pool.conv.dtype)
    operator = None if pool.operator is None else pool.operator.at[rows].set(jnp.nan)
    return pool.replace(  # type: ignore[attr-defined]
        conv=pool.conv.at[rows].set(bad), state=pool.state.at[rows].set(jnp.nan), operator=operator
    )
