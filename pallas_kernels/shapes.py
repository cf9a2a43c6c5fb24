"""Named cases that tests and benchmarks share, and what fills them: write-once tables and pages, in NumPy.

`tables` builds what a sequence knows of its pages; `fill` builds pages whose unowned slots hold NaN, so that
a stray read shows. A benchmark with more KV than the host wants to make takes the tables and fills pages on
the device.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

Array = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of attention. `context` has one length a sequence: its number is the batch."""

    name: str
    context: tuple[int, ...]  # tokens of each sequence, the queries included
    length: int = 1  # T, the last tokens of each sequence; 1 is decode
    kv_heads: int = 2  # K
    group: int = 2  # G
    head_dim: int = 64  # H
    page_size: int = 16  # P
    block: int = 4  # table entries that share one delta
    deltas: int = 1  # R; 1 is an ordinary table
    dtype: str = "float32"  # of the pages; int8 and float8_e4m3fn get scales
    window: int | None = None
    soft_cap: float | None = None
    scattered: bool = False  # queries at random positions, as in a repair

    @property
    def batch(self) -> int:
        """B, sequences."""
        return len(self.context)

    @property
    def quantized(self) -> bool:
        """Whether the pages come with scales."""
        return self.dtype in ("int8", "float8_e4m3fn")

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read, scales included."""
        slot = self.kv_heads * (2 * self.head_dim * jnp.dtype(self.dtype).itemsize + 8 * self.quantized)
        reach = [min(c, self.window + self.length - 1) if self.window else c for c in self.context]
        return sum(reach) * slot

    @property
    def flops(self) -> int:
        """Multiplications and additions of the scores that a query may see and of their values."""
        seen = 0
        for context in self.context:
            at = np.arange(max(context - self.length, 0), context) + 1
            seen += int(np.minimum(at, self.window or context).sum())
        return 4 * seen * self.kv_heads * self.group * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """Arguments of `paged_attention` that are integers, and the rows of the page array they need."""

    page: np.ndarray  # i32[B, M], `rows` where empty
    first: np.ndarray  # i32[B, M]
    lo: np.ndarray  # i32[B, M]
    hi: np.ndarray  # i32[B, M]
    delta_index: np.ndarray  # i32[B, M/block]
    positions: np.ndarray  # i32[B, T], -1 where a sequence is shorter than T
    rows: int  # X

    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which `paged_attention` takes them."""
        return self.page, self.first, self.lo, self.hi, self.delta_index, self.positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """All arguments of `paged_attention` for a case."""

    q: np.ndarray
    kv: np.ndarray
    scale: np.ndarray | None
    tables: Tables

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Positional arguments of `paged_attention`."""
        return self.q, self.kv, *self.tables.arrays()


def tables(case: Case, seed: int = 0, spare: int = 3) -> Tables:
    """Write-once tables of a case.

    A sequence is cut into R runs, each with pages of its own and a delta of its own; a relocated run starts
    and ends inside a page. Runs are padded to whole blocks with empty entries, and pages come in any order.

    Args:
      case: what to build.
      seed: of the page order and of the cuts.
      spare: rows of the page array that nobody owns.
    """
    rng = np.random.default_rng([seed, 1])
    size, plans = case.page_size, []
    for context in case.context:
        runs = min(case.deltas, max(context, 1))
        cuts = 1 + np.sort(rng.choice(context - 1, runs - 1, replace=False)) if runs > 1 else np.zeros(0)
        edges = [0, *(int(c) for c in cuts), context]
        plan = []
        for number, (start, end) in enumerate(itertools.pairwise(edges)):
            offset = int(rng.integers(0, size)) if number else 0
            plan.append((number, start, end, offset, -(-(offset + end - start) // size)))
        plans.append(plan)
    entries = max(sum(-(-pages // case.block) for *_, pages in plan) for plan in plans) * case.block
    owned = sum(pages for plan in plans for *_, pages in plan)
    rows = owned + spare
    order = rng.permutation(rows).astype(np.int32)
    shape = (case.batch, max(entries, case.block))
    page, first = np.full(shape, rows, np.int32), np.zeros(shape, np.int32)
    lo, hi = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    delta_index = np.zeros((case.batch, shape[1] // case.block), np.int32)
    taken = 0
    for b, plan in enumerate(plans):
        at = 0
        for number, start, end, offset, pages in plan:
            here = slice(at, at + pages)
            page[b, here] = order[taken : taken + pages]
            first[b, here] = start - offset + size * np.arange(pages)
            lo[b, here] = np.maximum(start - first[b, here], 0)
            hi[b, here] = np.clip(end - first[b, here], 0, size)
            blocks = -(-pages // case.block)
            delta_index[b, at // case.block : at // case.block + blocks] = number
            taken, at = taken + pages, at + blocks * case.block
    positions = np.full((case.batch, case.length), -1, np.int32)
    for b, context in enumerate(case.context):
        n = min(case.length, context)
        chosen = np.arange(context - n, context)
        if case.scattered:
            chosen = np.sort(rng.choice(context, n, replace=False))
        positions[b, :n] = chosen
    return Tables(
        page=page, first=first, lo=lo, hi=hi, delta_index=delta_index, positions=positions, rows=rows
    )


def queries(case: Case, seed: int = 0) -> np.ndarray:
    """f32[B, R, T, K, G, H], scaled so that scores are of order 1."""
    rng = np.random.default_rng([seed, 2])
    shape = (case.batch, case.deltas, case.length, case.kv_heads, case.group, case.head_dim)
    return rng.standard_normal(shape, np.float32) * np.float32(case.head_dim**-0.5)


def fill(case: Case, table: Tables, seed: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    """Pages of a case and their scales: random where owned, NaN (int8: the scale) elsewhere."""
    rng = np.random.default_rng([seed, 3])
    shape = (table.rows, case.kv_heads, case.page_size, 2 * case.head_dim)
    owned = np.zeros((table.rows, case.page_size), bool)
    slot = np.arange(case.page_size)
    live = table.hi > table.lo
    owned[table.page[live]] = (slot >= table.lo[live][:, None]) & (slot < table.hi[live][:, None])
    values = np.where(owned[:, None, :, None], rng.standard_normal(shape, np.float32), np.float32(np.nan))
    dtype = np.dtype(jnp.dtype(case.dtype))
    if not case.quantized:
        return values.astype(dtype), None
    parts = values.reshape(*shape[:3], 2, case.head_dim)
    most = 127.0 if case.dtype == "int8" else float(jnp.finfo(dtype).max)
    scale = (np.abs(parts).max(-1) / most).astype(np.float32)
    stored = (parts / scale[..., None]).reshape(shape)
    if case.dtype == "int8":
        stored = np.where(np.isnan(stored), 127.0, np.round(stored))
    return stored.astype(dtype), scale.transpose(1, 0, 3, 2).reshape(case.kv_heads, table.rows, -1)


def build(case: Case, seed: int = 0) -> Inputs:
    """All arguments of `paged_attention` for a case. The same seed gives the same arrays."""
    table = tables(case, seed)
    kv, scale = fill(case, table, seed)
    return Inputs(q=queries(case, seed), kv=kv, scale=scale, tables=table)


# Small enough for interpret mode: under 64 blocks and 1 MB of pages.
DECODE = (
    Case(name="ordinary", context=(70, 33)),
    Case(name="one-token", context=(1, 16)),
    Case(name="three-kv-heads", context=(45,), kv_heads=3, group=3),
    Case(name="relocated", context=(120, 50), deltas=3),
    Case(name="seven-deltas", context=(150,), deltas=7, block=2),
    Case(name="window", context=(150, 20), window=40),
    Case(name="soft-cap", context=(60,), soft_cap=1.5),
    Case(name="head-128", context=(40, 21), head_dim=128, deltas=2),
    Case(name="head-256", context=(40,), head_dim=256, kv_heads=1, group=8, window=24, soft_cap=2.0),
    Case(name="page-64", context=(150,), page_size=64, block=1, deltas=2),
    Case(name="one-head", context=(37,), kv_heads=1, group=1),
    Case(name="bfloat16", context=(70, 33), dtype="bfloat16", kv_heads=3, group=3, deltas=2),
    Case(name="int8", context=(70, 33), dtype="int8", page_size=32, block=2, deltas=2),
    Case(name="float8", context=(70, 33), dtype="float8_e4m3fn", page_size=32, block=2, deltas=2),
)
PREFILL = (
    Case(name="whole", context=(40, 24), length=24),
    Case(name="chunk", context=(130,), length=40, kv_heads=3, group=3),
    Case(name="ragged", context=(60, 5, 33), length=16),
    Case(name="relocated", context=(110,), length=20, deltas=4),
    Case(name="repair", context=(110, 64), length=12, deltas=3, scattered=True),
    Case(name="window", context=(120,), length=24, window=20, soft_cap=3.0),
    Case(name="head-128", context=(48,), length=16, head_dim=128, deltas=2),
    Case(name="head-256", context=(48,), length=16, head_dim=256, kv_heads=1),
    Case(name="bfloat16", context=(90, 41), length=24, dtype="bfloat16", kv_heads=3, group=3, deltas=2),
    Case(name="int8", context=(70,), length=16, dtype="int8", page_size=32, block=2, deltas=2),
    Case(name="float8", context=(70,), length=16, dtype="float8_e4m3fn", page_size=32, block=2),
)

HEADS = {"smollm2": (3, 3, 64), "llama-8b": (8, 4, 128), "gemma": (4, 2, 256)}  # K, G, H


def benchmark_case(
    heads: str,
    batch: int,
    context: int,
    *,
    length: int = 1,
    page_size: int = 16,
    deltas: int = 1,
    dtype: str = "bfloat16",
    ragged: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Case:
    """A case of real size. Ragged contexts run evenly from a quarter of `context` to all of it.

    Args:
      heads: a name in HEADS.
      batch, context, length, page_size, deltas, dtype, window, soft_cap: as in `Case`.
      ragged: whether sequences differ in length.
    """
    kv_heads, group, head_dim = HEADS[heads]
    lengths = (context,) * batch
    if ragged:
        lengths = tuple(int(n) for n in np.linspace(max(context // 4, length), context, batch))
    kind = f"{'ragged' if ragged else 'uniform'}-r{deltas}-p{page_size}-{dtype}"
    return Case(
        name=f"{heads}-b{batch}-c{context}-t{length}-{kind}",
        context=lengths,
        length=length,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        block=max(256 // page_size, 1),
        deltas=deltas,
        dtype=dtype,
        window=window,
        soft_cap=soft_cap,
    )
