"""Arrays of a case on the device, and float64 answers to some of its queries."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels.sweep import Moves
from pallas_kernels import judge, shapes

Array = Any
BLOCK = 512  # pages with values of their own; more are repeats, at other addresses
JUDGED_SLOTS = 1 << 17  # a float64 loop visits about so many slots of a case


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of `paged_attention`, and which queries (b, t) are judged by what."""

    case: shapes.Case
    table: shapes.Tables
    q: Array
    kv: Array
    judged: tuple[tuple[int, int], ...]
    expected: np.ndarray  # f64[judged, K, G, H]

    def arrays(self) -> tuple[Array, ...]:
        """Positional arguments of `paged_attention`."""
        return (self.q, self.kv, *map(jnp.asarray, self.table.arrays()))


def problem(case: shapes.Case, seed: int) -> Problem:
    """Builds a case: tables on the host, queries and pages on the device."""
    table = shapes.tables(case, seed)
    q = shapes.queries(case, seed)
    kv = random_pages((table.rows, case.kv_heads, case.page_size, 2 * case.head_dim), case.dtype, seed)
    last = case.length - 1
    judged = [(0, last), *([(case.batch - 1, last)] if case.batch > 1 else []), *([(0, 0)] if last else [])]
    judged = judged[: max(1, JUDGED_SLOTS // max(case.context))]
    return Problem(
        case=case, table=table, q=jnp.asarray(q), kv=kv, judged=tuple(judged),
        expected=np.stack([_answer(case, table, q, kv, b, t) for b, t in judged]),
    )  # fmt: skip


def _answer(case: shapes.Case, table: shapes.Tables, q: np.ndarray, kv: Array, b: int, t: int) -> np.ndarray:
    """The float64 answer to one query; only its sequence's pages come to the host."""
    live = np.minimum(table.page[b], table.rows - 1)
    pages = np.asarray(kv[jnp.asarray(live)])
    one = slice(b, b + 1)
    out = judge.attention(
        q[one], pages, np.arange(len(live), dtype=np.int32)[None], table.first[one], table.lo[one],
        table.hi[one], table.delta_index[one], table.positions[one],
        window=case.window, soft_cap=case.soft_cap, at=[(0, t)],
    )  # fmt: skip
    answer: np.ndarray = out[0, t]
    return answer


def random_pages(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Pages of normal values, made on the device; every BLOCK pages the values repeat."""

    def make(key: Array) -> Array:
        block = jax.random.normal(key, (min(BLOCK, shape[0]), *shape[1:]), jnp.float32).astype(dtype)
        return block[jnp.arange(shape[0]) % block.shape[0]]

    return jax.jit(make)(jax.random.key(seed))


def error(found: Array, wanted: Problem) -> float:
    """Largest absolute difference to the judged answers; infinite if anything is not finite."""
    rows = np.stack([np.asarray(found[b, t], np.float64) for b, t in wanted.judged])
    difference = np.abs(rows - wanted.expected).max()
    return float(difference) if np.isfinite(rows).all() else float("inf")


@dataclasses.dataclass(frozen=True)
class MoveProblem:
    """Arguments of `relocate_pages`."""

    case: Moves
    kv: Array
    source: np.ndarray
    target: np.ndarray
    angle: np.ndarray  # f64[n, H/2]

    def arrays(self) -> tuple[Array, ...]:
        """Positional arguments of `relocate_pages`."""
        angles = (f(self.angle).astype(np.float32) for f in (np.cos, np.sin))
        return (self.kv, *map(jnp.asarray, (self.source, self.target)), *map(jnp.asarray, angles))


def move_problem(case: Moves, seed: int) -> MoveProblem:
    """n pages, in any order, into n others."""
    rng = np.random.default_rng([seed, 4])
    order = rng.permutation(2 * case.pages + 8).astype(np.int32)
    shape = (len(order), case.kv_heads, case.page_size, 2 * case.head_dim)
    return MoveProblem(
        case=case,
        kv=random_pages(shape, case.dtype, seed),
        source=order[: case.pages],
        target=order[case.pages : 2 * case.pages],
        angle=rng.uniform(-3, 3, (case.pages, case.head_dim // 2)),
    )


def move_error(before: np.ndarray, after: Array, wanted: MoveProblem) -> float:
    """Largest error of the first and the last moved page, infinite where values or other pages changed.

    Args:
      before: source pages of those two moves, and one page that nothing moves to, as they were.
      after: all pages.
      wanted: the moves.
    """
    picked = [0, wanted.case.pages - 1]
    head_dim, worst = wanted.case.head_dim, 0.0
    for row, i in enumerate(picked):
        moved = np.asarray(after[int(wanted.target[i])])
        keys = judge.rotated(before[row][..., :head_dim].astype(np.float64), wanted.angle[i])
        worst = max(worst, float(np.abs(moved[..., :head_dim].astype(np.float64) - keys).max()))
        if not np.array_equal(moved[..., head_dim:], before[row][..., head_dim:]):
            return float("inf")
    untouched = np.asarray(after[int(wanted.source[-1])])
    return worst if np.array_equal(untouched, before[-1]) else float("inf")
