"""The TPU attention kernels, interpreted: against float64 loops, and with their copies watched."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import EAGER, GENERIC, ON_WAIT, found_race, fresh_interpreter, quick_compiles, without_waits
from tolerances import tolerance

import pallas_kernels
from pallas_kernels import judge, shapes, tpu_attention, tpu_decode, tpu_prefill, tpu_work

__all__ = ["quick_compiles"]  # a fixture of this module

# Small on purpose: the interpreters that watch copies take milliseconds for each.
WATCHED = shapes.Case(
    name="watched", context=(23, 9, 1), deltas=2, kv_heads=1, group=2, head_dim=8, page_size=4, block=2
)
WATCHED_PREFILL = dataclasses.replace(WATCHED, context=(14, 6), length=5, window=9, soft_cap=2.0)
QUICK_DECODE = ("three-kv-heads", "relocated", "head-256", "bfloat16", "int8")
QUICK_PREFILL = ("ragged", "repair", "window", "bfloat16")


def cases(which: tuple[shapes.Case, ...], quick: tuple[str, ...]) -> list[Any]:
    """The quick ones by default, the others when slow tests are asked for."""
    marks = [() if c.name in quick else pytest.mark.slow for c in which]
    return [pytest.param(c, id=c.name, marks=m) for c, m in zip(which, marks, strict=True)]


def attend(case: shapes.Case, inputs: shapes.Inputs, interpret: Any) -> np.ndarray:
    module = tpu_decode if case.length == 1 else tpu_prefill
    run = jax.jit(
        functools.partial(
            module.paged_attention, window=case.window, soft_cap=case.soft_cap, interpret=interpret
        )
    )
    return np.asarray(run(*inputs.arrays(), scale=inputs.scale))


def expect(case: shapes.Case, inputs: shapes.Inputs) -> np.ndarray:
    return judge.attention(*inputs.arrays(), scale=inputs.scale, window=case.window, soft_cap=case.soft_cap)


@pytest.mark.parametrize("case", cases(shapes.DECODE, QUICK_DECODE))
def test_decode_is_softmax_over_what_a_query_sees(case: shapes.Case) -> None:
    inputs = shapes.build(case, seed=1)
    found = attend(case, inputs, GENERIC)
    name = "attention" if case.dtype == "float32" else "attention_split"
    np.testing.assert_allclose(found, expect(case, inputs), atol=tolerance(name))


@pytest.mark.parametrize("case", cases(shapes.PREFILL, QUICK_PREFILL))
def test_prefill_is_softmax_over_what_a_query_sees(case: shapes.Case) -> None:
    inputs = shapes.build(case, seed=2)
    found = attend(case, inputs, GENERIC)
    dtype = "float32" if case.dtype == "float32" else "bfloat16"
    np.testing.assert_allclose(found, expect(case, inputs), atol=tolerance("attention", dtype))


def test_a_chunk_in_several_tiles_equals_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    case = shapes.Case(name="", context=(50, 31), length=21, head_dim=8, page_size=4, window=13, deltas=2)
    inputs = shapes.build(case, seed=3)
    monkeypatch.setattr(tpu_prefill, "QUERY_ROWS", 8)
    assert tpu_prefill._sizes(_tiling(case), jnp.float32, 21, 2, 4)[1].units == 6
    np.testing.assert_allclose(
        attend(case, inputs, GENERIC), expect(case, inputs), atol=tolerance("attention")
    )


def _tiling(case: shapes.Case) -> tpu_attention.Tiling:
    return tpu_attention.Tiling(
        units=1,
        rows=0,
        depth=2,
        block=case.block,
        page_size=case.page_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        deltas=case.deltas,
        scaled=False,
        split=False,
        window=None,
        soft_cap=None,
    )


@pytest.mark.parametrize("case", [WATCHED, WATCHED_PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("interpret", [ON_WAIT, EAGER], ids=["on_wait", "eager"])
def test_every_copy_is_awaited_before_it_is_read(
    case: shapes.Case, interpret: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = shapes.build(case, seed=4)
    results: list[np.ndarray] = []
    with fresh_interpreter():
        assert not found_race(lambda: results.append(attend(case, inputs, interpret)), capfd)
    np.testing.assert_allclose(results[0], expect(case, inputs), atol=tolerance("attention"))


def test_scales_are_awaited_too(capfd: pytest.CaptureFixture[str]) -> None:
    case = dataclasses.replace(WATCHED, dtype="int8")
    inputs = shapes.build(case, seed=4)
    results: list[np.ndarray] = []
    with fresh_interpreter():
        assert not found_race(lambda: results.append(attend(case, inputs, EAGER)), capfd)
    np.testing.assert_allclose(results[0], expect(case, inputs), atol=tolerance("attention_split"))


def test_a_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    inputs = shapes.build(WATCHED, seed=4)
    without_waits(monkeypatch, tpu_attention)
    with fresh_interpreter():
        assert found_race(lambda: attend(WATCHED, inputs, EAGER), capfd)
    with fresh_interpreter():
        found = attend(WATCHED, inputs, ON_WAIT)
    assert not np.allclose(found, expect(WATCHED, inputs), atol=1e-3)


def test_a_block_nobody_reads_changes_no_bit() -> None:
    """Empty entries and blocks behind every query are skipped, wherever they stand in the table."""
    case = shapes.Case(name="", context=(23, 9), head_dim=8, page_size=4, block=2)
    inputs = shapes.build(case, seed=6)
    table = inputs.tables
    batch, blocks = table.delta_index.shape

    def wider(a: np.ndarray, fill: int) -> np.ndarray:
        a = a.reshape(batch, blocks, case.block)
        empty = np.full((batch, 2, case.block), fill, np.int32)
        return np.concatenate([empty[:, :1], a[:, :2], empty, a[:, 2:], empty[:, :1]], 1).reshape(batch, -1)

    padded = dataclasses.replace(
        table,
        page=wider(table.page, table.rows),
        first=wider(table.first, 0),
        lo=wider(table.lo, 0),
        hi=wider(table.hi, 0),
        delta_index=np.zeros((batch, blocks + 4), np.int32),
    )
    found = attend(case, dataclasses.replace(inputs, tables=padded), GENERIC)
    np.testing.assert_array_equal(found, attend(case, inputs, GENERIC))


def test_work_holds_the_blocks_that_a_unit_sees_and_runs_on_into_the_next_unit() -> None:
    case = shapes.Case(name="", context=(20, 3), head_dim=8, page_size=4, block=1)
    table = shapes.tables(case)
    work = tpu_work.plan(
        *(jnp.asarray(a) for a in (table.page, table.first, table.lo, table.hi, table.delta_index)),
        jnp.asarray(table.positions)[:, None],
        page_size=4,
        rows=table.rows,
        window=6,
        ahead=2,
    )
    # Position 19 with a window of 6 sees 14..19: slots 2, 3 of its fourth page and all of the fifth.
    np.testing.assert_array_equal(work.count, [2, 1])
    np.testing.assert_array_equal(work.start, [0, 2])
    expected = [table.page[0, 3], table.page[0, 4], table.page[1, 0], -1]
    np.testing.assert_array_equal(work.rows[0, 0, :4], expected)
    np.testing.assert_array_equal(work.rows[1, 0, :2], [table.page[1, 0], -1])
    np.testing.assert_array_equal(work.bounds[0, 0, :2], [2 + (4 << 16), 0 + (4 << 16)])
    np.testing.assert_array_equal(work.bounds[1, 0, :1], [3 << 16])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head dim is 80"),
        ({"page_size": 12}, "page size is 12, .* multiples of 8 for float32"),
        ({"page_size": 8, "dtype": "bfloat16"}, "page size is 8, .* multiples of 16 for bfloat16"),
        ({"page_size": 512, "block": 4, "kv_heads": 32, "head_dim": 256}, "MiB of VMEM"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(change: dict[str, Any], message: str) -> None:
    case = dataclasses.replace(shapes.Case(name="", context=(20, 7)), **change)
    table = shapes.tables(case)
    q = jax.ShapeDtypeStruct((2, 1, 1, case.kv_heads, case.group, case.head_dim), jnp.float32)
    kv = jax.ShapeDtypeStruct((9, case.kv_heads, case.page_size, 2 * case.head_dim), case.dtype)
    with (
        pallas_kernels.compiling_for("tpu"),
        pytest.raises(NotImplementedError, match=message),
    ):
        jax.eval_shape(
            functools.partial(pallas_kernels.paged_attention, implementation="pallas_tpu"),
            *(q, kv, *table.arrays()),
        )


def test_a_table_too_long_for_scalar_memory_is_refused() -> None:
    shape = jax.ShapeDtypeStruct((1, 1 << 16), jnp.int32)
    with pytest.raises(NotImplementedError, match="65536 entries"):
        jax.eval_shape(
            tpu_decode.paged_attention,
            jax.ShapeDtypeStruct((1, 1, 1, 2, 2, 64), jnp.float32),
            jax.ShapeDtypeStruct((9, 2, 16, 128), jnp.float32),
            *(shape, shape, shape, shape),
            jax.ShapeDtypeStruct((1, 1 << 12), jnp.int32),
            jax.ShapeDtypeStruct((1, 1), jnp.int32),
        )
