"""Paged attention of few queries on Hopper: a ring of tiles by TMA, wgmma, the context split over blocks.

One thread block serves one sequence, one KV head and one part of its visited tiles. All queries of that
head (T·G rows) are one wgmma operand of 64 rows; the rest of the rows are padding, which costs tensor core
time that a memory-bound kernel has to spare. The parts of a context are joined by their log-sum-exp in XLA
(flash decoding, Dao et al. 2023).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as common
from pallas_kernels.scales import scales_of_pages

Array = Any

BLOCKS = 2 * 132  # that run at a time: two on each of an H100's 132 multiprocessors
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
START = 3  # what a block costs before and after its tiles, in tiles
JOIN = 0.02  # what joining one more part costs, in tiles


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
    splits: int | None = None,
    interpret: Any = False,
) -> Array:
    """`pallas_kernels.paged_attention` for T·G up to 64, on Hopper.

    Args:
      q: f32[B, R, T, K, G, H], scaled, rotated for each delta.
      kv: bfloat16, int8 or float8_e4m3fn [X, K, P, 2H].
      page, first, lo, hi: i32[B, M].
      delta_index: i32[B, M/block].
      positions: i32[B, T]; a negative one sees nothing.
      scale: f32[K, X', S], `pallas_kernels.scales`, of int8 pages, and of float8 pages that have one.
      window: positions that a query sees, itself included; None for all.
      soft_cap: scores become cap·tanh(score / cap); None for none.
      splits: parts of a context; None to fill the chip.
      interpret: True or `plgpu.InterpretGPUParams` to run without a GPU.

    Returns:
      f32[B, T, K, G, H]; zeros where a query sees nothing.

    Raises:
      NotImplementedError: a shape or dtype that this kernel does not do, by name.
    """
    common.check(q, kv, DTYPES, interpret, "decode")
    batch, _, length, kv_heads, group, head_dim = q.shape
    rows = -(-length * group // 8) * 8
    if rows > common.ROWS:
        raise NotImplementedError(
            f"the decode kernel takes up to {common.ROWS} query rows a KV head, found {length} x {group}"
        )
    page_size, block = kv.shape[2], page.shape[1] // delta_index.shape[1]
    tile = common.tile_size(page_size, block, 128 if head_dim == 64 else 64)
    row_positions = common.pad_positions(positions, group, common.ROWS)
    plan = common.plan(
        first, lo, hi, delta_index, row_positions[:, None],
        page_size=page_size, tile=tile, window=window, full_first=False,
    )  # fmt: skip
    number = plan.code.shape[2]
    if splits is None:
        splits = best_splits(batch * kv_heads, number)
    page = common.inside(page, kv.shape[0])
    scales = None if scale is None else _scales(scale, page, plan.where, kv.shape[2])
    parts = _partial(
        common.pad_rows(q, rows), kv, scales, page, plan, row_positions,
        tile=tile, splits=splits, window=window, soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    out = _combine(*parts)[:, :, : length * group]
    return out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)


def _scales(scale: Array, page: Array, where: Array, page_size: int) -> Array:
    """f32[2, B, K, M·P]: factors of keys and of values in the order of the table, 0 where nobody may read."""
    found = scales_of_pages(scale, page, page_size).transpose(4, 0, 2, 1, 3)  # [2, B, K, M, P]
    found = found.reshape(*found.shape[:3], -1)
    return jnp.where((where < common.NOWHERE)[:, None], found, 0.0)


def best_splits(pairs: int, tiles: int) -> int:
    """Parts of a context of `tiles` tiles for `pairs` of sequence and head: the shortest schedule.

    A batch of 1 is cut into as many parts as fill the chip; one that fills it by itself is cut only if that
    leaves less of the chip idle in the last wave of blocks.
    """

    def cost(splits: int) -> float:
        waves = -(-pairs * splits // BLOCKS)
        return waves * (-(-tiles // splits) + START) + JOIN * splits

    return min(range(1, max(1, min(tiles, 2 * BLOCKS)) + 1), key=cost)


def _combine(out: Array, peak: Array, total: Array) -> Array:
    """Joins parts: f32[B, K, S, rows, H] and f32[B, K, S, 64] twice -> f32[B, K, rows, H]."""
    rows = out.shape[3]
    peak, total = peak[..., :rows], total[..., :rows]
    weight = jnp.exp2(peak - peak.max(2, keepdims=True))
    total = (total * weight).sum(2)
    out = (out * weight[..., None]).sum(2)
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def _stages(tile: int, head_dim: int, query_rows: int, itemsize: int) -> int:
    """Tiles in flight: as many as leave room for two blocks on a multiprocessor, at least two."""
    stage = tile * (2 * head_dim * itemsize + 4 * 3)  # positions and two scales
    fixed = query_rows * head_dim * 2 + common.RESERVED_BYTES
    if itemsize == 1:
        fixed += tile * 2 * head_dim * 2  # the tile as bfloat16
    stages = (common.SHARED_BYTES // 2 - fixed) // stage
    if stages < 2:
        stages = min(3, (common.SHARED_BYTES - fixed) // stage)
    if stages < 2:
        raise NotImplementedError(
            f"{query_rows} query rows (deltas x rows) of {head_dim} leave no shared memory for the pages"
        )
    return min(4, stages)


def _partial(
    q: Array,
    kv: Array,
    scales: Array | None,
    page: Array,
    plan: common.Plan,
    row_positions: Array,
    *,
    tile: int,
    splits: int,
    window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """Unnormalized outputs, maxima (log2) and sums of every part."""
    plgpu = common.backend()
    batch, deltas, kv_heads, rows, head_dim = q.shape
    page_size = kv.shape[2]
    boxes, box = common.pages_of_tile(tile, page_size)
    # Rows of delta r start at r·rows: a wgmma reads 64 rows from there, its own and ones that are masked.
    query_rows = (deltas - 1) * rows + common.ROWS
    narrow = jnp.dtype(kv.dtype).itemsize == 1
    stages = _stages(tile, head_dim, query_rows, jnp.dtype(kv.dtype).itemsize)
    chunks = common.chunks(head_dim)
    width = chunks[0][1]
    layout = plgpu.Layout.WGMMA
    by_row, by_column = layout.reduce(1), layout.reduce(0)

    def body(
        *refs: Any, q_s: Any, ring: Any, where_s: Any, rows_s: Any, peak_s: Any, total_s: Any, started: Any,
        filled: Any, wide_s: Any = None, scales_s: Any = None,
    ) -> None:  # fmt: skip
        q_ref, kv_ref, code_ref, count_ref, page_ref, where_ref, rows_ref, *others = refs
        *scales_ref, out_ref, peak_ref, total_ref = others
        kv_s, out_s = ring  # the outputs leave through the same bytes, when the last tile has been read
        part, head, b = lax.axis_index("part"), lax.axis_index("head"), lax.axis_index("batch")
        count = count_ref[b, 0, 0]
        begin, end = count * part // splits, count * (part + 1) // splits

        def find(i: Array) -> tuple[Array, list[Array]]:
            """Where in the table the i-th visited tile starts, and its pages."""
            start = (code_ref[b, 0, i] >> 8) * tile
            return start, [page_ref[b, start // page_size + j] for j in range(boxes)]

        def fetch(i: Array, start: Array, pages: list[Array]) -> None:
            slot = lax.rem(i - begin, stages)
            slots = pl.ds(start, tile)
            plgpu.copy_gmem_to_smem(where_ref.at[b, slots], where_s.at[slot], filled.at[slot])
            for ref in scales_ref:
                for kind in (0, 1):
                    plgpu.copy_gmem_to_smem(
                        ref.at[kind, b, head, slots], scales_s.at[slot, kind], filled.at[slot]
                    )
            for j, row in enumerate(pages):
                source = kv_ref.at[row, head]
                if box < page_size:
                    source = source.at[pl.ds(lax.rem(start, page_size), box)]
                plgpu.copy_gmem_to_smem(source, kv_s.at[slot, pl.ds(j * box, box)], filled.at[slot])

        def start_fetch(i: Array) -> None:
            fetch(i, *find(i))

        for r in range(deltas):
            plgpu.copy_gmem_to_smem(q_ref.at[b, r, head], q_s.at[pl.ds(r * rows, rows)], started)
        plgpu.copy_gmem_to_smem(rows_ref.at[b], rows_s, started)
        for i in range(stages):
            pl.when(begin + i < end)(functools.partial(start_fetch, begin + i))
        plgpu.barrier_wait(started)
        position = lax.broadcast_in_dim(common.load(rows_s, by_row), (common.ROWS, tile), [0])

        def fold(i: Array, carry: Any) -> Any:
            peak, total, acc = carry
            slot = lax.rem(i - begin, stages)
            code = code_ref[b, 0, i]
            ahead = find(jnp.minimum(i + stages, end - 1))  # read now, so that nothing waits for it below
            plgpu.barrier_wait(filled.at[slot])
            queries = (
                q_s.at[pl.ds(pl.multiple_of((code >> 1 & 127) * rows, 8), common.ROWS)] if deltas > 1 else q_s
            )
            rows_kv = kv_s.at[slot]
            if narrow:
                common.widen(rows_kv, where_s.at[slot], wide_s)
                rows_kv = wide_s
            x = common.scores(queries, rows_kv.at[:, pl.ds(0, head_dim)])
            if scales_ref:
                x *= lax.broadcast_in_dim(common.load(scales_s.at[slot, 0], by_column), x.shape, [1])
            x = common.capped(x, soft_cap)
            where = lax.broadcast_in_dim(common.load(where_s.at[slot], by_column), (common.ROWS, tile), [1])
            seen = where <= position
            if window is not None:
                seen &= where > position - window
            x = jnp.where(seen, x, common.MASKED)
            new_peak = jnp.maximum(peak, x.max(axis=1))
            keep = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(x - lax.broadcast_in_dim(new_peak, x.shape, [0]))
            total = total * keep + weights.sum(axis=1)
            if scales_ref:
                weights *= lax.broadcast_in_dim(common.load(scales_s.at[slot, 1], by_column), x.shape, [1])
            weights = weights.astype(jnp.bfloat16)
            if not narrow:
                pl.when((code & 1) == 1)(lambda: common.clear_unreadable(rows_kv, where_s.at[slot], head_dim))
            out = []
            for (start, size), old in zip(chunks, acc, strict=True):
                values = rows_kv.at[:, pl.ds(head_dim + start, size)]
                old = old * lax.broadcast_in_dim(keep, old.shape, [0])
                out.append(common.accumulate(old, weights, values, interpret))
            pl.when(i + stages < end)(lambda: fetch(i + stages, *ahead))
            return new_peak, total, tuple(out)

        peak, total, acc = lax.fori_loop(
            begin, end, fold,
            (common.full((common.ROWS,), common.PEAK, by_row), common.full((common.ROWS,), 0.0, by_row),
             tuple(common.full((common.ROWS, size), 0.0, layout) for _, size in chunks)),
        )  # fmt: skip
        peak_s[...] = peak
        total_s[...] = total
        for number, (start, size) in enumerate(chunks):
            out_s[...] = acc[number]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_s.at[pl.ds(0, rows)], out_ref.at[b, head, part, :, pl.ds(start, size)]
            )
            if number == 0:
                plgpu.copy_smem_to_gmem(peak_s, peak_ref.at[b, head, part])
                plgpu.copy_smem_to_gmem(total_s, total_ref.at[b, head, part])
            plgpu.wait_smem_to_gmem(0)

    shape = (batch, kv_heads, splits)
    statistics = jax.ShapeDtypeStruct((*shape, common.ROWS), jnp.float32)
    bf16 = common.swizzled(jnp.bfloat16)
    scratch = {
        "q_s": plgpu.SMEM((query_rows, head_dim), jnp.bfloat16, transforms=bf16),
        "ring": plgpu.RefUnion(
            plgpu.SMEM((stages, tile, 2 * head_dim), kv.dtype, transforms=common.swizzled(kv.dtype)),
            plgpu.SMEM((common.ROWS, width), jnp.float32, transforms=common.swizzled(jnp.float32)),
        ),
        "where_s": plgpu.SMEM((stages, tile), jnp.int32),
        "rows_s": plgpu.SMEM((common.ROWS,), jnp.int32),
        "peak_s": plgpu.SMEM((common.ROWS,), jnp.float32),
        "total_s": plgpu.SMEM((common.ROWS,), jnp.float32),
        "started": plgpu.Barrier(num_arrivals=deltas + 1),
        "filled": plgpu.Barrier(num_arrivals=boxes + (1 if scales is None else 3), num_barriers=stages),
    }
    inputs = [q, kv, plan.code, plan.count, page, plan.where, row_positions]
    if narrow:
        scratch["wide_s"] = plgpu.SMEM((tile, 2 * head_dim), jnp.bfloat16, transforms=bf16)
    if scales is not None:
        scratch["scales_s"] = plgpu.SMEM((stages, 2, tile), jnp.float32)
        inputs.append(scales)
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((*shape, rows, head_dim), jnp.float32), statistics, statistics],
        # The last axis runs fastest: heads of one part share the positions and page numbers that they read.
        grid=(batch, splits, kv_heads),
        grid_names=("batch", "part", "head"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=common.interpreted(interpret),
    )
    return tuple(kernel(*inputs))
