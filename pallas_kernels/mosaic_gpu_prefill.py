"""Paged attention of many queries on Hopper: one warpgroup fetches, two compute 64 rows each.

One thread block serves 128 rows (tokens x query heads of one KV head) of one sequence. The tiles it visits
are listed by XLA: those that every row sees whole come first and are folded without a mask, those that only
some rows see come last, those that no row sees are not read. So the causal triangle, a window, and the
holes and cuts of a relocated table cost what they hold.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as common
from pallas_kernels import mosaic_gpu_decode as decode

Array = Any

WARPGROUPS = 2  # that compute; one more fetches
ROWS = WARPGROUPS * common.ROWS


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
    interpret: Any = False,
) -> Array:
    """`pallas_kernels.paged_attention` on Hopper. Up to 64 rows a KV head go to the decode kernel.

    Args:
      q: f32[B, R, T, K, G, H], scaled, rotated for each delta.
      kv: bf16[X, K, P, 2H].
      page, first, lo, hi: i32[B, M].
      delta_index: i32[B, M/block].
      positions: i32[B, T]; a negative one sees nothing.
      scale: None; pages with scales are not supported.
      window: positions that a query sees, itself included; None for all.
      soft_cap: scores become cap·tanh(score / cap).
      interpret: True or `plgpu.InterpretGPUParams` to run without a GPU.

    Returns:
      f32[B, T, K, G, H]; zeros where a query sees nothing.

    Raises:
      NotImplementedError: a shape or dtype that this kernel does not do, by name.
    """
    batch, _, length, kv_heads, group, head_dim = q.shape
    if length * group <= common.ROWS:
        return decode.paged_attention(
            q, kv, page, first, lo, hi, delta_index, positions,
            scale=scale, window=window, soft_cap=soft_cap, interpret=interpret,
        )  # fmt: skip
    common.check(q, kv, ("bfloat16",), interpret, "prefill")
    page_size, block = kv.shape[2], page.shape[1] // delta_index.shape[1]
    tile = common.tile_size(page_size, block, 128 if head_dim <= 128 else 64)
    rows = -(-length * group // ROWS) * ROWS
    row_positions = common.pad_positions(positions, group, rows).reshape(batch, -1, ROWS)
    plan = common.plan(
        first, lo, hi, delta_index, row_positions,
        page_size=page_size, tile=tile, window=window, full_first=True,
    )  # fmt: skip
    page = common.inside(page, kv.shape[0])
    out = _kernel(
        common.pad_rows(q, rows), kv, page, plan, row_positions.reshape(batch, rows),
        tile=tile, window=window, soft_cap=soft_cap, interpret=interpret,
    )[:, :, : length * group]  # fmt: skip
    return out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)


def _kernel(
    q: Array,
    kv: Array,
    page: Array,
    plan: common.Plan,
    row_positions: Array,
    *,
    tile: int,
    window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Array:
    """f32[B, K, rows, H] of bf16[B, R, K, rows, H]."""
    plgpu = common.backend()
    batch, deltas, kv_heads, rows, head_dim = q.shape
    page_size = kv.shape[2]
    boxes, box = common.pages_of_tile(tile, page_size)
    chunks = common.chunks(head_dim)
    stage = tile * (2 * head_dim * 2 + 4)
    stages = min(4, (common.SHARED_BYTES - common.RESERVED_BYTES - ROWS * head_dim * 2) // stage)
    layout = plgpu.Layout.WGMMA
    by_row, by_column = layout.reduce(1), layout.reduce(0)
    square = (common.ROWS, tile)

    def body(*refs: Any) -> None:
        q_ref, kv_ref, code_ref, count_ref, page_ref, where_ref, rows_ref, out_ref, *scratch = refs
        q_s, kv_s, where_s, rows_s, q_ready, filled, freed, cleaned = scratch
        head, b = lax.axis_index("head"), lax.axis_index("batch")
        # Late groups see more keys and start first: no long block is left for the end.
        group = rows // ROWS - 1 - lax.axis_index("group")
        warpgroup = lax.axis_index("warpgroup")
        count, unmasked = count_ref[b, group, 0], count_ref[b, group, 1]

        @pl.when(warpgroup == WARPGROUPS)
        def _fetch_all() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def fetch(i: Array) -> None:
                slot = lax.rem(i, stages)
                start = (code_ref[b, group, i] >> 8) * tile
                plgpu.copy_gmem_to_smem(
                    where_ref.at[b, pl.ds(start, tile)], where_s.at[slot], filled.at[slot]
                )
                for j in range(boxes):
                    source = kv_ref.at[page_ref[b, start // page_size + j], head]
                    if box < page_size:
                        source = source.at[pl.ds(lax.rem(start, page_size), box)]
                    plgpu.copy_gmem_to_smem(source, kv_s.at[slot, pl.ds(j * box, box)], filled.at[slot])

            def refill(i: Array, _: None) -> None:
                plgpu.barrier_wait(freed.at[lax.rem(i, stages)])
                fetch(i)

            for i in range(stages):
                pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
            lax.fori_loop(stages, jnp.maximum(count, stages), refill, None)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            queries, ready = q_s.at[warpgroup], q_ready.at[warpgroup]
            row = group * ROWS + warpgroup * common.ROWS

            def load_queries(delta: Any) -> None:
                plgpu.copy_gmem_to_smem(q_ref.at[b, delta, head, pl.ds(row, common.ROWS)], queries, ready)
                plgpu.barrier_wait(ready)

            plgpu.copy_gmem_to_smem(rows_ref.at[b, pl.ds(row, common.ROWS)], rows_s.at[warpgroup], ready)
            plgpu.barrier_wait(ready)
            if deltas == 1:
                load_queries(0)

            def fold(i: Array, carry: Any, masked: bool) -> Any:
                peak, total, acc, at = carry
                slot = lax.rem(i, stages)
                code = code_ref[b, group, i]
                if deltas > 1:
                    delta = code >> 1 & 127
                    pl.when(delta != at)(lambda: load_queries(delta))
                    at = delta
                plgpu.barrier_wait(filled.at[slot])
                keys = kv_s.at[slot, :, pl.ds(0, head_dim)]

                x = common.capped(common.scores(queries, keys), soft_cap)
                if masked:
                    position = lax.broadcast_in_dim(common.load(rows_s.at[warpgroup], by_row), square, [0])
                    where = lax.broadcast_in_dim(common.load(where_s.at[slot], by_column), square, [1])
                    seen = where <= position
                    if window is not None:
                        seen &= where > position - window
                    x = jnp.where(seen, x, common.MASKED)
                new_peak = jnp.maximum(peak, x.max(axis=1))
                keep = jnp.exp2(peak - new_peak)
                weights = jnp.exp2(x - lax.broadcast_in_dim(new_peak, square, [0]))
                total = total * keep + weights.sum(axis=1)
                weights = weights.astype(jnp.bfloat16)
                if masked:
                    # One warpgroup clears what nobody may read, both wait for it.
                    @pl.when((code & 1) == 1)
                    def clear() -> None:
                        @pl.when(warpgroup == 0)
                        def clear_all() -> None:
                            common.clear_unreadable(kv_s.at[slot], where_s.at[slot], head_dim)
                            plgpu.barrier_arrive(cleaned.at[slot])

                        plgpu.barrier_wait(cleaned.at[slot])

                out = []
                for (start, size), old in zip(chunks, acc, strict=True):
                    values = kv_s.at[slot, :, pl.ds(head_dim + start, size)]
                    old = old * lax.broadcast_in_dim(keep, old.shape, [0])
                    out.append(common.accumulate(old, weights, values, interpret))
                plgpu.barrier_arrive(freed.at[slot])
                return new_peak, total, tuple(out), at

            carry = (
                common.full((common.ROWS,), common.PEAK, by_row),
                common.full((common.ROWS,), 0.0, by_row),
                tuple(common.full((common.ROWS, size), 0.0, layout) for _, size in chunks),
                jnp.int32(-1),
            )
            carry = lax.fori_loop(0, unmasked, lambda i, c: fold(i, c, False), carry)
            _, total, acc, _ = lax.fori_loop(unmasked, count, lambda i, c: fold(i, c, True), carry)
            # A row that pads the group saw the tiles that need no mask.
            real = common.load(rows_s.at[warpgroup], by_row) >= 0
            share = jnp.where(real & (total > 0.0), 1.0 / total, 0.0)
            for (start, size), part in zip(chunks, acc, strict=True):
                part = part * lax.broadcast_in_dim(share, part.shape, [0])
                out_ref[b, head, pl.ds(row, common.ROWS), pl.ds(start, size)] = part

    bf16 = common.swizzled(jnp.bfloat16)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, rows, head_dim), jnp.float32),
        # The last axis runs fastest: groups of one head read the same pages at the same time.
        grid=(batch, kv_heads, rows // ROWS),
        grid_names=("batch", "head", "group"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, common.ROWS, head_dim), jnp.bfloat16, transforms=bf16),
            plgpu.SMEM((stages, tile, 2 * head_dim), jnp.bfloat16, transforms=bf16),
            plgpu.SMEM((stages, tile), jnp.int32),
            plgpu.SMEM((WARPGROUPS, common.ROWS), jnp.int32),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=boxes + 1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=common.interpreted(interpret),
    )
    return kernel(q, kv, plan.code, plan.count, page, plan.where, row_positions)
