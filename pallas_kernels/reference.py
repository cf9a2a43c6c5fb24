"""What the kernels mean: plain XLA, everything gathered, full scores. Slow on purpose.

Letters: B sequences, T query tokens, M table entries, R deltas, K KV heads, G query heads a KV head,
P page size, H head dimension, X rows of the page array (layers · pages).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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
) -> Array:
    """Causal attention of B sequences over the slots that their tables name.

    Slot s of entry m stands at position `first[b, m] + s` and belongs to the sequence if
    `lo[b, m] <= s < hi[b, m]`. A query sees a slot that stands at or before its own position. Entries come
    in blocks of M / delta_index.shape[1]; the queries of block j are `q[b, delta_index[b, j]]`, rotated by
    the caller at position - delta, so that keys are read as they were born.

    Args:
      q: f32[B, R, T, K, G, H], scaled.
      kv: [X, K, P, 2H], keys | values on the last axis.
      page: i32[B, M], rows of kv; any value where hi <= lo.
      first, lo, hi: i32[B, M].
      delta_index: i32[B, M/block].
      positions: i32[B, T] of the queries.

    Returns:
      f32[B, T, K, G, H]; zeros where a query sees nothing.
    """
    batch, _, length, kv_heads, group, head_dim = q.shape
    size, block = kv.shape[2], page.shape[1] // delta_index.shape[1]
    slot = jnp.arange(size)
    owned = (slot >= lo[..., None]) & (slot < hi[..., None])
    where = first[..., None] + slot
    seen = owned[:, None] & (where[:, None] <= positions[:, :, None, None])
    rows = jnp.asarray(kv).at[page].get(mode="clip").astype(jnp.float32)
    rows = jnp.where((owned & seen.any(1))[:, :, None, :, None], rows, 0.0)
    keys, values = rows[..., :head_dim], rows[..., head_dim:]
    which = jnp.repeat(delta_index, block, axis=1)
    query = jnp.take_along_axis(jnp.asarray(q), which[:, :, None, None, None, None], axis=1)
    scores = jnp.einsum("bmtkgh,bmksh->btkgms", query, keys)
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    scores = scores.reshape(batch, length, kv_heads, group, -1)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).reshape(batch, length, kv_heads, group, -1, size)
    return jnp.einsum("btkgms,bmksh->btkgh", weights, values)


def append(kv: Array, row: Array, slot: Array, keys: Array, values: Array) -> Array:
    """Writes new tokens into their slots.

    Args:
      kv: [X, K, P, 2H].
      row: i32[n], X or more drops the write.
      slot: i32[n].
      keys, values: [n, K, H].
    """
    rows = jnp.concatenate([keys, values], -1).astype(kv.dtype)
    return jnp.asarray(kv).at[row, :, slot].set(rows, mode="drop")


def relocate(
    kv: Array, source: tuple[Array, Array], target: tuple[Array, Array], cos: Array, sin: Array
) -> Array:
    """Copies slots with their keys rotated: K' = R K, V' = V, in float32.

    Args:
      kv: [X, K, P, 2H].
      source, target: (row i32[n], slot i32[n]); a target row of X or more drops the copy.
      cos, sin: f32[n, rotary_dim/2] of each token's delta, half-split convention.
    """
    rows = jnp.asarray(kv).at[source[0], :, source[1]].get(mode="clip").astype(jnp.float32)
    head_dim, half = kv.shape[-1] // 2, cos.shape[-1]
    x1, x2 = rows[..., :half], rows[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    keys = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rows[..., 2 * half : head_dim]], -1)
    return append(kv, *target, keys, jax.lax.slice_in_dim(rows, head_dim, 2 * head_dim, axis=-1))
