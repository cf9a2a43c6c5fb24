"""Where the scales of quantized pages stand: f32[K, X', S], with X' >= X and S >= 2P.

Row [h, x] belongs to head h of page x: the factors of its P keys, then those of its P values; what is
beyond them is never read. A TPU moves 8 rows of 128 numbers at once. With X' a multiple of 8 and S of 128,
XLA for TPUs keeps this order in memory and kernels write it in place; `scale_shape(tiles=True)` says so.
For shapes with the slots' two factors last XLA chooses other orders, and copies all of it at every use.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

Array = Any

TILE_ROWS, TILE_WIDTH = 8, 128  # of float32 on a TPU


def scale_shape(kv_shape: tuple[int, ...], *, tiles: bool = False) -> tuple[int, int, int]:
    """(K, X', S) for pages of shape [X, K, P, 2H].

    Args:
      kv_shape: of the pages.
      tiles: whether X' and S are rounded up to the tiles of a TPU.
    """
    rows, kv_heads, size, _ = kv_shape
    if not tiles:
        return kv_heads, rows, 2 * size
    return kv_heads, -(-rows // TILE_ROWS) * TILE_ROWS, -(-2 * size // TILE_WIDTH) * TILE_WIDTH


def pack_scales(factors: Array, *, tiles: bool = False) -> Array:
    """f32[X, K, P, 2], the factors of each slot's key and value, as `scale` f32[K, X', S]."""
    factors = jnp.asarray(factors)
    rows, _, size, _ = factors.shape
    packed = _packed(factors).transpose(1, 0, 2)
    shape = scale_shape(factors.shape, tiles=tiles)
    return jnp.pad(packed, [(0, 0), (0, shape[1] - rows), (0, shape[2] - 2 * size)])


def rows_of_pages(scale: Array, page: Array) -> Array:
    """f32[..., K, S] of pages i32[...]; one outside the array reads some page.

    For one device: as rows of one matrix, which XLA for TPUs gathers without laying `scale` out anew.
    """
    scale, page = jnp.asarray(scale), jnp.asarray(page)
    heads, rows, width = scale.shape
    at = jnp.clip(page, 0, rows - 1)[..., None] + jnp.arange(heads, dtype=page.dtype) * rows
    return scale.reshape(-1, width).at[at].get(mode="promise_in_bounds")


def scales_of_pages(scale: Array, page: Array, page_size: int, *, mode: str = "clip") -> Array:
    """f32[..., K, P, 2] of pages i32[...]; one outside the array reads some page, `mode` is the gather's."""
    rows = jnp.moveaxis(jnp.asarray(scale).at[:, jnp.asarray(page)].get(mode=mode), 0, -2)
    return by_slot(rows, page_size)


def by_slot(rows: Array, page_size: int) -> Array:
    """Rows [..., S] as the factors [..., P, 2] of their slots."""
    return jnp.swapaxes(rows[..., : 2 * page_size].reshape(*rows.shape[:-1], 2, page_size), -1, -2)


def scales_of_slots(scale: Array, row: Array, slot: Array, page_size: int, *, mode: str = "clip") -> Array:
    """f32[..., K, 2] of slots i32[...] of pages i32[...]; `page_size` and `mode` as in `scales_of_pages`."""
    row, slot = jnp.asarray(row), jnp.asarray(slot)
    lanes = slot[..., None] + jnp.asarray([0, page_size], slot.dtype)
    return jnp.moveaxis(jnp.asarray(scale).at[:, row[..., None], lanes].get(mode=mode), 0, -2)


def put_slots(scale: Array, kv: Array, row: Array, slot: Array, factors: Array) -> Array:
    """Writes factors f32[..., K, 2] of slots i32[...]; in place when `scale` is donated.

    A row outside 0..X-1 or a slot outside 0..P-1 of pages `kv` drops the write.
    """
    row, lanes = outside(scale, kv, row, slot), jnp.asarray(slot)[..., None] + jnp.asarray([0, kv.shape[2]])
    factors = jnp.moveaxis(factors, -2, 0)
    return jnp.asarray(scale).at[:, row[..., None], lanes].set(factors, mode="drop")


def put_pages(scale: Array, kv: Array, row: Array, factors: Array) -> Array:
    """Writes factors f32[n, K, P, 2] of whole pages; a row outside 0..X-1 of pages `kv` drops the write."""
    row = outside(scale, kv, row, jnp.zeros_like(row))
    new = _packed(factors).transpose(1, 0, 2)
    return jnp.asarray(scale).at[:, row, : new.shape[2]].set(new, mode="drop")


def outside(scale: Array, kv: Array, row: Array, slot: Array) -> Array:
    """Rows with those of dropped writes made X', which a scatter drops."""
    row, slot = jnp.asarray(row), jnp.asarray(slot)
    kept = (row >= 0) & (row < kv.shape[0]) & (slot >= 0) & (slot < kv.shape[2])
    return jnp.where(kept, row, scale.shape[1])


def _packed(factors: Array) -> Array:
    return jnp.swapaxes(factors, -1, -2).reshape(*factors.shape[:-2], -1)
