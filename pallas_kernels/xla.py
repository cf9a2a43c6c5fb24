"""The operations in XLA, for every platform: blocks of table entries folded into an online softmax.

What `implementation="xla"` runs, and what "auto" falls back to. `reference.py` says what it must equal.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_attention
from pallas_kernels.reference import append, dequantize, gather_rows, relocate_pages

Array = Any

__all__ = ["append", "paged_attention", "relocate_pages"]

# A large number, not -inf, so that exp(masked - peak) is 0 and never NaN. The running maximum starts above
# a masked score: a row that has seen nothing yet adds nothing.
MASKED = -1e30
PEAK = -1e20
NOWHERE = 2**30  # position of a slot that nobody may read


def key_positions(page_size: int, first: Array, lo: Array, hi: Array, last: Array) -> Array:
    """Where every slot of a table stands: i32[B, M, P], NOWHERE if not owned or behind `last`, i32[B].

    A slot behind a sequence's last query may not be written yet, and no query sees it.
    """
    slot = jnp.arange(page_size, dtype=jnp.int32)
    where = first[..., None] + slot
    readable = (slot >= lo[..., None]) & (slot < hi[..., None]) & (where <= last[:, None, None])
    return jnp.where(readable, where, NOWHERE)


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
    """`reference.paged_attention`, block by block; trailing blocks that hold nothing readable are skipped."""
    check_attention(q, kv, page, first, lo, hi, delta_index, positions, scale, window, soft_cap)
    batch, _, length, kv_heads, group, head_dim = q.shape
    blocks, size = delta_index.shape[1], kv.shape[2]
    block = page.shape[1] // blocks
    where = key_positions(size, first, lo, hi, positions.max(1)).reshape(batch, blocks, -1)
    used = jnp.any(where < NOWHERE, axis=(0, 2))
    count = jnp.max(jnp.where(used, jnp.arange(blocks, dtype=jnp.int32) + 1, 0))
    # One matrix of queries a KV head: [B, R, K, G·T, H].
    q = q.transpose(0, 1, 3, 4, 2, 5).reshape(batch, -1, kv_heads, group * length, head_dim)
    # Few queries: rows K|V are read whole by a query padded with zeros. Many: splitting rows costs less.
    whole = length * group < 32
    if whole:
        q = jnp.pad(q, ((0, 0),) * 4 + ((0, head_dim),))
    at = positions[:, :, None]

    def fold(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        here = jax.lax.dynamic_index_in_dim(where, i, axis=1, keepdims=False)
        rows = dequantize(
            *gather_rows(kv, scale, jax.lax.dynamic_slice_in_dim(page, i * block, block, axis=1))
        )
        rows = jnp.where((here < NOWHERE).reshape(batch, block, 1, size, 1), rows, 0.0)
        rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, block * size, -1)
        which = jax.lax.dynamic_slice_in_dim(delta_index, i, 1, axis=1)
        query = jnp.take_along_axis(q, which[:, :, None, None, None], axis=1)[:, 0]
        seen = here[:, None] <= at
        if window is not None:
            seen &= here[:, None] > at - window
        scores = jnp.einsum("bkqh,bksh->bkqs", query, rows if whole else rows[..., :head_dim])
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = scores.reshape(batch, kv_heads, group, length, -1)
        scores = jnp.where(seen[:, None, None], scores, MASKED).reshape(batch, kv_heads, group * length, -1)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.exp(scores - new_peak[..., None])
        keep = jnp.exp(peak - new_peak)
        values = rows if whole else rows[..., head_dim:]
        acc = acc * keep[..., None] + jnp.einsum("bkqs,bksh->bkqh", weights, values)
        return new_peak, total * keep + weights.sum(-1), acc

    shape = (batch, kv_heads, group * length)
    width = 2 * head_dim if whole else head_dim
    start = (
        jnp.full(shape, PEAK, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, width), jnp.float32),
    )
    _, total, acc = jax.lax.fori_loop(0, count, fold, start)
    out = acc[..., -head_dim:] / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(batch, kv_heads, group, length, head_dim).transpose(0, 3, 1, 2, 4)
