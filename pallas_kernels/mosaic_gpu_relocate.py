"""Relocation of whole pages on Hopper: page in by TMA, keys rotated in float32, page out, in place.

The pages are one array seen as rows of 2H; a unit of work is some rows of one page. The two halves of the
keys come into buffers of their own, so that a rotation is elementwise; everything else (values, components
that the rotation leaves alone) goes from memory to memory without passing a register.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as common

Array = Any

STAGES = 3  # where they fit
MOST_BYTES = 32 * 1024  # of a unit: two thread blocks of three stages share a multiprocessor
MOST_ELEMENTS = 64 * 64  # of one half of the keys of a unit: they are held in registers
BLOCKS_WANTED = 3 * 132  # three blocks for each of an H100's 132 multiprocessors
BOX = 128  # most columns that one copy moves untouched


def relocate_pages(
    kv: Array,
    source: Array,
    target: Array,
    cos: Array,
    sin: Array,
    *,
    scale: Array | None = None,
    interpret: Any = False,
) -> Array:
    """`pallas_kernels.relocate_pages` on Hopper.

    Args:
      kv: bf16 or f32 [X, K, P, 2H]; donate it, and it is written in place.
      source, target: i32[n]; a target outside 0..X-1 drops the move. No row is both.
      cos, sin: f32[n, rotary_dim/2].
      scale: None; pages with scales are not supported.
      interpret: True or `plgpu.InterpretGPUParams` to run without a GPU.

    Returns:
      kv.

    Raises:
      NotImplementedError: a shape or dtype that this kernel does not do, by name.
    """
    rows, kv_heads, page_size, width = kv.shape
    half, itemsize = cos.shape[1], jnp.dtype(kv.dtype).itemsize
    common.check_device(interpret)
    if kv.dtype not in (jnp.bfloat16, jnp.float32) or scale is not None:
        raise NotImplementedError(
            f"Hopper relocation takes bfloat16 and float32 pages without scales, found {kv.dtype}"
        )
    if half * itemsize % 32 or half % 16 or width % 32:
        raise NotImplementedError(
            f"Hopper relocation takes rotary dims of a multiple of 32, found {2 * half} of {width // 2}"
        )
    if page_size % 8:
        raise NotImplementedError(
            f"Hopper relocation takes pages of a multiple of 8 slots, found {page_size}"
        )
    if rows * kv_heads * page_size >= 2**31:
        raise NotImplementedError(f"Hopper relocation counts slots in 32 bits, found {rows} pages")
    if source.shape[0] == 0:
        return kv
    dropped = (target < 0) | (target >= rows)
    moves = jnp.stack([jnp.clip(source, 0, rows - 1), jnp.where(dropped, -1, target)], axis=1)
    angles = jnp.concatenate([cos, sin], axis=1).astype(jnp.float32)
    flat = kv.reshape(rows * kv_heads * page_size, width)
    pages = jax.new_ref(flat)
    _kernel(pages, moves, angles, page_rows=kv_heads * page_size, interpret=interpret)
    return jax.freeze(pages).reshape(kv.shape)


def _kernel(pages: Any, moves: Array, angles: Array, *, page_rows: int, interpret: Any) -> None:
    """Moves `pages`, a reference to [X·K·P, 2H], by `moves` i32[n, 2] and `angles` f32[n, cos | sin]."""
    plgpu = common.backend()
    number, half = moves.shape[0], angles.shape[1] // 2
    width, dtype = pages.shape[1], pages.dtype
    itemsize = jnp.dtype(dtype).itemsize
    # All rows of a page turn alike, whichever head they belong to.
    limit = max(min(MOST_ELEMENTS // half, MOST_BYTES // (width * itemsize)), 8)
    size = max(n for n in range(8, min(limit, page_rows) + 1, 8) if page_rows % n == 0)
    per_page = page_rows // size
    units = number * per_page
    blocks = min(units, BLOCKS_WANTED)
    rest = [(start, min(BOX, width - start)) for start in range(2 * half, width, BOX)]
    padded = -(-size // common.ROWS) * common.ROWS
    stage = 2 * padded * half * itemsize + size * (width - 2 * half) * itemsize + 2 * half * 4
    stages = min(STAGES, (common.SHARED_BYTES - common.RESERVED_BYTES) // stage)
    if stages < 2:
        raise NotImplementedError(
            f"Hopper relocation takes rotary dims of which two stages fit a multiprocessor, found {2 * half} "
            f"of {dtype}"
        )
    swizzle = next(s for s in (128, 64, 32) if half * itemsize % s == 0)
    layout = plgpu.Layout.WGMMA

    def body(*refs: Any) -> None:
        pages_ref, moves_ref, angles_ref, low_s, high_s, *rest_s, angles_s, filled = refs
        block = lax.axis_index("block")
        mine = (units - block + blocks - 1) // blocks

        def pieces(slot: Array) -> list[tuple[Any, tuple[int, int]]]:
            """Shared buffers of a slot beside the columns that they hold."""
            keys = [(low_s, (0, half)), (high_s, (half, half))]
            return [(ref.at[slot, pl.ds(0, size)], columns) for ref, columns in keys] + [
                (ref.at[slot], columns) for ref, columns in zip(rest_s, rest, strict=True)
            ]

        def unit(i: Array) -> tuple[Array, Array]:
            at = block + i * blocks
            return at // per_page, lax.rem(at, per_page)

        def rows(page: Array, part: Array) -> Any:
            return pl.ds(pl.multiple_of((page * per_page + part) * size, 8), size)

        def fetch(i: Array) -> None:
            move, part = unit(i)
            slot = lax.rem(i, stages)
            ready = filled.at[slot]
            plgpu.copy_gmem_to_smem(angles_ref.at[move], angles_s.at[slot], ready)
            for buffer, (start, n) in pieces(slot):
                source = pages_ref.at[rows(moves_ref[move, 0], part), pl.ds(start, n)]
                plgpu.copy_gmem_to_smem(source, buffer, ready)

        def turn(i: Array, _: None) -> None:
            move, part = unit(i)
            slot = lax.rem(i, stages)
            target = moves_ref[move, 1]
            plgpu.barrier_wait(filled.at[slot])
            low, high = (common.load(ref.at[slot], layout).astype(jnp.float32) for ref in (low_s, high_s))
            cos, sin = (
                lax.broadcast_in_dim(
                    common.load(angles_s.at[slot, pl.ds(start, half)], layout.reduce(0)), low.shape, [1]
                )
                for start in (0, half)
            )
            low_s[slot] = (low * cos - high * sin).astype(dtype)
            high_s[slot] = (high * cos + low * sin).astype(dtype)
            plgpu.commit_smem()

            @pl.when(target >= 0)
            def write() -> None:
                for buffer, (start, n) in pieces(slot):
                    plgpu.copy_smem_to_gmem(buffer, pages_ref.at[rows(target, part), pl.ds(start, n)])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(i + stages < mine)(lambda: fetch(i + stages))

        for i in range(stages):
            pl.when(i < mine)(functools.partial(fetch, jnp.int32(i)))
        lax.fori_loop(0, mine, turn, None)
        plgpu.wait_smem_to_gmem(0)

    keys = plgpu.SMEM(
        (stages, padded, half), dtype,
        transforms=(plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)),
    )  # fmt: skip
    scratch = (
        keys,
        keys,
        *(plgpu.SMEM((stages, size, n), dtype) for _, n in rest),
        plgpu.SMEM((stages, 2 * half), jnp.float32),
        plgpu.Barrier(num_arrivals=3 + len(rest), num_barriers=stages),
    )
    # `plgpu.kernel` of jax 0.10 takes no references; the function that it wraps does, in every version.
    kernel = pl.kernel(
        lambda *refs: pl.run_scoped(functools.partial(body, *refs), *scratch),
        out_type=(),
        mesh=plgpu.Mesh(grid=(blocks,), grid_names=("block",)),
        interpret=common.interpreted(interpret) or False,
        name="relocate_pages",
    )
    kernel(pages, moves, angles)
