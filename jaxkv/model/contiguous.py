"""Keys and values of a batch copied out of their pages for the length of one compiled loop, for XLA on CPU.

A paged read costs XLA on CPU more than the attention behind it: a gather, a mask and a transpose of every
block, once per token. A loop of many tokens reads the same pages each time, so it copies them once, as keys
and values of their own in the order in which a product with one query streams them, and adds each new token
to the copy and to the pages. What is attended is the same, slot by slot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.cache.pages import KVPages, read_pages
from jaxkv.cache.table import PageTable
from jaxkv.model.attention import MASKED, NOWHERE, PEAK
from jaxkv.typing import Array


class LayerCopy(NamedTuple):
    """One layer's keys and values of the slots that the tables show; S is a table's entries times P."""

    keys: Array  # f32[B, K, S, H], rotated at their birth; 0 where nothing is readable
    values: Array  # f32[B, K, S, H]


@struct.dataclass(kw_only=True)
class KVCopy:
    """What the tables of one layer group show."""

    layers: tuple[LayerCopy, ...]
    where: Array  # i32[B, S], position of each slot of the sequence; NOWHERE for others


def copy_tables(pages: KVPages, table: PageTable, before: Array) -> KVCopy:
    """Copies every entry of `table`, in all layers of the group.

    Args:
      pages: the pages of the group.
      table: segments of the B sequences, as narrow as they allow: every entry is copied.
      before: i32[B], the position of the first token that is still to be written.
    """
    page_size = pages.page_size
    slot = jnp.arange(page_size, dtype=jnp.int32)
    where = table.first[..., None] + slot
    where = jnp.where((slot >= table.lo[..., None]) & (slot < table.hi[..., None]), where, NOWHERE)
    # What is not written yet may hold anything, NaN included: 0 · NaN is NaN.
    written = where < before[:, None, None]
    batch, entries = table.page.shape

    def layer(index: int) -> LayerCopy:
        rows = read_pages(pages, index, table.page).astype(jnp.float32)
        rows = jnp.where(written[:, :, None, :, None], rows, 0.0)
        rows = rows.transpose(0, 2, 1, 3, 4).reshape(batch, rows.shape[2], entries * page_size, -1)
        return LayerCopy(*jnp.split(rows, 2, axis=-1))

    layers = pages.kv.shape[0] // pages.num_pages
    return KVCopy(layers=tuple(layer(i) for i in range(layers)), where=where.reshape(batch, -1))


def place_in_copy(table: PageTable, slots: Array, page_size: int) -> Array:
    """Where the copy holds `slots` i32[B, steps] of a row's own table; 0 for a slot that is not in it."""
    page, offset = slots // page_size, slots % page_size

    def place(page: Array, offset: Array) -> Array:  # of one step, or a whole [B, steps, M] is built
        mine = (table.page == page[:, None]) & (table.lo <= offset[:, None]) & (offset[:, None] < table.hi)
        return jnp.where(jnp.any(mine, axis=1), jnp.argmax(mine, axis=1) * page_size + offset, 0)

    return jax.vmap(place, in_axes=1, out_axes=1)(page, offset)


def put_written(copy: LayerCopy, at: Array, keys: Array, values: Array) -> LayerCopy:
    """Takes over a step's tokens, as their pages hold them: f32[B, K, H] each, to i32[B] places.

    A row that has ended writes too, over whatever is there: nobody looks at what it attends, and a write
    that may be dropped reads what it would replace, for which XLA copies everything.
    """
    row = jnp.arange(len(at))
    if len(at) == 1:
        # Twice the same: XLA makes a scatter of one row an update of a slice, fuses that with each of its
        # readers and copies the whole for every one of them.
        row, at, keys, values = (jnp.concatenate([x, x]) for x in (row, at, keys, values))
    return LayerCopy(
        *(
            old.at[row, :, at].set(new, mode="promise_in_bounds")
            for old, new in zip(copy, (keys, values), strict=True)
        )
    )


def copied_attention(
    q: Array, copy: LayerCopy, where: Array, table: PageTable, positions: Array, *, window: int = 0
) -> Array:
    """`paged_attention` of one query a row, over the copy.

    Args:
      q: f32[B, R, 1, K, G, H], scaled, rotated at `positions - deltas[:, r]`.
      copy: of the layer, the query's own key included.
      where: i32[B, S], positions of the copy's slots.
      table: what the copy was made of.
      positions: i32[B] of the queries.
      window: positions that a query sees, its own included; 0 for all. Static.

    Returns:
      f32[B, 1, K, G, H]; zeros for a row that sees no key.
    """
    keys, values = copy
    visible = where <= positions[:, None]
    if window:
        visible &= where > positions[:, None] - window
    bias = jnp.where(visible, 0.0, MASKED)[:, None]
    q = q[:, :, 0]
    blocks = table.delta_index.shape[1]
    batch, kv_heads, size, _ = keys.shape

    def attend(q: Array) -> Array:
        # One query at a time: XLA on CPU streams a matrix past one vector 2 to 4 times as fast as past three.
        if q.shape[1] == 1:
            scores = jnp.einsum("bksh,bkh->bks", keys, q[:, 0])
        else:
            turned = jnp.take_along_axis(q, table.delta_index[:, :, None, None], axis=1)
            by_block = keys.reshape(batch, kv_heads, blocks, size // blocks, -1)
            scores = jnp.einsum("bknsh,bnkh->bkns", by_block, turned).reshape(batch, kv_heads, size)
        scores = scores + bias
        weights = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), PEAK))
        total = weights.sum(-1, keepdims=True)
        return jnp.einsum("bks,bksh->bkh", weights, values) / jnp.where(total > 0, total, 1.0)

    return jnp.stack([attend(q[:, :, :, g]) for g in range(q.shape[3])], axis=2)[:, None]
