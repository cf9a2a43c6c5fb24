"""What the kernels mean: plain XLA, everything gathered, full scores. Slow on purpose.

Letters: B sequences, T query tokens, M table entries, R deltas, K KV heads, G query heads a KV head,
P page size, H head dimension, X rows of the page array (layers · pages), n tokens or moves.

Pages are float32, bfloat16, float8_e4m3fn or int8. With `scale` f32[K, X', S], X' >= X and S >= 2P, the key
in slot s of page x is worth `stored · scale[k, x, s]` and the value `stored · scale[k, x, P + s]`, one factor
a slot and head. int8 pages need it, float8 pages may have it, float32 and bfloat16 pages never do.
"""

from __future__ import annotations

from typing import Any, overload

import jax.numpy as jnp

from pallas_kernels.checks import check_append, check_attention, check_relocate, check_relocate_pages
from pallas_kernels.scales import put_pages, put_slots, scales_of_pages, scales_of_slots

Array = Any


def paged_attention(
    q: Array,
    kv: Array,
    page: Array,
    first: Array,
    lo: Array,
    hi: Array,
    delta_index: Array,
    positions: Array,
    *,
    scale: Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Causal attention of B sequences over the slots that their tables name.

    Slot s of entry m stands at position `first[b, m] + s` and belongs to the sequence if `lo[b, m] <= s <
    hi[b, m]`; those that do stand at 0 or later. A query sees a slot that stands at or before its own
    position and, with a window, after `position - window`. Entries come in blocks of M /
    delta_index.shape[1]; the queries of block j are `q[b, delta_index[b, j]]`, rotated by the caller at
    position - delta, so that keys are read as they were born.

    Args:
      q: f32[B, R, T, K, G, H], scaled.
      kv: [X, K, P, 2H], keys | values on the last axis.
      page: i32[B, M], rows of kv; any value where hi <= lo.
      first, lo, hi: i32[B, M].
      delta_index: i32[B, M/block].
      positions: i32[B, T] of the queries; a negative one sees nothing.
      scale: f32[K, X', S] of quantized pages.
      window: positions a query sees, its own included; None for all.
      soft_cap: scores become `soft_cap · tanh(score / soft_cap)`.

    Returns:
      f32[B, T, K, G, H]; zeros where a query sees nothing.

    Raises:
      ValueError: a shape, a dtype, `window` or `soft_cap` is not as above.
    """
    check_attention(q, kv, page, first, lo, hi, delta_index, positions, scale, window, soft_cap)
    batch, _, length, kv_heads, group, head_dim = q.shape
    size, block = kv.shape[2], page.shape[1] // delta_index.shape[1]
    slot = jnp.arange(size)
    owned = (slot >= lo[..., None]) & (slot < hi[..., None])
    where = (first[..., None] + slot)[:, None]
    at = positions[:, :, None, None]
    seen = owned[:, None] & (where <= at)
    if window is not None:
        seen &= where > at - window
    rows = dequantize(*gather_rows(kv, scale, page))
    # Slots of others, and slots not written yet, may hold anything: 0 · NaN is NaN.
    rows = jnp.where((owned & seen.any(1))[:, :, None, :, None], rows, 0.0)
    keys, values = rows[..., :head_dim], rows[..., head_dim:]
    which = jnp.repeat(delta_index, block, axis=1)
    query = jnp.take_along_axis(jnp.asarray(q), which[:, :, None, None, None, None], axis=1)
    scores = jnp.einsum("bmtkgh,bmksh->btkgms", query, keys)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    scores = scores.reshape(batch, length, kv_heads, group, -1)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).reshape(batch, length, kv_heads, group, -1, size)
    return jnp.einsum("btkgms,bmksh->btkgh", weights, values)


@overload
def append(
    kv: Array, row: Array, slot: Array, keys: Array, values: Array, *, scale: None = None
) -> Array: ...


@overload
def append(
    kv: Array,
    row: Array,
    slot: Array,
    keys: Array,
    values: Array,
    *,
    scale: Array,
    value_scale: Array | None = None,
) -> tuple[Array, Array]: ...


def append(
    kv: Array,
    row: Array,
    slot: Array,
    keys: Array,
    values: Array,
    *,
    scale: Array | None = None,
    value_scale: Array | None = None,
) -> Any:
    """Writes new tokens into their slots. In place when `kv` (and `scale`) are donated.

    Args:
      kv: [X, K, P, 2H].
      row: i32[n]; a row outside 0..X-1 drops the write.
      slot: i32[n]; so does a slot outside 0..P-1.
      keys, values: float[n, K, H].
      scale: f32[K, X', S]; then keys and values are quantized, each token and head by its largest
        absolute value.
      value_scale: f32[n, K]; what values are divided by instead. Numbers that were stored with it, and
        dequantized, are stored again as they were.

    Returns:
      kv, or (kv, scale) when scale is given.

    Raises:
      ValueError: a shape does not fit, or the pages' dtype and `scale` do not go together.
    """
    check_append(kv, row, slot, keys, values, scale, value_scale)
    if not row.shape[0]:
        return unchanged(kv, scale)
    kv = jnp.asarray(kv)
    row = inside(row, kv.shape[0], slot, kv.shape[2])
    if scale is None:
        stored = jnp.concatenate([cast(keys, kv.dtype), cast(values, kv.dtype)], -1)
        return kv.at[row, :, slot].set(stored, mode="drop")
    (keys, of_key), (values, of_value) = quantize(keys, kv.dtype), quantize(values, kv.dtype, value_scale)
    factors = jnp.stack([of_key, of_value], -1)
    scale = put_slots(scale, kv, row, slot, factors)
    return kv.at[row, :, slot].set(jnp.concatenate([keys, values], -1), mode="drop"), scale


def relocate(
    kv: Array,
    source: tuple[Array, Array],
    target: tuple[Array, Array],
    cos: Array,
    sin: Array,
    *,
    scale: Array | None = None,
) -> Any:
    """Copies slots with their keys rotated: K' = R K in float32, V' = V bit for bit.

    Args:
      kv: [X, K, P, 2H].
      source, target: (row i32[n], slot i32[n]); a target outside the pages drops the copy.
      cos, sin: f32[n, rotary_dim/2] of each token's delta, half-split convention.
      scale: f32[K, X', S]; the rotated keys are quantized anew.

    Returns:
      kv, or (kv, scale) when scale is given.

    Raises:
      ValueError: a shape or dtype does not fit, or the pages' dtype and `scale` do not go together.
    """
    check_relocate(kv, source, target, cos, sin, scale)
    if not source[0].shape[0]:
        return unchanged(kv, scale)
    kv = jnp.asarray(kv)
    index = inside(source[0], kv.shape[0]), source[1]
    stored = kv.at[index[0], :, index[1]].get(mode="clip")
    old = None if scale is None else scales_of_slots(scale, *index, kv.shape[2])
    rows, factors = _turned(stored, old, cos[:, None], sin[:, None])
    row, slot = inside(target[0], kv.shape[0], target[1], kv.shape[2]), target[1]
    moved = kv.at[row, :, slot].set(rows, mode="drop")
    return moved if scale is None else (moved, put_slots(scale, kv, row, slot, factors))


def relocate_pages(
    kv: Array, source: Array, target: Array, cos: Array, sin: Array, *, scale: Array | None = None
) -> Any:
    """Copies whole pages with every key rotated: K' = R K in float32, V' = V bit for bit.

    Args:
      kv: [X, K, P, 2H].
      source: i32[n], rows of kv. No row is both a source and a target, and no target occurs twice.
      target: i32[n]; a row outside 0..X-1 drops the move.
      cos, sin: f32[n, rotary_dim/2] of each page's delta, half-split convention.
      scale: f32[K, X', S]; the rotated keys are quantized anew.

    Returns:
      kv, or (kv, scale) when scale is given. In place when they are donated.

    Raises:
      ValueError: a shape does not fit, or the pages' dtype and `scale` do not go together.
    """
    check_relocate_pages(kv, source, target, cos, sin, scale)
    if not source.shape[0]:
        return unchanged(kv, scale)
    kv, (source, target) = jnp.asarray(kv), (inside(ids, kv.shape[0]) for ids in (source, target))
    rows, factors = _turned(*gather_rows(kv, scale, source), cos[:, None, None], sin[:, None, None])
    moved = kv.at[target].set(rows, mode="drop")
    return moved if scale is None else (moved, put_pages(scale, kv, target, factors))


def unchanged(kv: Array, scale: Array | None) -> Any:
    """What an operation on no tokens returns."""
    return jnp.asarray(kv) if scale is None else (jnp.asarray(kv), jnp.asarray(scale))


def rotate_keys(keys: Array, cos: Array, sin: Array) -> Array:
    """Rotates float32 keys [..., H] by angles [..., rotary_dim/2], half-split convention."""
    half = cos.shape[-1]
    x1, x2 = keys[..., :half], keys[..., half : 2 * half]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, keys[..., 2 * half :]], -1)


def quantize(x: Array, dtype: Any, scale: Array | None = None) -> tuple[Array, Array]:
    """Returns (stored, f32 scale) of float[..., H]: the largest value becomes the dtype's largest.

    With `scale` f32[...], that one is taken.
    """
    x = jnp.asarray(x).astype(jnp.float32)
    if scale is None:
        scale = jnp.max(jnp.abs(x), -1) / largest(dtype)
    return cast(x / jnp.where(scale > 0, scale, 1.0)[..., None], dtype), scale


def cast(x: Array, dtype: Any) -> Array:
    """Rounds to the dtype of pages; what int8 and float8 cannot hold becomes their largest value."""
    dtype = jnp.dtype(dtype)
    x = jnp.asarray(x)
    if dtype.itemsize > 1:
        return x.astype(dtype)
    x = jnp.clip(x.astype(jnp.float32), -largest(dtype), largest(dtype))
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def largest(dtype: Any) -> float:
    """The largest magnitude that quantized pages use: 127 for int8, 448 for float8_e4m3fn."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def gather_rows(kv: Array, scale: Array | None, page: Array) -> tuple[Array, Array | None]:
    """Pages and scales of table entries; an entry outside the array reads some page."""
    kv = jnp.asarray(kv).at[page].get(mode="clip")
    return kv, None if scale is None else scales_of_pages(scale, page, kv.shape[-2])


def dequantize(stored: Array, scale: Array | None) -> Array:
    """float32 keys | values of stored rows [..., 2H] with scale [..., 2]."""
    rows = stored.astype(jnp.float32)
    if scale is None:
        return rows
    return rows * jnp.repeat(scale, rows.shape[-1] // 2, axis=-1)


def inside(row: Array, rows: int, slot: Array | None = None, slots: int = 0) -> Array:
    """Rows with what is outside the array made `rows`, which a scatter drops; -1 would be its last row.

    With `slot`, those too whose slot is not one of `slots`.
    """
    row = jnp.asarray(row)
    within = (row >= 0) & (row < rows)
    if slot is not None:
        slot = jnp.asarray(slot)
        within &= (slot >= 0) & (slot < slots)
    return jnp.where(within, row, rows)


def _turned(stored: Array, scale: Array | None, cos: Array, sin: Array) -> tuple[Array, Any]:
    """Stored rows [..., 2H] and factors [..., 2] with the keys rotated."""
    head_dim = stored.shape[-1] // 2
    keys, values = stored[..., :head_dim].astype(jnp.float32), stored[..., head_dim:]
    if scale is None:
        return jnp.concatenate([cast(rotate_keys(keys, cos, sin), stored.dtype), values], -1), None
    keys, key_scale = quantize(rotate_keys(keys * scale[..., :1], cos, sin), stored.dtype)
    return jnp.concatenate([keys, values], -1), jnp.stack([key_scale, scale[..., 1]], -1)
