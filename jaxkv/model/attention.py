"""Attention over paged keys and values, and the dense form it is judged by.

The paged form folds blocks of table entries into an online softmax (Milakov and Gimelshein, arXiv
1805.02867). A block in which nothing is visible changes no bit of the result, so what a sequence's
answer is does not depend on how many empty entries its table has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

import pallas_kernels
from jaxkv.cache.pages import KVPages, read_pages
from jaxkv.cache.table import PageTable
from jaxkv.model.backend import AUTO, Backend
from jaxkv.typing import Array

# Masked scores get a large number added, not -inf: exp(-inf - -inf) would be NaN in a fully masked row.
# The running maximum starts above a masked score, so that exp(masked - peak) is exactly 0.
MASKED = -1e30
PEAK = -1e20
NOWHERE = 2**30  # position of a slot that nobody may read


@struct.dataclass(kw_only=True)
class Visibility:
    """Where every slot of a table stands, once per step for all layers.

    Kept out of the attention loop on purpose: computed inside, XLA on CPU fuses it into the loop over
    scores and repeats it for every head (2 to 3 times slower prefill at context 2,048).
    """

    key_positions: Array  # i32[M/block, B, block·P]; NOWHERE for slots that no query may read
    num_blocks: Array  # i32[], blocks to fold in: the leading ones, or those that `order` begins with
    order: Array | None = None  # i32[M/block] with a window: blocks that hold anything readable first


def visibility(
    table: PageTable, positions: Array, lengths: Array, page_size: int, window: int = 0
) -> Visibility:
    """Places the slots of a table.

    A slot behind a row's last query may not be written yet, and no query sees it. With a window, nor
    does any query see what stands `window` or more positions before the row's first query; blocks of
    such slots alone are not read at all.

    Args:
      table: segments of the B sequences.
      positions: i32[B, T] of the queries.
      lengths: i32[B], valid queries of each row.
      page_size: P.
      window: positions that a query sees, its own included; 0 for all. Static.
    """
    batch, blocks = table.delta_index.shape
    valid = jnp.arange(positions.shape[1]) < lengths[:, None]
    last = jnp.max(jnp.where(valid, positions, -1), axis=1)[:, None, None]
    slot = jnp.arange(page_size, dtype=jnp.int32)
    where = table.first[..., None] + slot
    readable = (slot >= table.lo[..., None]) & (slot < table.hi[..., None]) & (where <= last)
    if window:
        earliest = jnp.min(jnp.where(valid, positions, NOWHERE), axis=1)[:, None, None]
        readable &= where > earliest - window
    where = jnp.where(readable, where, NOWHERE).reshape(batch, blocks, -1).transpose(1, 0, 2)
    used = jnp.any(where < NOWHERE, axis=(1, 2))
    if window:
        # What is out of every window comes first in a table: no leading blocks to count.
        order = jnp.argsort(~used, stable=True).astype(jnp.int32)
        return Visibility(key_positions=where, num_blocks=used.sum(dtype=jnp.int32), order=order)
    return Visibility(
        key_positions=where,
        num_blocks=jnp.max(jnp.where(used, jnp.arange(blocks, dtype=jnp.int32) + 1, 0)),
    )


def paged_attention(
    q: Array,
    pages: KVPages,
    table: PageTable,
    seen: Visibility,
    positions: Array,
    *,
    layer: int,
    window: int = 0,
    backend: Backend = AUTO,
) -> Array:
    """Causal attention of queries over the segments of their sequences.

    A window is measured in the positions at which keys stand in the sequence, not in slots or births.

    Args:
      q: f32[B, R, T, K, G, H], scaled, rotated at `positions - deltas[:, r]`.
      pages: the pages of the layer's group; keys stand rotated at their birth.
      table: segments of the B sequences.
      seen: `visibility` of the table and the window.
      positions: i32[B, T] of the queries.
      layer: index of the layer within its group.
      window: positions that a query sees, its own included; 0 for all. Static.
      backend: XLA or kernels; static.

    Returns:
      f32[B, T, K, G, H]. A query that sees no key (a padding row) gets zeros.

    Raises:
      ConfigError: a forced kernel can't take these shapes or dtypes.
    """
    if backend.has("decode" if q.shape[2] == 1 else "prefill"):
        row = jnp.minimum(table.page, pages.num_pages - 1) + layer * pages.num_pages
        segments = (row, table.first, table.lo, table.hi, table.delta_index)
        attended: Array = backend.call(
            pallas_kernels.paged_attention,
            *(q, pages.kv, *segments, positions),
            scale=pages.scale,
            window=window or None,
        )
        return attended
    batch, _, length, kv_heads, group, head_dim = q.shape
    page_size = pages.page_size
    block = table.page.shape[1] // table.delta_index.shape[1]
    keys_per_block = block * page_size
    # [B, R, K, G·T, H]: one matrix of queries per KV head.
    q = q.transpose(0, 1, 3, 4, 2, 5).reshape(batch, -1, kv_heads, group * length, head_dim)
    # Few queries: a row K|V is read once, whole, by a query padded with zeros, and the value columns
    # are cut from the small result. Many queries: splitting the rows is cheaper than twice the FLOPs.
    whole_rows = length * group < 32
    if whole_rows:
        q = jnp.pad(q, ((0, 0),) * 4 + ((0, head_dim),))

    def fold(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        i = i if seen.order is None else seen.order[i]
        where = jax.lax.dynamic_index_in_dim(seen.key_positions, i, keepdims=False)
        entries = jax.lax.dynamic_slice_in_dim(table.page, i * block, block, axis=1)
        rows = read_pages(pages, layer, entries).astype(jnp.float32)
        # Slots of others and slots not written yet may hold anything, NaN included: 0 · NaN is NaN.
        readable = (where < NOWHERE).reshape(batch, block, page_size)
        rows = jnp.where(readable[:, :, None, :, None], rows, 0.0)
        rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, keys_per_block, -1)
        row = jax.lax.dynamic_slice_in_dim(table.delta_index, i, 1, axis=1)
        query = jnp.take_along_axis(q, row[:, :, None, None, None], axis=1)[:, 0]
        keys = rows if whole_rows else rows[..., :head_dim]
        values = rows if whole_rows else rows[..., head_dim:]

        visible = where[:, None] <= positions[:, :, None]
        if window:
            visible &= where[:, None] > positions[:, :, None] - window
        bias = jnp.where(visible, 0.0, MASKED)
        scores = jnp.einsum("bkqh,bksh->bkqs", query, keys)
        scores = scores.reshape(batch, kv_heads, group, length, -1) + bias[:, None, None]
        scores = scores.reshape(batch, kv_heads, group * length, -1)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.exp(scores - new_peak[..., None])
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weights.sum(-1)
        acc = acc * keep[..., None] + jnp.einsum("bkqs,bksh->bkqh", weights, values)
        return new_peak, total, acc

    width = 2 * head_dim if whole_rows else head_dim
    shape = (batch, kv_heads, group * length)
    start = (
        jnp.full(shape, PEAK, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, width), jnp.float32),
    )
    _, total, acc = jax.lax.fori_loop(0, seen.num_blocks, fold, start)
    out = acc[..., -head_dim:] / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(batch, kv_heads, group, length, head_dim).transpose(0, 3, 1, 2, 4)


def append_of(backend: Backend) -> Callable[..., Array] | None:
    """The kernel that writes slots, for `write_slots`; None for XLA's scatter."""
    return functools.partial(backend.call, pallas_kernels.append) if backend.has("append") else None


def dense_attention(q: Array, k: Array, v: Array, window: int = 0) -> Array:
    """Causal attention over contiguous keys, full scores: the form that everything else is judged by.

    Args:
      q: f32[B, T, K, G, H], scaled and rotated.
      k, v: f32[B, T, K, H], k rotated.
      window: positions that a query sees, its own included; 0 for all.

    Returns:
      f32[B, T, K, G, H].
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k)
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    visible = distance >= 0
    if window:
        visible &= distance < window
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)
