"""Paged attention of one query a sequence for GPUs other than Hopper, through Pallas' Triton backend.

JAX has announced that it will remove that backend: nothing imports this module but the dispatcher, by name,
so that it can be deleted alone.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

Array = Any

LOG2E = math.log2(math.e)
MASKED, PEAK = -1e30, -1e20  # as in the other kernels: exp2(MASKED - PEAK) is exactly 0
LEAST_ROWS = 16  # of a Triton dot
SLOTS = 64  # read at a time, at most
STAGES = 2
SHARED_BYTES = 64 * 1024  # for the pages in flight: consumer GPUs have 99 KB in all
SPLITS = 16  # parts of a context, at most
DTYPES = (jnp.float32, jnp.bfloat16)


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
    """`pallas_kernels.paged_attention` for T = 1.

    Args:
      q: f32[B, R, 1, K, G, H], scaled, rotated for each delta.
      kv: f32 or bf16 [X, K, P, 2H].
      page, first, lo, hi: i32[B, M].
      delta_index: i32[B, M/block].
      positions: i32[B, 1]; a negative one sees nothing.
      scale: None; pages with scales are not supported.
      window: positions that a query sees, its own included; None for all.
      soft_cap: scores become cap·tanh(score / cap).
      interpret: True to run without a GPU.

    Returns:
      f32[B, 1, K, G, H]; zeros where a query sees nothing.

    Raises:
      NotImplementedError: a shape or dtype that this kernel does not do, or a JAX without the backend.
    """
    _, _, length, _, group, head_dim = q.shape
    rows, _, page_size, _ = kv.shape
    block = page.shape[1] // delta_index.shape[1]
    if length != 1:
        raise NotImplementedError(f"the Triton kernel takes one query a sequence, found {length}")
    if kv.dtype not in DTYPES or scale is not None:
        raise NotImplementedError(f"the Triton kernel reads float32 and bfloat16 pages, found {kv.dtype}")
    for name, value in (("head dims", head_dim), ("page sizes", page_size), ("blocks of entries", block)):
        if value & (value - 1):
            raise NotImplementedError(f"the Triton kernel takes {name} that are powers of two, found {value}")
    if head_dim < 16 or block * page_size < 16:
        raise NotImplementedError(
            "the Triton kernel takes head dims and blocks of 16 slots or more, found "
            f"{head_dim} and {block} x {page_size}"
        )
    fits = SHARED_BYTES // (STAGES * 2 * head_dim * jnp.dtype(kv.dtype).itemsize)
    if fits < 16:
        raise NotImplementedError(f"the Triton kernel has no room for head dims of {head_dim} in {kv.dtype}")
    tile = min(block * page_size, SLOTS, 2 ** (fits.bit_length() - 1))
    number = page.shape[1] * page_size // tile
    splits = min(SPLITS, number)
    padded = max(LEAST_ROWS, pl.next_power_of_2(group))
    q = q[:, :, 0].transpose(0, 2, 1, 3, 4).astype(kv.dtype)
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, padded - group), (0, 0)))
    # Where the last tile that any query sees ends: padded tables end in entries that hold nothing.
    last = positions[:, 0]
    used = (hi > lo) & (first + lo <= last[:, None])
    used = jnp.where(used, jnp.arange(1, page.shape[1] + 1, dtype=jnp.int32), 0).max(1)
    tiles = -(-used * page_size // tile)
    page = jnp.clip(page, 0, rows - 1)
    parts = _partial(
        q, kv, page, first, lo, hi, delta_index, last, tiles,
        tile=tile, block=block, splits=splits, window=window, soft_cap=soft_cap, interpret=bool(interpret),
    )  # fmt: skip
    return _combine(*parts)[:, None, :, :group]


def _combine(out: Array, peak: Array, total: Array) -> Array:
    """Joins parts: f32[B, K, S, rows, H] and f32[B, K, S, rows] twice -> f32[B, K, rows, H]."""
    weight = jnp.exp2(peak - peak.max(2, keepdims=True))
    total = (total * weight).sum(2)
    return (out * weight[..., None]).sum(2) / jnp.where(total > 0, total, 1.0)[..., None]


def _backend() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas import triton
    except ImportError as error:
        raise NotImplementedError(f"jax {jax.__version__} has no Triton backend of Pallas") from error
    return triton


def _partial(
    q: Array, kv: Array, page: Array, first: Array, lo: Array, hi: Array, delta_index: Array, last: Array,
    tiles: Array, *, tile: int, block: int, splits: int, window: int | None, soft_cap: float | None,
    interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Unnormalized outputs, maxima (log2) and sums of every part; q is [B, K, R, rows, H]."""
    triton = _backend()
    batch, kv_heads, _, rows, head_dim = q.shape
    page_size = kv.shape[2]

    def body(*refs: Any) -> None:
        q_ref, page_ref, first_ref, lo_ref, hi_ref, delta_ref, last_ref, tiles_ref, kv_ref, *out_refs = refs
        out_ref, peak_ref, total_ref = out_refs
        b, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        here, count = last_ref[b], tiles_ref[b]
        columns = jnp.arange(head_dim)

        def fold(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, peak, total = carry
            slots = i * tile + jnp.arange(tile)
            entry, slot = slots // page_size, slots % page_size
            where = triton.load(first_ref.at[b, entry]) + slot
            seen = (slot >= triton.load(lo_ref.at[b, entry])) & (slot < triton.load(hi_ref.at[b, entry]))
            seen &= where <= here
            if window is not None:
                seen &= where > here - window
            row = triton.load(page_ref.at[b, entry])
            query = q_ref[delta_ref[b, i * tile // (page_size * block)]]
            mask = jnp.broadcast_to(seen[:, None], (tile, head_dim))
            keys, values = (
                triton.load(
                    kv_ref.at[row[:, None], head, slot[:, None], start + columns[None, :]],
                    mask=mask,
                    other=0.0,
                )
                for start in (0, head_dim)
            )
            x = triton.dot(query, keys.T, precision=precision)
            if soft_cap is None:
                x = x * LOG2E
            else:
                x = (soft_cap * LOG2E) * (1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E / soft_cap)) + 1.0))
            x = jnp.where(seen[None, :], x, MASKED)
            new_peak = jnp.maximum(peak, x.max(1))
            keep = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(x - new_peak[:, None])
            product = triton.dot(weights.astype(values.dtype), values, precision=precision)
            return acc * keep[:, None] + product, new_peak, total * keep + weights.sum(1)

        start = (
            jnp.zeros((rows, head_dim), jnp.float32),
            jnp.full((rows,), PEAK, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
        )
        out_ref[...], peak_ref[...], total_ref[...] = lax.fori_loop(
            count * part // splits, count * (part + 1) // splits, fold, start
        )

    precision = lax.Precision.HIGHEST if kv.dtype == jnp.float32 else None  # float32 without TF32
    whole = [pl.BlockSpec(a.shape, lambda *_, n=a.ndim: (0,) * n)
             for a in (page, first, lo, hi, delta_index, last, tiles, kv)]  # fmt: skip
    shape = (batch, kv_heads, splits, rows)
    return tuple(
        pl.pallas_call(
            body,
            grid=(batch, kv_heads, splits),
            in_specs=[
                pl.BlockSpec((None, None, *q.shape[2:]), lambda b, h, _: (b, h, 0, 0, 0)),
                *whole,
            ],
            out_specs=[
                pl.BlockSpec((None, None, None, rows, head_dim), lambda b, h, s: (b, h, s, 0, 0)),
                *[pl.BlockSpec((None, None, None, rows), lambda b, h, s: (b, h, s, 0))] * 2,
            ],
            out_shape=[
                jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
                *[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2,
            ],
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=STAGES),
            interpret=interpret,
            name="paged_decode",
        )(q, page, first, lo, hi, delta_index, last, tiles, kv)
    )
