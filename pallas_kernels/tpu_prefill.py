"""Attention of many queries a sequence on a TPU: tiles of queries times blocks of pages.

Queries of one tile that share a KV head are one matrix, so keys are read once for all of them. Blocks
behind a tile's last query, or before its window, are neither copied nor computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tpu_work
from pallas_kernels.scales import rows_of_pages
from pallas_kernels.tpu_attention import VMEM_LIMIT, Tiling, attend
from pallas_kernels.tpu_tiles import check_tiles
from pallas_kernels.xla import NOWHERE, key_positions

Array = Any

MAX_ENTRIES = 32_768  # of a table: its rows and bounds, twice, must fit the 1 MiB of scalar memory
IN_FLIGHT = 4 << 20  # bytes of copies that hide the latency of HBM, on tpu7x too
QUERY_ROWS = 512  # query rows of a tile and KV head: past this, keys are read seldom enough
HEADROOM = 8 << 20  # VMEM left to the compiler


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
    """`reference.paged_attention` on a TPU, any T.

    Queries and weights are rounded to bfloat16 when pages are narrower than float32; sums are float32.

    Raises:
      NotImplementedError: a size or dtype that the kernel does not take; the sentence names it.
    """
    return run(
        *(q, kv, page, first, lo, hi, delta_index, positions, scale, window, soft_cap),
        split=False,
        interpret=interpret,
        name="tpu_prefill",
    )


def run(
    q: Array,
    kv: Array,
    page: Array,
    first: Array,
    lo: Array,
    hi: Array,
    delta_index: Array,
    positions: Array,
    scale: Array | None,
    window: int | None,
    soft_cap: float | None,
    *,
    split: bool,
    interpret: Any,
    name: str,
) -> Array:
    """Lays out queries and tables for `tpu_attention.attend`, and its result as the API says."""
    q, kv = jnp.asarray(q), jnp.asarray(kv)
    page, first, lo, hi = (jnp.asarray(a) for a in (page, first, lo, hi))
    delta_index, positions = jnp.asarray(delta_index), jnp.asarray(positions)
    batch, deltas, length, kv_heads, group, head_dim = q.shape
    blocks, size = delta_index.shape[1], kv.shape[2]
    tiling = Tiling(
        units=1,
        rows=0,
        depth=2,
        block=page.shape[1] // blocks,
        page_size=size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        deltas=deltas,
        scaled=scale is not None,
        split=split and kv.dtype != jnp.float32,
        window=window,
        soft_cap=soft_cap,
    )
    check_tiles(kv, interpret)
    check(tiling, page.shape[1], blocks)
    tile, tiling = _sizes(tiling, kv.dtype, length, group, blocks)
    units, rows = tiling.units, tiling.rows

    grow = units * tile - length
    q = jnp.pad(q, ((0, 0), (0, 0), (0, grow), (0, 0), (0, 0), (0, tiling.width - head_dim)))
    q = q.reshape(batch, deltas, units, tile, kv_heads, group, tiling.width)
    q = q.transpose(0, 2, 1, 4, 3, 5, 6).reshape(batch * units, deltas, kv_heads, tile * group, -1)
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, rows - tile * group), (0, 0)))
    at = jnp.pad(positions, ((0, 0), (0, grow)), constant_values=-1).reshape(batch, units, tile)
    work = tpu_work.plan(
        *(page, first, lo, hi, delta_index, at),
        page_size=size,
        rows=kv.shape[0],
        window=window,
        ahead=tiling.depth - 1,
    )
    at = jnp.repeat(at.reshape(batch * units, tile), group, axis=1)
    at = jnp.pad(at, ((0, 0), (0, rows - tile * group)), constant_values=-1)[:, :, None]
    where = key_positions(size, first, lo, hi, positions.max(1))
    factors = None
    if scale is not None:
        # In the order of the tables, and 0 where nobody reads: unowned scales may be NaN.
        factors = rows_of_pages(scale, page)[..., : 2 * size]  # [B, M, K, 2P]
        factors = factors.reshape(batch, blocks, tiling.block, kv_heads, 2, size)
        seen = (where < NOWHERE).reshape(batch, blocks, tiling.block, 1, 1, size)
        factors = jnp.where(seen, factors, 0.0).transpose(0, 1, 4, 3, 2, 5)
        factors = factors.reshape(batch * blocks, 2 * kv_heads, -1)
    out = attend(
        *(work, q, at, where.reshape(batch, blocks, -1), kv, factors),
        tiling=tiling,
        interpret=interpret,
        name=name,
    )
    out = out[:, :, : tile * group, -head_dim:].reshape(batch, units, kv_heads, tile, group, head_dim)
    out = out.transpose(0, 1, 3, 2, 4, 5).reshape(batch, units * tile, kv_heads, group, head_dim)
    return out[:, :length]


def check(tiling: Tiling, entries: int, blocks: int) -> None:
    """Raises NotImplementedError, in one sentence, for what the kernel does not take."""
    t = tiling
    if t.page_size > tpu_work.MAX_PAGE_SIZE:
        raise NotImplementedError(f"page size is {t.page_size}, the TPU kernel takes at most 32767")
    if t.deltas > tpu_work.MAX_DELTAS or blocks > tpu_work.MAX_BLOCKS:
        raise NotImplementedError(
            f"the table has {blocks} blocks and {t.deltas} deltas, the TPU kernel takes at most "
            f"{tpu_work.MAX_BLOCKS} and {tpu_work.MAX_DELTAS}"
        )
    if entries > MAX_ENTRIES:
        raise NotImplementedError(
            f"the table has {entries} entries, the TPU kernel takes at most {MAX_ENTRIES} "
            "(they must fit scalar memory): use larger pages"
        )


def _sizes(tiling: Tiling, dtype: Any, length: int, group: int, blocks: int) -> tuple[int, Tiling]:
    """Queries of a tile, and the tiling with rows, units and the ring's depth filled in."""
    slots = tiling.block * tiling.page_size
    block_bytes = slots * tiling.kv_heads * 2 * tiling.head_dim * jnp.dtype(dtype).itemsize
    depth = min(max(-(-IN_FLIGHT // block_bytes) + 1, 2), 8)
    tile = max(min(length, QUERY_ROWS // group), 1)
    pad = 8 if tiling.split or jnp.dtype(dtype).itemsize == 4 else 16
    while True:
        rows = -(-tile * group // pad) * pad
        sized = dataclasses.replace(tiling, units=-(-length // tile), rows=rows, depth=depth)
        need = sized.vmem_bytes(dtype, blocks)
        if need <= VMEM_LIMIT - HEADROOM:
            return tile, sized
        if depth > 2:
            depth -= 1
        elif tile > 1:
            tile = -(-tile // 2)
        else:
            raise NotImplementedError(
                f"a block of {slots} slots of {tiling.kv_heads} heads needs {need >> 20} MiB of VMEM, the "
                f"TPU kernel has {VMEM_LIMIT - HEADROOM >> 20}: use smaller blocks"
            )
