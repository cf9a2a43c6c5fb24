"""Writes new tokens into pages on a TPU, in place.

HBM is addressed in tiles of 8 to 32 slots, so a token is written by reading its tile, replacing its slot
and writing the tile back. Tokens are sorted by tile first: each tile is moved once for all its tokens, and
no two of the copies in flight touch the same tile. XLA's own scatter may copy all pages instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.reference import cast, inside, quantize, unchanged
from pallas_kernels.tpu_tiles import check_tiles, tile_slots

Array = Any

DEPTH = 4  # tiles in flight
CHUNK_BYTES = 4 << 20  # of new tokens in VMEM at a time


def append(
    kv: Array,
    row: Array,
    slot: Array,
    keys: Array,
    values: Array,
    *,
    scale: Array | None = None,
    value_scale: Array | None = None,
    interpret: Any = False,
) -> Any:
    """`reference.append` on a TPU. `scale` is written in place too, by the same kernel.

    Raises:
      NotImplementedError: a size or dtype that the kernel does not take; the sentence names it.
    """
    kv, row, slot = jnp.asarray(kv), jnp.asarray(row), jnp.asarray(slot)
    rows, _, size, _ = kv.shape
    check_tiles(kv, interpret, scale)
    if not row.shape[0]:
        return unchanged(kv, scale)
    where = inside(row, rows, slot, size)
    if scale is None:
        new = jnp.concatenate([cast(keys, kv.dtype), cast(values, kv.dtype)], -1)
        return write_rows(kv, where, slot, new, interpret=interpret)
    (keys, of_key), (values, of_value) = quantize(keys, kv.dtype), quantize(values, kv.dtype, value_scale)
    kv = write_rows(kv, where, slot, jnp.concatenate([keys, values], -1), interpret=interpret)
    scale = jnp.asarray(scale)
    # A factor on every lane that it may be put into: the kernel picks the two of the slot.
    wide = jnp.repeat(jnp.stack([of_key, of_value], -1), size, axis=-1)
    return kv, write_scales(scale, where, rows, wide, lane=slot, size=size, interpret=interpret)


def write_scales(
    scale: Array,
    row: Array,
    rows: int,
    new: Array,
    *,
    lane: Array | None = None,
    size: int = 0,
    interpret: Any = False,
) -> Array:
    """Writes rows of `scale` f32[K, X', S], in place: one page of 8, or 8 pages where they are a tile.

    Args:
      scale: as in `scales.py`.
      row: i32[n], pages; `rows` and more drop the write.
      new: f32[n, K, w], w <= S: zeros are written behind it.
      lane, size: i32[n] and P: of page row[i] only lanes lane[i] and lane[i] + P are written; all when None.
    """
    new = jnp.pad(new, ((0, 0), (0, 0), (0, scale.shape[2] - new.shape[2])))
    outer = (row >= rows).astype(jnp.int32)  # the scales are one page of X' slots
    return write_rows(
        scale[None], outer, row, new, lane=lane, size=size, interpret=interpret, name="tpu_append_scales"
    )[0]


def write_rows(
    kv: Array,
    row: Array,
    slot: Array,
    new: Array,
    *,
    lane: Array | None = None,
    size: int = 0,
    interpret: Any = False,
    name: str = "tpu_append",
) -> Array:
    """Writes rows of pages, in place.

    Args:
      kv: [X, K, P, W].
      row: i32[n]; X and more drop the write.
      slot: i32[n], 0..P-1 where the write is not dropped.
      new: [n, K, W] of the pages' dtype.
      lane, size: i32[n]; only lanes lane[i] and lane[i] + size are written; whole rows when None.
    """
    count, (rows, kv_heads, slots, width) = row.shape[0], kv.shape
    tile = tile_slots(kv.dtype, slots)
    new = new.astype(jnp.float32)  # exact: every dtype of pages fits
    row, slot = row.astype(jnp.int32), slot.astype(jnp.int32)

    tiles = slots // tile
    home = jnp.where(row < rows, row * tiles + slot // tile, rows * tiles)
    order = jnp.argsort(home, stable=True)
    home, live = home[order], jnp.sum(row < rows, dtype=jnp.int32)
    places = [slot[order] % tile] if lane is None else [slot[order] % tile, lane.astype(jnp.int32)[order]]
    # [K, n, W]: a token's row of one head is one register row, whatever K is.
    new = new[order].transpose(1, 0, 2)
    chunk = max(min(CHUNK_BYTES // (kv_heads * width * 4) // 8 * 8, -(-count // 8) * 8), 8)
    chunks = -(-count // chunk)
    pad = chunks * chunk - count
    new = jnp.pad(new, ((0, 0), (0, pad), (0, 0)))
    home = jnp.pad(home, (0, pad), constant_values=rows * tiles).reshape(chunks, chunk)
    places = [jnp.pad(a, (0, pad)).reshape(chunks, 1, chunk) for a in places]
    # Within a chunk, tokens of one tile form a run: `begin` has the runs' first tokens, in order.
    index = jnp.arange(chunk, dtype=jnp.int32)
    known = index < (live - jnp.arange(chunks, dtype=jnp.int32)[:, None] * chunk)
    opens = known & jnp.concatenate([jnp.ones((chunks, 1), bool), home[:, 1:] != home[:, :-1]], 1)
    runs = opens.sum(1, dtype=jnp.int32)
    begin = jnp.sort(jnp.where(opens, index, chunk), axis=1)
    begin = jnp.concatenate([begin, jnp.full((chunks, 1), chunk, jnp.int32)], 1)
    begin = jnp.minimum(begin, known.sum(1, dtype=jnp.int32)[:, None])
    scalars = [home[:, None], begin[:, None], *places]

    def smem(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, width), lambda c, *_: (c, 0, 0), memory_space=pltpu.SMEM)

    written: Array = pl.pallas_call(
        functools.partial(_kernel, tile=tile, tiles=tiles, lanes=None if lane is None else size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks,),
            in_specs=[
                *(smem(a.shape[2]) for a in scalars),
                pl.BlockSpec((kv_heads, chunk, width), lambda c, *_: (0, c, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((DEPTH, kv_heads, tile, width), kv.dtype),
                pltpu.SemaphoreType.DMA((DEPTH,)),
                pltpu.SemaphoreType.DMA((DEPTH,)),
            ],
        ),
        # Said to be in HBM: XLA would copy what fits VMEM as a whole to there, and back.
        out_shape=(jax.ShapeDtypeStruct if interpret else pltpu.HBM)(kv.shape, kv.dtype),
        input_output_aliases={len(scalars) + 2: 0},
        # Chunks run in order: a tile may end one and open the next.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=2 * count * kv_heads * width * kv.dtype.itemsize,
        ),
        interpret=interpret,
        name=name,
    )(runs, *scalars, new, kv)
    return written


def _kernel(
    runs_ref: Any,
    home_ref: Any,
    begin_ref: Any,
    slot_ref: Any,
    *refs: Any,
    tile: int,
    tiles: int,
    lanes: int | None,
) -> None:
    *lane_ref, new_ref, _, kv_ref, ring, read, written = refs
    runs = runs_ref[pl.program_id(0)]

    def where(g: Array) -> Any:
        home = home_ref[0, 0, begin_ref[0, 0, g]]
        start = pl.multiple_of(lax.rem(home, tiles) * tile, tile)
        return kv_ref.at[lax.div(home, tiles), :, pl.ds(start, tile)]

    def incoming(g: Array) -> Any:
        place = lax.rem(g, DEPTH)
        return pltpu.make_async_copy(where(g), ring.at[place], read.at[place])

    def outgoing(g: Array) -> Any:
        place = lax.rem(g, DEPTH)
        return pltpu.make_async_copy(ring.at[place], where(g), written.at[place])

    # A place of the ring is filled again after its write has ended, one step late so that it overlaps.
    def begin(g: int) -> None:  # scalars of a run that is not there must not be read
        pl.when(g < runs)(lambda: incoming(jnp.int32(g)).start())

    for g in range(DEPTH - 1):
        begin(g)

    def run(g: Array, _: None) -> None:
        incoming(g).wait()
        place = lax.rem(g, DEPTH)

        def put(i: Array, _: None) -> None:
            slot = slot_ref[0, 0, i]
            for h in range(ring.shape[1]):
                old = ring[place, h].astype(jnp.float32)
                mine = lax.broadcasted_iota(jnp.int32, old.shape, 0) == slot
                for ref in lane_ref:
                    lane = lax.broadcasted_iota(jnp.int32, old.shape, 1)
                    mine &= (lane == ref[0, 0, i]) | (lane == ref[0, 0, i] + lanes)
                ring[place, h] = jnp.where(mine, new_ref[h, pl.ds(i, 1), :], old).astype(ring.dtype)

        lax.fori_loop(begin_ref[0, 0, g], begin_ref[0, 0, g + 1], put, None)
        outgoing(g).start()

        pl.when(g > 0)(lambda: outgoing(g - 1).wait())
        pl.when(g + DEPTH - 1 < runs)(lambda: incoming(g + DEPTH - 1).start())

    lax.fori_loop(0, runs, run, None)
    pl.when(runs > 0)(lambda: outgoing(runs - 1).wait())
