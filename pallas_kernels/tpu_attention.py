"""The attention kernel that `tpu_decode` and `tpu_prefill` share (Mosaic TPU).

One grid step attends the queries of one unit (`tpu_work`). Pages stay in HBM; their copies into a ring of
VMEM blocks run ahead of the arithmetic, over the borders of units. Every block has one delta, which picks
the rotated query, and is folded into an online softmax (Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_work import CUT_BIT, DELTA_BIT, FULL_BIT, Work

Array = Any

MASKED = -1e30
PEAK = -1e20
# Scores and sums live in VMEM beside the ring. v5e and v6e have 128 MiB, a tpu7x core 64 MiB.
VMEM_LIMIT = 56 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static sizes of one kernel."""

    units: int  # U / B, units of a sequence
    rows: int  # query rows of a unit and KV head, padded
    depth: int  # blocks in the ring
    block: int  # pages in a block
    page_size: int
    kv_heads: int
    head_dim: int
    deltas: int
    scaled: bool
    split: bool  # queries and weights as a sum of two bfloat16 numbers: see `exact_parts`
    window: int | None
    soft_cap: float | None

    @property
    def whole(self) -> bool:
        """Whether a row K|V is multiplied as a whole: keys or values alone would be a part of a register."""
        return self.head_dim % 128 != 0

    @property
    def width(self) -> int:
        """Columns of a query and of a sum of values."""
        return 2 * self.head_dim if self.whole else self.head_dim

    def vmem_bytes(self, dtype: Any, blocks: int) -> int:
        """VMEM that the kernel takes, tiles of (8, 128) words counted whole."""
        item, slots = jnp.dtype(dtype).itemsize, self.block * self.page_size
        ring = self.depth * slots * self.kv_heads * 2 * self.head_dim * item
        ring += self.depth * _round(2 * self.kv_heads, 8) * slots * 4 * self.scaled
        queries = self.deltas * self.kv_heads * self.rows * self.width * (2 if self.split or item < 4 else 4)
        queries *= 1 + self.split
        sums = self.kv_heads * self.rows * (_round(self.width, 128) + 2 * 128) * 4
        out = self.kv_heads * self.rows * _round(self.width, 128) * 4
        tables = _round(blocks, 8) * _round(slots, 128) * 4 + self.rows * 128 * 4
        scores = 4 * self.rows * slots * 4 + 2 * slots * 2 * self.head_dim * 4
        return ring + sums + scores + 2 * (queries + out + tables)


