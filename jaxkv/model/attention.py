"""Attention over paged keys and values, and the dense form it is judged by.

The paged form folds blocks of table entries into an online softmax (Milakov and Gimelshein, arXiv
1805.02867). A block in which nothing is visible changes no bit of the result, so what a sequence's
answer is does not depend on how many empty entries its table has.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.cache.pages import KVPages, read_pages
from jaxkv.cache.table import PageTable
from jaxkv.typing import Array

# Scores are masked with a number, not -inf: exp(-inf - -inf) would be NaN in a fully masked row.
MASKED = -1e30


def last_positions(positions: Array, lengths: Array) -> Array:
    """Returns i32[B], the greatest position of each row's valid queries; -1 for a padding row."""
    valid = jnp.arange(positions.shape[1]) < lengths[:, None]
    return jnp.max(jnp.where(valid, positions, -1), axis=1)


def visible_blocks(table: PageTable, last: Array) -> Array:
    """Returns i32[], how many leading blocks hold a key at or before `last` i32[B] of its row."""
    batch, entries = table.page.shape
    block = entries // table.delta_index.shape[1]
    seen = (table.hi > table.lo) & (table.first + table.lo <= last[:, None])
    blocks = seen.reshape(batch, entries // block, block).any(axis=(0, 2))
    return jnp.max(jnp.where(blocks, jnp.arange(entries // block) + 1, 0))


def paged_attention(
    q: Array,
    pages: KVPages,
    table: PageTable,
    positions: Array,
    *,
    layer: int,
    last: Array,
    num_blocks: Array,
) -> Array:
    """Causal attention of queries over the segments of their sequences.

    Args:
      q: f32[B, R, T, K, G, H], scaled, rotated at `positions - deltas[:, r]`.
      pages: the pages of the layer's group; keys stand rotated at their birth.
      table: segments of the B sequences.
      positions: i32[B, T] of the queries.
      layer: index of the layer within its group.
      last: i32[B], from `last_positions`: slots that stand behind it may not be written yet.
      num_blocks: i32[], leading blocks to fold, from `visible_blocks`.

    Returns:
      f32[B, T, K, G, H]. A query that sees no key (a padding row) gets zeros.
    """
    batch, _, length, kv_heads, group, head_dim = q.shape
    page_size = pages.page_size
    block = table.page.shape[1] // table.delta_index.shape[1]
    keys_per_block = block * page_size
    # [B, R, K, T·G, H]: one matrix of queries per KV head.
    q = q.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, kv_heads, length * group, head_dim)
    query_position = jnp.repeat(positions, group, axis=1)
    slot = jnp.arange(page_size, dtype=jnp.int32)
    # Few queries: a row K|V is read once, whole, by a query padded with zeros, and the value columns
    # are cut from the small result. Many queries: splitting the rows is cheaper than twice the FLOPs.
    whole_rows = length * group < 32
    if whole_rows:
        q = jnp.pad(q, ((0, 0),) * 4 + ((0, head_dim),))

    def fold(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry

        def entries(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=1)

        lo, hi, first = entries(table.lo), entries(table.hi), entries(table.first)
        key_position = first[..., None] + slot
        readable = (slot >= lo[..., None]) & (slot < hi[..., None])
        readable = readable & (key_position <= last[:, None, None])
        rows = read_pages(pages, layer, entries(table.page)).astype(jnp.float32)
        # Slots of others and slots not written yet may hold anything, NaN included: 0 · NaN is NaN.
        rows = jnp.where(readable[:, :, None, :, None], rows, 0.0)
        rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, keys_per_block, -1)
        row = jax.lax.dynamic_slice_in_dim(table.delta_index, i, 1, axis=1)
        query = jnp.take_along_axis(q, row[:, :, None, None, None], axis=1)[:, 0]
        keys = rows if whole_rows else rows[..., :head_dim]
        values = rows if whole_rows else rows[..., head_dim:]

        key_position = key_position.reshape(batch, 1, keys_per_block)
        mask = readable.reshape(batch, 1, keys_per_block)
        mask = mask & (key_position <= query_position[:, :, None])
        scores = jnp.einsum("bkqh,bksh->bkqs", query, keys)
        scores = jnp.where(mask[:, None], scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(mask[:, None], jnp.exp(scores - new_peak[..., None]), 0.0)
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weights.sum(-1)
        acc = acc * keep[..., None] + jnp.einsum("bkqs,bksh->bkqh", weights, values)
        return new_peak, total, acc

    width = 2 * head_dim if whole_rows else head_dim
    shape = (batch, kv_heads, length * group)
    start = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, width), jnp.float32),
    )
    _, total, acc = jax.lax.fori_loop(0, num_blocks, fold, start)
    out = acc[..., -head_dim:] / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)


def dense_attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention over contiguous keys, full scores: the form that everything else is judged by.

    Args:
      q: f32[B, T, K, G, H], scaled and rotated.
      k, v: f32[B, T, K, H], k rotated.

    Returns:
      f32[B, T, K, G, H].
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k)
    length = q.shape[1]
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)
    weights = jax.nn.softmax(jnp.where(causal, scores, MASKED), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)
