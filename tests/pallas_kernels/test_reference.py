"""The kernels' definition, its blocked form and the engine's, against float64 loops."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import quick_compiles
from tolerances import tolerance

import pallas_kernels
from jaxkv.cache.pages import KVPages
from jaxkv.cache.table import PageTable
from jaxkv.model import attention as engine_attention
from pallas_kernels import judge, reference, shapes, xla

__all__ = ["quick_compiles"]  # a fixture of this module

KV_HEADS, HEAD, SIZE = 3, 8, 4
CASES = [*(pytest.param(c, id=f"decode-{c.name}") for c in shapes.DECODE)]
CASES += [pytest.param(c, id=f"prefill-{c.name}") for c in shapes.PREFILL]


def _options(case: shapes.Case, inputs: shapes.Inputs) -> dict[str, Any]:
    scale = None if inputs.scale is None else jnp.asarray(inputs.scale)
    return {"scale": scale, "window": case.window, "soft_cap": case.soft_cap}


@pytest.mark.parametrize("case", CASES)
def test_the_definition_and_its_blocked_form_are_softmax_over_what_a_query_sees(case: shapes.Case) -> None:
    inputs = shapes.build(case, seed=5)
    options = _options(case, inputs)
    expected = judge.attention(*inputs.arrays(), **{**options, "scale": inputs.scale})
    arrays = [jnp.asarray(a) for a in inputs.arrays()]
    for form in (reference, xla):
        run = jax.jit(functools.partial(form.paged_attention, window=case.window, soft_cap=case.soft_cap))
        found = run(*arrays, scale=options["scale"])
        np.testing.assert_allclose(found, expected, atol=tolerance("attention"), err_msg=form.__name__)


@pytest.mark.parametrize(("length", "deltas"), [(1, 1), (3, 3), (17, 2)])
def test_random_tables_holes_and_repeated_positions(length: int, deltas: int) -> None:
    """What no write-once table looks like: any lo, hi, first and positions, in any order."""
    rng = np.random.default_rng(length)
    block, blocks, rows, batch = 4, 3, 40, 2
    shape = (batch, block * blocks)
    page = np.stack([rng.permutation(rows)[: shape[1]] for _ in range(batch)]).astype(np.int32)
    lo = rng.integers(0, SIZE, shape).astype(np.int32)
    hi = rng.integers(0, SIZE + 1, shape).astype(np.int32)
    first = rng.integers(0, 60, shape).astype(np.int32)
    index = rng.integers(0, deltas, (batch, blocks)).astype(np.int32)
    q = rng.standard_normal((batch, deltas, length, KV_HEADS, 2, HEAD), np.float32)
    kv = rng.standard_normal((rows, KV_HEADS, SIZE, 2 * HEAD), np.float32)
    positions = rng.integers(-1, 70, (batch, length)).astype(np.int32)
    case = (q, kv, page, first, lo, hi, index, positions)
    for options in ({}, {"window": 11, "soft_cap": 2.5}):
        expected = judge.attention(*case, **options)
        for form in (reference, xla):
            found = jax.jit(functools.partial(form.paged_attention, **options))(*case)
            np.testing.assert_allclose(found, expected, atol=tolerance("attention"))


@pytest.mark.parametrize("case", [p for p in CASES if p.values[0].dtype == "float32"][::3])
def test_the_engine_attends_as_the_definition_says(case: shapes.Case) -> None:
    case = dataclasses.replace(case, window=None, soft_cap=None)
    inputs = shapes.build(case, seed=6)
    table = inputs.tables
    expected = judge.attention(*inputs.arrays())
    pages = KVPages(kv=jnp.asarray(inputs.kv), num_pages=len(inputs.kv), dtype="float32")
    paged = PageTable(
        page=jnp.asarray(table.page),
        first=jnp.asarray(table.first),
        lo=jnp.asarray(table.lo),
        hi=jnp.asarray(table.hi),
        delta_index=jnp.asarray(table.delta_index),
        deltas=jnp.zeros((case.batch, case.deltas), jnp.int32),
    )
    positions = jnp.asarray(table.positions)
    lengths = jnp.asarray((table.positions >= 0).sum(1).astype(np.int32))
    seen = engine_attention.visibility(paged, positions, lengths, case.page_size)
    found = engine_attention.paged_attention(jnp.asarray(inputs.q), pages, paged, seen, positions, layer=0)
    np.testing.assert_allclose(found, expected, atol=tolerance("attention"))


def _pages(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((6, KV_HEADS, SIZE, 2 * HEAD), np.float32)


def test_append_writes_its_slots_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    kv, new = _pages(rng), rng.standard_normal((2, 6, KV_HEADS, HEAD), np.float32)
    row = np.array([4, 1, 6, -1, 2, 2], np.int32)
    slot = np.array([3, 0, 2, 2, -1, SIZE], np.int32)
    found = np.asarray(pallas_kernels.append(jnp.asarray(kv), row, slot, new[0], new[1]))
    expected = kv.copy()
    for i in range(2):  # the rows or slots of the others are outside the array: dropped
        expected[row[i], :, slot[i], :HEAD] = new[0, i]
        expected[row[i], :, slot[i], HEAD:] = new[1, i]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantized_slots_are_within_half_a_step_of_what_was_written(dtype: str) -> None:
    rng = np.random.default_rng(2)
    kv, scale = jnp.zeros((6, KV_HEADS, SIZE, 2 * HEAD), dtype), jnp.ones((KV_HEADS, 6, 2 * SIZE))
    new = rng.standard_normal((2, 3, KV_HEADS, HEAD), np.float32) * np.float32(30)
    new[0, 1, 0] = 0.0  # nothing to scale by
    row, slot = np.array([4, 1, 9], np.int32), np.array([3, 0, 2], np.int32)
    stored, factors = pallas_kernels.append(kv, row, slot, new[0], new[1], scale=scale)
    stored = np.asarray(stored).astype(np.float64)
    factors = judge.factors(factors, 6, SIZE).astype(np.float64)
    for i in range(2):
        for part in range(2):
            at = slice(part * HEAD, (part + 1) * HEAD)
            factor = factors[row[i], :, slot[i], part][:, None]
            found = stored[row[i], :, slot[i], at] * factor
            # int8 is evenly spaced; e4m3 has 3 bits behind the leading one, and 2^-9 at the bottom.
            step = factor if dtype == "int8" else np.maximum(np.abs(new[part, i]) / 8, factor * 2.0**-9)
            assert np.all(np.abs(found - new[part, i]) <= 0.5001 * step)
    untouched = [0, 2, 3, 5]
    assert not stored[untouched].any()
    np.testing.assert_array_equal(factors[untouched], 1.0)


@pytest.mark.parametrize("rotary", [HEAD, HEAD // 2])
def test_relocate_rotates_keys_and_copies_values(rotary: int) -> None:
    rng = np.random.default_rng(1)
    kv, angle = _pages(rng), rng.uniform(-3, 3, (3, rotary // 2))
    source = np.array([0, 5, 1], np.int32), np.array([1, 3, 1], np.int32)
    target = np.array([2, 3, 6], np.int32), np.array([0, 2, 0], np.int32)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    found = np.asarray(pallas_kernels.relocate(jnp.asarray(kv), source, target, cos, sin))
    expected = kv.astype(np.float64)
    for i in range(2):
        row = kv[source[0][i], :, source[1][i]]
        moved = np.concatenate([judge.rotated(row[:, :HEAD], angle[i]), row[:, HEAD:]], -1)
        expected[target[0][i], :, target[1][i]] = moved
    np.testing.assert_allclose(found, expected, atol=tolerance("relocated_key"))
    untouched = [0, 1, 4, 5]
    np.testing.assert_array_equal(found[untouched], kv[untouched])
    np.testing.assert_array_equal(found[..., HEAD:], expected.astype(np.float32)[..., HEAD:])


@pytest.mark.parametrize("rotary", [HEAD, HEAD // 2])
def test_relocate_pages_is_relocate_of_all_their_slots(rotary: int) -> None:
    rng = np.random.default_rng(3)
    kv, angle = _pages(rng), rng.uniform(-3, 3, (3, rotary // 2))
    source, target = np.array([0, 5, 1], np.int32), np.array([2, 3, 6], np.int32)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    found = np.asarray(pallas_kernels.relocate_pages(jnp.asarray(kv), source, target, cos, sin))
    expected = kv.astype(np.float64)
    for i in range(2):
        expected[target[i], ..., :HEAD] = judge.rotated(kv[source[i], ..., :HEAD], angle[i])
        expected[target[i], ..., HEAD:] = kv[source[i], ..., HEAD:]
    np.testing.assert_allclose(found, expected, atol=tolerance("relocated_key"))
    slots = np.tile(np.arange(SIZE, dtype=np.int32), 3)
    by_slot = pallas_kernels.relocate(
        jnp.asarray(kv),
        (np.repeat(source, SIZE), slots),
        (np.repeat(target, SIZE), slots),
        np.repeat(cos, SIZE, 0),
        np.repeat(sin, SIZE, 0),
    )
    np.testing.assert_array_equal(found, by_slot)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_relocated_quantized_keys_are_quantized_anew_and_values_kept(dtype: str) -> None:
    case = shapes.Case(name="", context=(48,), kv_heads=3, head_dim=16, dtype=dtype)
    inputs = shapes.build(case)
    kv, scale = inputs.kv, inputs.scale
    assert scale is not None
    angle = np.random.default_rng(4).uniform(-3, 3, (1, 8))
    source, target = inputs.tables.page[0, :1], np.array([inputs.tables.rows - 1], np.int32)
    target = np.setdiff1d(np.arange(inputs.tables.rows, dtype=np.int32), inputs.tables.page)[:1]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    stored, factors = pallas_kernels.relocate_pages(
        jnp.asarray(kv), source, target, cos, sin, scale=jnp.asarray(scale)
    )
    s, t = int(source[0]), int(target[0])
    scale, factors = (judge.factors(x, len(kv), case.page_size) for x in (scale, factors))
    np.testing.assert_array_equal(np.asarray(stored)[t, ..., 16:], kv[s, ..., 16:])
    np.testing.assert_array_equal(factors[t, ..., 1], scale[s, ..., 1])
    exact = judge.rotated(kv[s, ..., :16].astype(np.float64) * scale[s, ..., :1], angle[0])
    factor = factors[t, ..., :1].astype(np.float64)
    found = np.asarray(stored)[t, ..., :16].astype(np.float64) * factor
    step = factor if dtype == "int8" else np.maximum(np.abs(exact) / 8, factor * 2.0**-9)
    assert np.all(np.abs(found - exact) <= 0.5001 * step)
