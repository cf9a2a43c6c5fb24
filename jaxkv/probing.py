"""Answers probes on the device: what is cached against what would be fresh, who attended what.

Everything here reads pages, or writes slots that are given back before the answer is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxkv.cache.pages import KVPages, read_slots
from jaxkv.cache.sequence import FIRST, HI, LO, PAGE, Sequence, clip, slots_of
from jaxkv.cache.table import bucket
from jaxkv.errors import ConfigError
from jaxkv.execute import compute
from jaxkv.memory import Memory
from jaxkv.model.attention import MASKED
from jaxkv.model.config import ModelConfig, RopeConfig
from jaxkv.model.layers import rms_norm
from jaxkv.model.params import LayerParams, Params
from jaxkv.model.rope import rope_angles, rotate
from jaxkv.parallel import to_host
from jaxkv.recurrent import refuse
from jaxkv.reuse.ledger import attended_flops, token_flops
from jaxkv.reuse.policies import Edit, Policy
from jaxkv.reuse.policies.base import ranges
from jaxkv.reuse.probes import Attention, Deviation, Encoded, Probe
from jaxkv.typing import Array, Bool, Float32, Int32
from jaxkv.windows import refuse_bound

_PAIRS = 1 << 20  # queries × keys of one attention probe step: bounds its temporaries
_RIDGE = 1e-6  # of the mean diagonal: keeps the least squares of float32 weights solvable


class Prober:
    """Runs what a policy asks about one edit. An answer that is wanted again costs nothing."""

    def __init__(
        self,
        memory: Memory,
        params: Params,
        sequence: Sequence,
        tokens: Int32,
        *,
        chunk_size: int,
        max_deltas: int,
        encode: Callable[[str], Any] | None,
        trial: Callable[[Policy], tuple[Any, float]],
    ) -> None:
        self._memory, self._params = memory, params
        self._sequence, self._tokens = sequence, tokens
        self._chunk_size, self._max_deltas = chunk_size, max_deltas
        self._encode, self._trial = encode, trial
        self._known: dict[Probe, Any] = {}
        self.shapes: set[tuple[Any, ...]] = set()  # static shapes that ran

    def __call__(self, edit: Edit, probe: Probe) -> tuple[Any, float]:
        """The evidence, and the FLOPs it cost."""
        if probe in self._known:
            return self._known[probe], 0.0
        answer, flops = self._answer(edit, probe)
        self._known[probe] = answer
        return answer, flops

    def _answer(self, edit: Edit, probe: Probe) -> tuple[Any, float]:
        if not isinstance(probe, Encoded):
            refuse(self._memory.config, f"the probe {type(probe).__name__}", "a policy that asks nothing")
        if isinstance(probe, Deviation):
            return self._deviation(edit, probe.layer)
        if isinstance(probe, Attention):
            return self._attention(edit, probe.depths)
        if isinstance(probe, Encoded):
            ids = self._encode(probe.text) if self._encode else []
            return np.asarray(ids, np.int32), 0.0
        return self._trial(probe.policy)

    def _deviation(self, edit: Edit, layer: int) -> tuple[Float32, float]:
        memory, config, sequence = self._memory, self._memory.config, self._sequence
        if layer >= config.num_layers:
            raise ConfigError(f"layer is {layer}, expected one of the model's 0 to {config.num_layers - 1}")
        found = np.full(edit.new_length, np.nan, np.float32)
        positions = np.arange(edit.prefix, edit.new_length, dtype=np.int32)
        if not len(positions):
            return found, 0.0
        # The model cut off behind the layer: what it writes there depends on no later one.
        short = config.first_layers(layer + 1)
        done = compute(
            memory,
            self._params.replace(layers=self._params.layers[: layer + 1]),  # type: ignore[attr-defined]
            segments=clip(sequence.segments, 0, edit.prefix),
            attended=clip(sequence.table_segments, 0, edit.prefix),
            tokens=self._tokens[positions],
            positions=positions,
            rotate=sequence.rotate,
            max_deltas=self._max_deltas,
            chunk_size=self._chunk_size,
        )
        self.shapes |= {(*shape, "cut", layer) for shape in done.shapes}
        self.shapes.add(("changes", bucket(len(positions), 256)))
        try:
            old, where = survivors(edit)
            cached = Places.of(memory, sequence).at(old)
            there = cached.slots >= 0
            where = where[there]
            fresh = Places(where, done.placement.slots[where - edit.prefix], where)
            dk, k, dv, v = squared_changes(memory, layer, fresh, cached.take(there))
        finally:
            memory.release(done.placement.fresh)
        if len(where):
            scale_k, scale_v = (max(float(x.mean()), 1e-30) for x in (k, v))
            found[where] = dk / scale_k + dv / scale_v
        keys = positions.astype(np.int64) + 1
        return found, float(token_flops(short) * len(positions)) + attended_flops(short, keys)

    def _attention(self, edit: Edit, depths: tuple[float, ...]) -> tuple[Float32, float]:
        found = np.zeros(edit.new_length, np.float32)
        gone = edit.deleted
        if not gone.any():
            return found, 0.0
        old, new = survivors(edit)
        places = Places.of(self._memory, self._sequence)
        # Nobody attends what comes later; a token without KV has nothing to recover a query from.
        asked = (old > int(np.argmax(gone))) & (places.at(old).slots >= 0)
        flops = 0.0
        self.shapes.add(("mass", bucket(len(places.slots), 256), bucket(int(asked.sum()), 16)))
        for layer in layers_at(depths, self._memory.config):
            mass, cost = attention_mass(
                self._memory, self._params, places, old[asked], gone, layer=layer, heads="max"
            )
            found[new[asked]] = np.maximum(found[new[asked]], mass)
            flops += cost
        return found, flops


@dataclasses.dataclass(frozen=True)
class Places:
    """Where tokens stand, the slots of their KV as born (-1: none), and where those were born."""

    stands: Int32  # i32[n]
    slots: Int32  # i32[n]
    births: Int32  # i32[n]

    @classmethod
    def of(cls, memory: Memory, sequence: Sequence) -> Places:
        """All tokens of a sequence that have KV, by position."""
        segments = sequence.segments
        stands, slots = slots_of(segments, memory.pool.page_size)
        moved = segments[:, FIRST] - memory.pool.birth[segments[:, PAGE]]
        births = stands - np.repeat(moved, segments[:, HI] - segments[:, LO])
        return cls(stands, slots, births.astype(np.int32))

    def at(self, positions: Int32) -> Places:
        """The places of `positions`, in their order."""
        index = np.searchsorted(self.stands, positions).clip(max=max(len(self.stands) - 1, 0))
        known = np.zeros(len(positions), np.bool_)
        if len(self.stands):
            known = self.stands[index] == positions
        slots = np.where(known, self.slots[index], -1) if len(self.stands) else np.full(len(positions), -1)
        births = np.where(known, self.births[index], 0) if len(self.stands) else np.zeros(len(positions))
        return Places(positions, slots.astype(np.int32), births.astype(np.int32))

    def take(self, rows: Bool) -> Places:
        """The places of some rows."""
        return Places(self.stands[rows], self.slots[rows], self.births[rows])


def survivors(edit: Edit) -> tuple[Int32, Int32]:
    """Old and new positions of the tokens that survive behind the prefix, i32[n] each."""
    return (
        ranges([s.old for s in edit.survivors], [s.old + s.length for s in edit.survivors]),
        ranges([s.new for s in edit.survivors], [s.new + s.length for s in edit.survivors]),
    )


def layers_at(depths: tuple[float, ...], config: ModelConfig) -> tuple[int, ...]:
    """Layer numbers at shares of the model's depth; layer 0, which is never stale, only if it is alone."""
    first = min(1, config.num_layers - 1)
    return tuple(dict.fromkeys(max(first, int(depth * config.num_layers)) for depth in depths))