def exact_parts(x: Array) -> tuple[Array, Array]:
    """float32 as bfloat16 high + low, to 16 bits of mantissa.

    The cut is made in the bits: XLA may drop a round trip through bfloat16 and leave no low part.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def attend(
    work: Work,
    q: Array,
    query_positions: Array,
    key_positions: Array,
    kv: Array,
    scale: Array | None,
    *,
    tiling: Tiling,
    interpret: Any,
    name: str,
) -> Array:
    """Runs the kernel.

    Args:
      work: of U units.
      q: f32[U, R, K, rows, width].
      query_positions: i32[U, rows, 1].
      key_positions: i32[B, blocks, block·P].
      kv: [X, K, P, 2H].
      scale: f32[B·blocks, 2K, block·P] of the tables' slots, keys' heads before values'; None if not scaled.
      tiling: static sizes.
      interpret, name: of the Pallas call.

    Returns:
      f32[U, K, rows, width]; values are its last H columns.
    """
    units, _, kv_heads, rows, width = q.shape
    batch, blocks, slots = key_positions.shape
    if kv.dtype != jnp.float32:
        q = jnp.concatenate(exact_parts(q), 3) if tiling.split else q.astype(jnp.bfloat16)
    per = tiling.units

    def of_unit(shape: tuple[int, ...], space: Any = None) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda u, *_: (u,) + (0,) * len(shape), memory_space=space)

    smem = functools.partial(of_unit, space=pltpu.SMEM)
    in_specs = [
        smem(work.rows.shape[1:]),
        smem(work.bounds.shape[1:]),
        smem(work.items.shape[1:]),
        smem(work.blocks.shape[1:]),
        of_unit(q.shape[1:]),
        of_unit((rows, 1)),
        pl.BlockSpec((1, blocks, slots), lambda u, *_: (lax.div(u, per), 0, 0)),
        pl.BlockSpec(memory_space=pl.ANY),
    ]
    operands = [work.rows, work.bounds, work.items, work.blocks, q, query_positions, key_positions, kv]
    scratch: list[Any] = [
        pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
        pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
        pltpu.VMEM((kv_heads, rows, width), jnp.float32),
        pltpu.VMEM((tiling.depth, tiling.block, *kv.shape[1:]), kv.dtype),
        pltpu.SemaphoreType.DMA((tiling.depth,)),
    ]
    if scale is not None:
        in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        operands.append(scale)
        scratch += [
            pltpu.VMEM((tiling.depth, *scale.shape[1:]), jnp.float32),
            pltpu.SemaphoreType.DMA((tiling.depth,)),
        ]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(units,),
        in_specs=in_specs,
        out_specs=of_unit((kv_heads, rows, width)),
        scratch_shapes=scratch,
    )
    reach = batch * blocks * slots  # an upper bound: what is skipped is known only when the kernel runs
    per_slot = rows * per * kv_heads
    return pl.pallas_call(
        functools.partial(_kernel, tiling=tiling),
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct((units, kv_heads, rows, width), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            # Units run in order: the copies of one are started by the one before it.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * reach * per_slot * width,
            transcendentals=reach * per_slot,
            bytes_accessed=reach * kv_heads * kv.shape[3] * kv.dtype.itemsize + q.nbytes,
        ),
        interpret=interpret,
        name=name,
    )(work.count, work.start, *operands)


def _kernel(count_ref: Any, start_ref: Any, *refs: Any, tiling: Tiling) -> None:
    t = tiling
    rows_ref, bounds_ref, items_ref, blocks_ref, q_ref, at_ref, where_ref, kv_ref, *refs_ = refs
    if t.scaled:
        scale_ref, out_ref, peak_ref, total_ref, acc_ref, ring, copied, scale_ring, scale_copied = refs_
    else:
        out_ref, peak_ref, total_ref, acc_ref, ring, copied = refs_
    sums = peak_ref, total_ref, acc_ref
    unit = pl.program_id(0)
    count, start = count_ref[unit], start_ref[unit]

    def place(k: Array) -> Array:
        return lax.rem(start + k, t.depth)

    def page_copy(k: Array, i: int) -> tuple[Array, Any]:
        row, slot = rows_ref[0, 0, k * t.block + i], place(k)
        # A row that is not read has no copy; the clamp only keeps the address in the array.
        source = kv_ref.at[jnp.maximum(row, 0)]
        return row >= 0, pltpu.make_async_copy(source, ring.at[slot, i], copied.at[slot])

    def scale_copy(k: Array) -> tuple[Array, Any]:
        block, slot = blocks_ref[0, 0, k], place(k)
        source = scale_ref.at[jnp.maximum(block, 0)]
        return block >= 0, pltpu.make_async_copy(source, scale_ring.at[slot], scale_copied.at[slot])

    def start_copies(k: Array) -> None:
        for i in range(t.block):
            wanted, copy = page_copy(k, i)
            pl.when(wanted)(copy.start)
        if t.scaled:
            wanted, copy = scale_copy(k)
            pl.when(wanted)(copy.start)

    def await_copies(j: Array, full: Array) -> None:
        def each() -> None:
            for i in range(t.block):
                wanted, copy = page_copy(j, i)
                pl.when(wanted)(copy.wait)

        # One wait for the bytes of all pages where it can be: issuing a wait a page costs scalar time.
        whole = ring.at[place(j)]
        pl.when(full)(pltpu.make_async_copy(whole, whole, copied.at[place(j)]).wait)
        pl.when(jnp.logical_not(full))(each)
        if t.scaled:
            scale_copy(j)[1].wait()

    # A unit's first copies were started by the unit before it.
    opening = jnp.where(unit == 0, t.depth - 1, 0)
    lax.fori_loop(0, opening, lambda k, _: start_copies(k), None)

    peak_ref[...] = jnp.full(peak_ref.shape, PEAK, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    def fold(j: Array, _: None) -> None:
        item = items_ref[0, 0, j]
        # The slot that this fills was last read by item j - 1, which is done.
        start_copies(j + t.depth - 1)
        await_copies(j, ((item >> FULL_BIT) & 1) == 1)
        slot = place(j)

        if ring.dtype != jnp.int8:  # 0 · NaN is NaN; int8 has none
            cut = ((item >> CUT_BIT) & 1) == 1
            pl.when(cut)(lambda: _blank(ring, slot, bounds_ref, j, t))

        block = item & ((1 << DELTA_BIT) - 1)
        delta = (item >> DELTA_BIT) & ((1 << (CUT_BIT - DELTA_BIT)) - 1)
        where, at = where_ref[0, pl.ds(block, 1), :], at_ref[0]  # [1, S], [rows, 1]
        seen = where <= at
        if t.window is not None:
            seen = jnp.logical_and(seen, where > at - t.window)
        for h in range(t.kv_heads):
            factors = None
            if t.scaled:
                factors = (
                    scale_ring[slot, h : h + 1, :],
                    scale_ring[slot, t.kv_heads + h : t.kv_heads + h + 1, :],
                )
            _fold_head(h, q_ref[0, delta, h], ring[slot, :, h], seen, factors, sums, t)

    lax.fori_loop(0, count, fold, None)
    for h in range(t.kv_heads):
        total = total_ref[h]
        out_ref[0, h] = acc_ref[h] / jnp.where(total > 0, total, 1.0)


def _fold_head(
    h: int,
    query: Array,
    rows: Array,
    seen: Array,
    factors: tuple[Array, Array] | None,
    sums: tuple[Any, Any, Any],
    t: Tiling,
) -> None:
    """Folds rows K|V [block, P, 2H] of one head into its sums."""
    peak_ref, total_ref, acc_ref = sums
    if rows.dtype.itemsize == 1:
        rows = rows.astype(jnp.float32)  # before the reshape: its tiles of 8 slots fit any page size
    rows = rows.reshape(t.block * t.page_size, 2 * t.head_dim).astype(query.dtype)
    keys = rows if t.whole else rows[:, : t.head_dim]
    values = rows if t.whole else rows[:, t.head_dim :]
    scores = _dot(query, keys, 1)
    if t.split:
        scores = scores[: t.rows] + scores[t.rows :]
    if factors is not None:
        scores = scores * factors[0]
    if t.soft_cap is not None:
        scores = t.soft_cap * jnp.tanh(scores / t.soft_cap)
    scores = jnp.where(seen, scores, MASKED)
    peak = peak_ref[h]
    new_peak = jnp.maximum(peak, scores.max(1, keepdims=True))
    weights = jnp.exp(scores - new_peak)
    keep = jnp.exp(peak - new_peak)
    peak_ref[h] = new_peak
    total_ref[h] = total_ref[h] * keep + weights.sum(1, keepdims=True)
    if factors is not None:
        weights = weights * factors[1]
    if t.split:
        added = _dot(jnp.concatenate(exact_parts(weights), 0), values, 0)
        added = added[: t.rows] + added[t.rows :]
    else:
        added = _dot(weights.astype(values.dtype), values, 0)
    acc_ref[h] = acc_ref[h] * keep + added


def _dot(x: Array, rows: Array, axis: int) -> Array:
    """x [n, c] times rows [S, 2H], contracted over `axis` of rows, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, rows, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _blank(ring: Any, slot: Array, bounds_ref: Any, j: Array, t: Tiling) -> None:
    """Zeroes the slots of a block that its unit may not read. Rare: interior pages are read whole."""

    def one(i: Array, _: None) -> None:
        bounds = bounds_ref[0, 0, j * t.block + i]
        lo, hi = bounds & 0xFFFF, bounds >> 16

        def blank() -> None:
            rows = ring[slot, i].astype(jnp.float32)
            at = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
            rows = jnp.where(jnp.logical_and(at >= lo, at < hi), rows, 0.0)
            ring[slot, i] = rows.astype(ring.dtype)

        pl.when(jnp.logical_or(lo > 0, hi < t.page_size))(blank)

    lax.fori_loop(0, t.block, one, None)


def _round(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
