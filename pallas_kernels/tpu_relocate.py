"""Copies pages with their keys rotated, on a TPU: page in, rotate in float32, page out, in place.

One aliased operand: pages passed once as input and once as output would be copied as a whole. Three pages
are in flight, one coming, one turning, one going.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.reference import inside, largest, unchanged
from pallas_kernels.scales import rows_of_pages
from pallas_kernels.tpu_append import write_scales
from pallas_kernels.tpu_tiles import check_tiles

Array = Any

DEPTH = 6  # pages in flight
VMEM_RING = 24 << 20
MOVES = 4096  # of one grid step: their rows must fit scalar memory


def relocate_pages(
    kv: Array,
    source: Array,
    target: Array,
    cos: Array,
    sin: Array,
    *,
    scale: Array | None = None,
    interpret: Any = False,
) -> Any:
    """`reference.relocate_pages` on a TPU. `scale` is gathered by XLA and written in place.

    Raises:
      NotImplementedError: a size or dtype that the kernel does not take; the sentence names it.
    """
    kv = jnp.asarray(kv)
    rows, kv_heads, size, width = kv.shape
    check_tiles(kv, interpret, scale)
    page_bytes = kv_heads * size * width * kv.dtype.itemsize
    depth = min(DEPTH, VMEM_RING // max(page_bytes, 1))
    if depth < 3:
        raise NotImplementedError(
            f"a page has {page_bytes} bytes, the TPU kernel takes at most {VMEM_RING // 3}"
        )
    count, half = cos.shape
    if not count:
        return unchanged(kv, scale)
    source, target = inside(source, rows).astype(jnp.int32), inside(target, rows).astype(jnp.int32)
    source = jnp.minimum(source, rows - 1)
    # Moves that are dropped go last, and the kernel stops before them.
    order = jnp.argsort(target >= rows, stable=True)
    live = jnp.sum(target < rows, dtype=jnp.int32)
    chunk = min(count, MOVES)
    chunks = -(-count // chunk)
    pad = chunks * chunk - count
    ids = [jnp.pad(a[order], (0, pad)).reshape(chunks, 1, chunk) for a in (source, target)]
    counts = jnp.clip(live - jnp.arange(chunks, dtype=jnp.int32) * chunk, 0, chunk)
    # One row of factors a move: cos | cos for the key's halves, -sin | sin for their partners.
    angles = jnp.stack([_lanes(cos[order], cos[order], width), _lanes(-sin[order], sin[order], width)], 1)
    angles = jnp.pad(angles, ((0, pad), (0, 0), (0, 0)))
    quantized = scale is not None
    outs: list[Any] = [jax.ShapeDtypeStruct(kv.shape, kv.dtype)]
    out_specs = [pl.BlockSpec(memory_space=pl.ANY)]
    scratch: list[Any] = [
        pltpu.VMEM((depth, kv_heads, size, width), kv.dtype),
        pltpu.VMEM((depth, 2, width), jnp.float32),
        pltpu.SemaphoreType.DMA((depth,)),
        pltpu.SemaphoreType.DMA((depth,)),
        pltpu.SemaphoreType.DMA((depth,)),
    ]
    if quantized:
        # How much each rotated key outgrew its range: [moves, K, P, 1], a column a head.
        outs.append(jax.ShapeDtypeStruct((chunks * chunk, kv_heads, size, 1), jnp.float32))
        out_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        scratch += [pltpu.VMEM((depth, kv_heads, size, 1), jnp.float32), pltpu.SemaphoreType.DMA((depth,))]

    def smem() -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, chunk), lambda c, *_: (c, 0, 0), memory_space=pltpu.SMEM)

    found = pl.pallas_call(
        functools.partial(_kernel, depth=depth, half=half, chunk=chunk, quantized=quantized),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks,),
            in_specs=[smem(), smem(), pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=outs,
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=6 * count * kv_heads * size * half, transcendentals=0, bytes_accessed=2 * count * page_bytes
        ),
        interpret=interpret,
        name="tpu_relocate",
    )(counts, *ids, angles, kv)
    if scale is None:
        return found[0]
    scale = jnp.asarray(scale)
    moved = rows_of_pages(scale, source[order])  # [n, K, S]
    moved = moved.at[..., :size].multiply(found[1][:count, ..., 0])
    return found[0], write_scales(scale, target[order], rows, moved, interpret=interpret)


def start_all(copies: list[Any]) -> None:
    """Starts copies."""
    for copy in copies:
        copy.start()


def await_all(copies: list[Any]) -> None:
    """Waits for copies."""
    for copy in copies:
        copy.wait()


def _lanes(low: Array, high: Array, width: int) -> Array:
    both = jnp.concatenate([low, high], -1).astype(jnp.float32)
    return jnp.pad(both, ((0, 0), (0, width - both.shape[-1])))


def _kernel(
    counts_ref: Any,
    source_ref: Any,
    target_ref: Any,
    angles_ref: Any,
    _: Any,
    kv_ref: Any,
    *refs: Any,
    depth: int,
    half: int,
    chunk: int,
    quantized: bool,
) -> None:
    if quantized:
        grown_ref, ring, turns, read, turned, written, grown_ring, grown_written = refs
    else:
        ring, turns, read, turned, written = refs
    step = pl.program_id(0)
    count = counts_ref[step]

    def incoming(n: Array) -> list[Any]:
        place = lax.rem(n, depth)
        return [
            pltpu.make_async_copy(kv_ref.at[source_ref[0, 0, n]], ring.at[place], read.at[place]),
            pltpu.make_async_copy(angles_ref.at[step * chunk + n], turns.at[place], turned.at[place]),
        ]

    def outgoing(n: Array) -> list[Any]:
        place = lax.rem(n, depth)
        copies = [pltpu.make_async_copy(ring.at[place], kv_ref.at[target_ref[0, 0, n]], written.at[place])]
        if quantized:
            to = grown_ref.at[step * chunk + n]
            copies.append(pltpu.make_async_copy(grown_ring.at[place], to, grown_written.at[place]))
        return copies

    ahead = depth - 2  # pages coming in; one turns and one goes

    def begin(n: int) -> None:  # scalars of a move that is not there must not be read
        pl.when(n < count)(lambda: start_all(incoming(jnp.int32(n))))

    for n in range(ahead):
        begin(n)

    def move(n: Array, _: None) -> None:
        place = lax.rem(n, depth)

        # The place that page n + ahead comes into was sent by page n - 2.
        pl.when(n >= 2)(lambda: await_all(outgoing(n - 2)))
        pl.when(n + ahead < count)(lambda: start_all(incoming(n + ahead)))
        await_all(incoming(n))
        for h in range(ring.shape[1]):
            rows = ring[place, h]
            keys = _turn(rows.astype(jnp.float32), turns[place, 0:1, :], turns[place, 1:2, :], half)
            if not quantized:
                ring[place, h] = keys.astype(ring.dtype)
                continue
            lane = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
            is_key = lane < rows.shape[1] // 2
            grown = jnp.max(jnp.where(is_key, jnp.abs(keys), 0.0), 1, keepdims=True) / largest(ring.dtype)
            fitted = jnp.where(is_key, keys / jnp.where(grown > 0, grown, 1.0), keys)
            if ring.dtype == jnp.int8:
                fitted = jnp.round(fitted)
            ring[place, h] = fitted.astype(ring.dtype)
            grown_ring[place, h] = grown
        start_all(outgoing(n))

    lax.fori_loop(0, count, move, None)

    # The last two pages are still going.
    pl.when(count >= 2)(lambda: await_all(outgoing(count - 2)))
    pl.when(count >= 1)(lambda: await_all(outgoing(count - 1)))


def _turn(x: Array, cos: Array, sin: Array, half: int) -> Array:
    """Rotates the first 2·half lanes of float32 [P, 2H]; the others are returned bit for bit."""
    width = x.shape[1]
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    partner = jnp.where(lane < half, pltpu.roll(x, width - half, 1), pltpu.roll(x, half, 1))
    return jnp.where(lane < 2 * half, x * cos + partner * sin, x)
