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

from pallas_kernels.reference import cast, inside, quantize
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
    interpret: Any = False,
) -> Any:
    """`reference.append` on a TPU. `scale`, a few hundredths of the pages, is written by XLA.

    Raises:
      NotImplementedError: a size or dtype that the kernel does not take; the sentence names it.
    """
    kv = jnp.asarray(kv)
    count, (rows, kv_heads, size, _) = jnp.asarray(row).shape[0], kv.shape
    check_tiles(kv, interpret)
    tile = tile_slots(kv.dtype, size)
    row, slot = inside(row, rows).astype(jnp.int32), jnp.asarray(slot).astype(jnp.int32)
    row = jnp.where((slot >= 0) & (slot < size), row, rows)
    factors = None
    if scale is None:
        keys, values = cast(keys, kv.dtype), cast(values, kv.dtype)
    else:
        (keys, key_scale), (values, value_scale) = quantize(keys, kv.dtype), quantize(values, kv.dtype)
        factors = jnp.stack([key_scale, value_scale], -1)
        scale = jnp.asarray(scale).at[row, :, slot].set(factors, mode="drop")
    new = jnp.concatenate([keys, values], -1).astype(jnp.float32)  # exact: every dtype of pages fits

    tiles = size // tile
    home = row * tiles + jnp.minimum(slot // tile, tiles - 1)
    order = jnp.argsort(home, stable=True)
    home, slot, live = home[order], slot[order] % tile, jnp.sum(row < rows, dtype=jnp.int32)
    # [K, n, 2H]: a token's row of one head is one register row, whatever K is.
    new = new[order].transpose(1, 0, 2)
    chunk = max(min(CHUNK_BYTES // (kv_heads * kv.shape[3] * 4) // 8 * 8, -(-count // 8) * 8), 8)
    chunks = -(-count // chunk)
    pad = chunks * chunk - count
    new = jnp.pad(new, ((0, 0), (0, pad), (0, 0)))
    home = jnp.pad(home, (0, pad), constant_values=rows * tiles).reshape(chunks, chunk)
    slot = jnp.pad(slot, (0, pad)).reshape(chunks, chunk)
    # Within a chunk, tokens of one tile form a run: `begin` has the runs' first tokens, in order.
    index = jnp.arange(chunk, dtype=jnp.int32)
    known = index < (live - jnp.arange(chunks, dtype=jnp.int32)[:, None] * chunk)
    opens = known & jnp.concatenate([jnp.ones((chunks, 1), bool), home[:, 1:] != home[:, :-1]], 1)
    runs = opens.sum(1, dtype=jnp.int32)
    begin = jnp.sort(jnp.where(opens, index, chunk), axis=1)
    begin = jnp.concatenate([begin, jnp.full((chunks, 1), chunk, jnp.int32)], 1)
    begin = jnp.minimum(begin, known.sum(1, dtype=jnp.int32)[:, None])

    def smem(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, width), lambda c, *_: (c, 0, 0), memory_space=pltpu.SMEM)

    kv = pl.pallas_call(
        functools.partial(_kernel, tile=tile, tiles=tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks,),
            in_specs=[
                smem(chunk),
                smem(chunk),
                smem(chunk + 1),
                pl.BlockSpec((kv_heads, chunk, kv.shape[3]), lambda c, *_: (0, c, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((DEPTH, kv_heads, tile, kv.shape[3]), kv.dtype),
                pltpu.SemaphoreType.DMA((DEPTH,)),
                pltpu.SemaphoreType.DMA((DEPTH,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        input_output_aliases={5: 0},
        # Chunks run in order: a tile may end one and open the next.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=2 * count * kv_heads * kv.shape[3] * kv.dtype.itemsize,
        ),
        interpret=interpret,
        name="tpu_append",
    )(runs, home[:, None], slot[:, None], begin[:, None], new, kv)
    return kv if scale is None else (kv, scale)


def _kernel(
    runs_ref: Any,
    home_ref: Any,
    slot_ref: Any,
    begin_ref: Any,
    new_ref: Any,
    _: Any,
    kv_ref: Any,
    ring: Any,
    read: Any,
    written: Any,
    *,
    tile: int,
    tiles: int,
) -> None:
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
    for g in range(DEPTH - 1):
        pl.when(g < runs)(incoming(jnp.int32(g)).start)

    def run(g: Array, _: None) -> None:
        incoming(g).wait()
        place = lax.rem(g, DEPTH)

        def put(i: Array, _: None) -> None:
            slot = slot_ref[0, 0, i]
            for h in range(ring.shape[1]):
                old = ring[place, h].astype(jnp.float32)
                at = lax.broadcasted_iota(jnp.int32, old.shape, 0)
                ring[place, h] = jnp.where(at == slot, new_ref[h, pl.ds(i, 1), :], old).astype(ring.dtype)

        lax.fori_loop(begin_ref[0, 0, g], begin_ref[0, 0, g + 1], put, None)
        outgoing(g).start()

        pl.when(g > 0)(lambda: outgoing(g - 1).wait())
        pl.when(g + DEPTH - 1 < runs)(lambda: incoming(g + DEPTH - 1).start())

    lax.fori_loop(0, runs, run, None)
    pl.when(runs > 0)(lambda: outgoing(runs - 1).wait())
