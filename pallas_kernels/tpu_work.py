"""What a TPU attention kernel reads, block by block: computed in XLA once, before the kernel runs.

A *unit* is one step of the kernel's grid: the queries of one sequence that are attended together (all of
them in decode, a tile of them in prefill). An *item* is one block of table entries that a unit must read.
Items of all units form one list in the order of the grid, so that the kernel's copies run ahead across the
borders of units. Blocks in which a unit can see nothing are no items.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

Array = Any

# Bits of an item: block id within its table, delta, "some slots must not be read", "every page is read".
DELTA_BIT, CUT_BIT, FULL_BIT = 16, 29, 30
MAX_BLOCKS, MAX_DELTAS, MAX_PAGE_SIZE = 1 << DELTA_BIT, 1 << (CUT_BIT - DELTA_BIT), (1 << 15) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of U units over tables of `blocks` blocks, for a kernel that copies `ahead` items ahead."""

    count: Array  # i32[U], items of a unit, at least 1
    start: Array  # i32[U], items of the units before it
    rows: Array  # i32[U, 1, (blocks + ahead)·block], of the page array; -1 where nothing is read
    bounds: Array  # i32[U, 1, blocks·block], lo + hi·2^16: the slots of an entry that the unit may read
    items: Array  # i32[U, 1, blocks], see the bits above
    blocks: Array  # i32[U, 1, blocks + ahead], block of an item among all tables, -1 where there is no item


def plan(
    page: Array,
    first: Array,
    lo: Array,
    hi: Array,
    delta_index: Array,
    positions: Array,
    *,
    page_size: int,
    rows: int,
    window: int | None,
    ahead: int,
) -> Work:
    """Lists what every unit reads.

    Args:
      page, first, lo, hi: i32[B, M].
      delta_index: i32[B, blocks].
      positions: i32[B, Q, t] of the t queries of each of a sequence's Q units; negative is padding.
      page_size: P.
      rows: X of the page array.
      window: positions a query sees, or None.
      ahead: items that the kernel starts to copy before it needs them.

    Returns:
      The work of U = B·Q units.
    """
    batch, blocks = delta_index.shape
    block, units = page.shape[1] // blocks, positions.shape[1]
    last = positions.max(2)[:, :, None]  # [B, Q, 1]
    first, lo, hi = first[:, None], lo[:, None], hi[:, None]
    hi = jnp.clip(jnp.minimum(hi, last + 1 - first), 0, page_size)
    lo = jnp.maximum(lo, 0)
    if window is not None:
        earliest = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max).min(2)[:, :, None]
        # Written as a comparison of distances, because padding's "earliest" must not overflow.
        lo = jnp.maximum(lo, jnp.minimum(earliest - first, page_size + window) - (window - 1))
    live = hi > lo
    shape = (batch * units, blocks, block)
    row = jnp.where(live, jnp.clip(page[:, None], 0, rows - 1), -1).reshape(shape)
    whole = live & (lo == 0) & (hi == page_size)
    bounds = jnp.where(live, lo + (hi << 16), 0).reshape(shape)
    live, whole = live.reshape(shape), whole.reshape(shape)

    used = live.any(2)
    order = jnp.argsort(~used, axis=1, stable=True).astype(jnp.int32)
    count = jnp.maximum(used.sum(1, dtype=jnp.int32), 1)
    end = jnp.cumsum(count, dtype=jnp.int32)
    start = end - count
    which = jnp.repeat(delta_index, units, axis=0)
    item = (
        jnp.arange(blocks, dtype=jnp.int32)
        + (which << DELTA_BIT)
        + ((~whole.all(2)).astype(jnp.int32) << CUT_BIT)
        + (live.all(2).astype(jnp.int32) << FULL_BIT)
    )
    item = jnp.take_along_axis(item, order, axis=1)
    bounds = jnp.take_along_axis(bounds, order[:, :, None], axis=1)
    # Item w of the whole list, seen from each unit: its own items, then those of the units behind it.
    w = start[:, None] + jnp.arange(blocks + ahead, dtype=jnp.int32)
    unit = jnp.minimum(jnp.searchsorted(end, w, side="right"), batch * units - 1).astype(jnp.int32)
    there = order[unit, jnp.clip(w - start[unit], 0, blocks - 1)]
    exists = w < end[-1]
    row = jnp.where(exists[:, :, None], row[unit, there], -1)
    everywhere = jnp.where(exists, unit // units * blocks + there, -1)
    flat = (batch * units, 1, -1)
    return Work(
        count=count,
        start=start,
        rows=row.reshape(flat),
        bounds=bounds.reshape(flat),
        items=item.reshape(flat),
        blocks=everywhere.reshape(flat),
    )