def squared_changes(
    memory: Memory, layer: int, fresh: Places, cached: Places
) -> tuple[Float32, Float32, Float32, Float32]:
    """‖ΔK‖², ‖K‖², ‖ΔV‖², ‖V‖² of tokens at one layer, f32[n] each; keys compared as un-rotated.

    Raises:
      ConfigError: the layer is local and its pages are bounded.
    """
    count = len(fresh.slots)
    if not count:
        nothing = np.zeros(0, np.float32)
        return nothing, nothing, nothing, nothing
    padded = np.zeros((3, bucket(count, 256)), np.int32)
    padded[:, :count] = fresh.slots, cached.slots, fresh.births - cached.births
    group, index = _whole(memory, layer)
    found = _changes(memory.pages[group], jnp.int32(index), *padded, config=memory.config, group=group)
    a, b, c, d = (to_host(x)[:count] for x in found)
    return a, b, c, d


def attention_mass(
    memory: Memory,
    params: Params,
    places: Places,
    queries: Int32,
    counted: Bool,
    *,
    layer: int,
    heads: str,
) -> tuple[Float32, float]:
    """How much of each query token's attention falls on counted tokens, f32[q], and the FLOPs.

    The query is recovered from the token's own cached key and value, see `probes.Attention`.

    Args:
      memory: the pages.
      params: weights.
      places: the tokens that are attended.
      queries: i32[q], positions among `places`.
      counted: bool[n], by position.
      layer: where the attention is read.
      heads: "max" for the head that attends most, "mean" for all.

    Raises:
      ConfigError: the layer is local and its pages are bounded.
    """
    config = memory.config
    result = np.zeros(len(queries), np.float32)
    if not len(queries):
        return result, 0.0
    group, index = _whole(memory, layer)
    recover = _recovery(params.layers[layer], config=config)
    size = bucket(len(places.slots), 256)
    keys = np.zeros((3, size), np.int32)
    keys[2] = np.iinfo(np.int32).max  # padding stands behind every query
    keys[:, : len(places.slots)] = places.slots, places.stands - places.births, places.stands
    marked = np.zeros(size, np.bool_)
    marked[: len(places.slots)] = counted[places.stands]
    chunk = min(max(16, min(512, bucket(max(_PAIRS // size, 1)))), bucket(len(queries), 16))
    asked = places.at(queries)
    for start in range(0, len(queries), chunk):
        part = slice(start, start + chunk)
        rows = np.zeros((3, chunk), np.int32)
        count = len(queries[part])
        rows[:, :count] = asked.slots[part], asked.births[part], asked.stands[part]
        mass = _mass(
            memory.pages[group], jnp.int32(index), recover, rows, keys, marked, config=config, group=group
        )
        mass = to_host(mass)[:count]
        result[part] = mass.max(axis=1) if heads == "max" else mass.mean(axis=1)
    width = (1 if config.qk_norm else 2) * config.num_kv_heads * config.head_dim
    size_q, dim = config.num_heads * config.head_dim, config.embed_dim
    solve = 2 * dim * width * (width + size_q) + 2 * width**3 // 3 + 2 * width**2 * size_q
    attended = np.searchsorted(places.stands, queries, side="right").sum()
    return result, float(solve + 2 * width * size_q * len(queries) + 2 * size_q * int(attended))


def _whole(memory: Memory, layer: int) -> tuple[int, int]:
    """The group of a layer and its index in it, if the group holds the KV of every token."""
    group, index = memory.config.group_of(layer)
    if memory.config.groups[group].window:
        refuse_bound(memory, "looking at cached KV layer by layer")
    return group, index


@struct.dataclass(kw_only=True)
class _Recovery:
    """From a token's un-rotated key and value to its queries: state · weight + offset."""

    weight: Array  # f32[S, K·G·H], S = 2·K·H, or K·H where values alone are read
    offset: Array  # f32[K·G·H]
    norm: Array | None  # f32[H], of queries


def _turned(keys: Array, turn: Array, rope: RopeConfig, most: int, magnitude: float = 1.0) -> Array:
    """R(turn) keys, of f32[n, K, H] and i32[n], for turns of either sign up to `most`."""
    cos, sin = rope_angles(jnp.abs(turn), rope, most)
    sign = jnp.sign(turn).astype(jnp.float32)[:, None]
    return rotate(keys, cos[:, None], (sin * sign)[:, None], magnitude=magnitude)


@functools.partial(jax.jit, static_argnames=("config", "group"))
def _changes(
    pages: KVPages,
    layer: Array,
    fresh: Array,
    cached: Array,
    turn: Array,
    *,
    config: ModelConfig,
    group: int,
) -> tuple[Array, ...]:
    head_dim, rope = config.head_dim, config.groups[group].rope
    a, b = (read_slots(pages, layer, slots).astype(jnp.float32) for slots in (fresh, cached))
    moved = _turned(b[..., :head_dim], turn, rope, 2 * config.max_positions)

    def squared(x: Array) -> Array:
        return jnp.sum(x * x, axis=(1, 2))

    keys, values = a[..., :head_dim], a[..., head_dim:]
    return squared(keys - moved), squared(keys), squared(values - b[..., head_dim:]), squared(values)


@functools.partial(jax.jit, static_argnames=("config",))
def _recovery(layer: LayerParams, *, config: ModelConfig) -> _Recovery:
    """Least squares over states. A normalized key has lost its length: then values alone are read."""
    group, dim = config.group_size, layer.qkv.shape[-1]
    first = group + 1 if config.qk_norm else group
    qkv = layer.qkv.astype(jnp.float32)
    both = qkv[:, first:].reshape(-1, dim)  # [K·2H, D], each KV head's key, then its value
    gram = both @ both.T
    ridge = _RIDGE * jnp.mean(jnp.diag(gram))
    weight = jnp.linalg.solve(
        gram + ridge * jnp.eye(gram.shape[0], dtype=jnp.float32),
        both @ qkv[:, :group].reshape(-1, dim).T,
    )
    offset = jnp.zeros(weight.shape[1], jnp.float32)
    if layer.qkv_bias is not None:
        offset = layer.qkv_bias[:, :group].reshape(-1) - layer.qkv_bias[:, first:].reshape(-1) @ weight
    return _Recovery(weight=weight, offset=offset, norm=layer.q_norm)


@functools.partial(jax.jit, static_argnames=("config", "group"))
def _mass(
    pages: KVPages,
    layer: Array,
    recover: _Recovery,
    rows: Array,
    keys: Array,
    marked: Array,
    *,
    config: ModelConfig,
    group: int,
) -> Array:
    """Attention of rows (slot, birth, stand) on marked keys (slot, turn, stand): f32[T, N]."""
    head_dim, kv_heads = config.head_dim, config.num_kv_heads
    rope, window = config.groups[group].rope, config.groups[group].window
    most = 2 * config.max_positions
    own = read_slots(pages, layer, rows[0]).astype(jnp.float32)
    state = own[..., head_dim:]
    if not config.qk_norm:
        own_keys = _turned(own[..., :head_dim], -rows[1], rope, most, 1 / rope.magnitude)
        state = jnp.concatenate([own_keys, state], -1)
    q = state.reshape(rows.shape[1], -1) @ recover.weight + recover.offset
    q = q.reshape(rows.shape[1], kv_heads, config.group_size, head_dim)
    if recover.norm is not None:
        q = rms_norm(q, recover.norm, config.norm_eps)
    cos, sin = rope_angles(rows[2], rope, config.max_positions)
    q = rotate(q * config.attention_scale, cos[:, None, None], sin[:, None, None], magnitude=rope.magnitude)
    k = read_slots(pages, layer, keys[0]).astype(jnp.float32)[..., :head_dim]
    # Slots of padding may hold anything, NaN included.
    k = jnp.where((keys[2] < np.iinfo(np.int32).max)[:, None, None], _turned(k, keys[1], rope, most), 0.0)
    scores = jnp.einsum("tkgh,skh->tkgs", q, k)
    seen = keys[2] <= rows[2][:, None]
    if window:
        seen &= keys[2] > rows[2][:, None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    mass: Array = jnp.sum(jnp.where(marked, weights, 0.0), axis=-1).reshape(rows.shape[1], -1)
    return mass
