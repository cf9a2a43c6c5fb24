"""The Hopper kernels under the Mosaic GPU interpreter, and on a GPU if there is one, against float64."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import quick_compiles  # noqa: F401  (autouse)
from tolerances import tolerance

from pallas_kernels import judge, mosaic_gpu, mosaic_gpu_decode, mosaic_gpu_prefill, reference, shapes
from pallas_kernels.mosaic_gpu_relocate import relocate_pages

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Mosaic GPU needs absl-py")
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="jax has no Mosaic GPU interpreter before 0.11.2"
)
on_hopper = pytest.mark.skipif(
    not any(name in jax.devices()[0].device_kind for name in mosaic_gpu.HOPPER), reason="no Hopper GPU here"
)

DECODE = shapes.Case(
    name="decode", context=(120, 20), kv_heads=1, group=3, dtype="bfloat16", deltas=3, window=90, soft_cap=2.0
)
PREFILL = shapes.Case(
    name="prefill", context=(140,), length=70, kv_heads=1, group=2, dtype="bfloat16", deltas=2, scattered=True
)


def _hopper(case: shapes.Case) -> shapes.Case:
    """The case with what the kernels take: pages of 16 bits or less, blocks of whole tiles."""
    block = max(case.block, 64 // case.page_size)
    dtype = "bfloat16" if case.dtype == "float32" or case.length > 1 else case.dtype
    return dataclasses.replace(case, dtype=dtype, block=block)


def _error(case: shapes.Case, module: Any, interpret: Any, seed: int = 5, **options: Any) -> float:
    inputs = shapes.build(case, seed=seed)
    masks: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap}
    expected = judge.attention(*inputs.arrays(), **masks, scale=inputs.scale)
    if inputs.scale is not None:
        masks["scale"] = jnp.asarray(inputs.scale)
    found = module.paged_attention(
        *map(jnp.asarray, inputs.arrays()), **masks, **options, interpret=interpret
    )
    assert np.isfinite(found).all()
    return float(np.abs(np.asarray(found, np.float64) - expected).max())


def _detecting_races() -> Any:
    """Parameters of the interpreter that raise where two threads, or a thread and a copy, race."""
    return plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture(autouse=True)
def _fresh_interpreter() -> Iterator[None]:
    """The interpreter keeps its state after a failure."""
    yield
    if hasattr(plgpu, "InterpretGPUParams"):
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        gpu_callbacks.reset_gpu_interpret_mode_state()


@interpreted
def test_decode_reads_relocated_runs_in_parts() -> None:
    """Three deltas, a ragged batch, a window, a soft cap; NaN in every slot that nobody owns."""
    assert _error(DECODE, mosaic_gpu_decode, _detecting_races(), splits=2) < tolerance(
        "attention", "bfloat16"
    )


@interpreted
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_decode_of_narrow_pages_with_scales(dtype: str) -> None:
    """Their scales are NaN, or their bits anything, where nobody owns a slot."""
    case = dataclasses.replace(DECODE, context=(70,), deltas=2, dtype=dtype, page_size=32, window=None)
    assert _error(case, mosaic_gpu_decode, True, splits=1) < tolerance("attention", "bfloat16")


@interpreted
def test_prefill_of_scattered_queries_over_two_deltas() -> None:
    """140 rows: two groups of rows, the second one padded; full tiles, cut tiles and tiles nobody sees."""
    assert _error(PREFILL, mosaic_gpu_prefill, _detecting_races()) < tolerance("attention", "bfloat16")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("case", shapes.DECODE, ids=lambda c: c.name)
def test_decode_of_every_case(case: shapes.Case) -> None:
    assert _error(_hopper(case), mosaic_gpu_decode, True) < tolerance("attention", "bfloat16")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("case", shapes.PREFILL, ids=lambda c: c.name)
def test_prefill_of_every_case(case: shapes.Case) -> None:
    """With more query heads, so that more than 64 rows go to the prefill kernel itself."""
    case = dataclasses.replace(_hopper(case), group=max(case.group, -(-65 // case.length)))
    assert _error(case, mosaic_gpu_prefill, True) < tolerance("attention", "bfloat16")


@interpreted
def test_a_row_that_pads_a_batch_is_zero_though_its_group_reads_a_tile_without_a_mask() -> None:
    case = dataclasses.replace(PREFILL, context=(67,), deltas=1, scattered=False)
    inputs = shapes.build(case)
    found = np.asarray(mosaic_gpu_prefill.paged_attention(*map(jnp.asarray, inputs.arrays()), interpret=True))
    assert (inputs.tables.positions[0, 67:] == -1).all()
    assert not found[0, 67:].any()
    expected = judge.attention(*inputs.arrays())
    np.testing.assert_allclose(found, expected, atol=tolerance("attention", "bfloat16"))


@interpreted
def test_a_missing_wait_is_reported_as_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that a ring invites, planted: computing before the pages are there."""
    real, calls = plgpu.barrier_wait, []

    def wait(barrier: Any) -> None:
        calls.append(barrier)
        if len(calls) == 1:  # the queries are waited for, the tiles are not
            real(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", wait)
    case = dataclasses.replace(DECODE, context=(60,), deltas=1, window=None, soft_cap=None)
    with pytest.raises(RuntimeError, match="RACE DETECTED"):
        _error(case, mosaic_gpu_decode, _detecting_races(), splits=1)
    assert len(calls) > 1


def _moves(
    rng: np.random.Generator, rows: int, heads: int, head_dim: int, size: int, half: int, dtype: Any
) -> tuple[Any, ...]:
    kv = jnp.asarray(rng.standard_normal((rows, heads, size, 2 * head_dim), np.float32)).astype(dtype)
    source, target = jnp.array([1, 5, 7, 2], jnp.int32), jnp.array([0, 3, rows, 8], jnp.int32)
    angle = rng.uniform(-3, 3, (4, half))
    cos, sin = (jnp.asarray(f(angle).astype(np.float32)) for f in (np.cos, np.sin))
    return kv, source, target, cos, sin, angle


@interpreted
@pytest.mark.parametrize(
    ("heads", "head_dim", "size", "half", "dtype"),
    [(3, 64, 16, 32, jnp.bfloat16), (2, 64, 8, 16, jnp.float32)],
)
def test_relocation_rotates_keys_keeps_values_and_drops_what_goes_nowhere(
    heads: int, head_dim: int, size: int, half: int, dtype: Any
) -> None:
    rng = np.random.default_rng(half)
    kv, source, target, cos, sin, angle = _moves(rng, 9, heads, head_dim, size, half, dtype)
    found = np.asarray(relocate_pages(kv, source, target, cos, sin, interpret=True)).astype(np.float64)
    expected = np.asarray(kv).astype(np.float64)
    before = expected.copy()
    for i in (0, 1, 3):  # the third target is outside
        s, t = int(source[i]), int(target[i])
        expected[t, ..., :head_dim] = judge.rotated(before[s, ..., :head_dim], angle[i])
        expected[t, ..., head_dim:] = before[s, ..., head_dim:]
    # Keys are rounded once, to the dtype of the pages.
    step = np.abs(expected) * float(jnp.finfo(dtype).eps) / 2 + tolerance("relocated_key")
    assert np.all(np.abs(found - expected) <= step)
    untouched = [1, 2, 4, 5, 6, 7]
    np.testing.assert_array_equal(found[untouched], before[untouched])
    np.testing.assert_array_equal(found[..., head_dim:], expected[..., head_dim:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "reads bfloat16, int8, float8_e4m3fn pages, found float32"),
        ({"head_dim": 48}, "head dims 64, 128, 192, 256, found 48"),
        ({"page_size": 4}, "multiple of 8 slots, found 4"),
        ({"block": 2}, "hold no whole number"),
        ({"group": 65}, "up to 64 query rows"),
    ],
)
def test_what_the_kernels_do_not_do_is_said_in_a_sentence(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_gpu, "check_device", lambda _: None)
    case = dataclasses.replace(DECODE, window=None, soft_cap=None, **change)
    inputs = shapes.build(case)
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu_decode.paged_attention(*map(jnp.asarray, inputs.arrays()))


def test_without_a_hopper_gpu_the_kernels_refuse() -> None:
    if any(name in jax.devices()[0].device_kind for name in mosaic_gpu.HOPPER):
        pytest.skip("there is a Hopper GPU here")
    inputs = shapes.build(DECODE)
    with pytest.raises(NotImplementedError, match="need one of H100"):
        mosaic_gpu_decode.paged_attention(*map(jnp.asarray, inputs.arrays()))


def test_a_jax_without_the_backend_or_with_another_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(plgpu, "RefUnion")
    with pytest.raises(NotImplementedError, match="has no `RefUnion`"):
        mosaic_gpu.check_device(False)
    monkeypatch.delattr(jax.experimental.pallas, "mosaic_gpu")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
    with pytest.raises(NotImplementedError, match="can't load Mosaic GPU"):
        mosaic_gpu.check_device(False)


def test_a_jax_without_the_interpreter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(plgpu, "InterpretGPUParams", raising=False)
    with pytest.raises(NotImplementedError, match=r"interpreted by jax 0\.11\.2 or newer"):
        mosaic_gpu.check_device(True)


@pytest.mark.parametrize(
    ("pairs", "tiles", "least", "most"),
    [
        (8, 512, 31, 33),  # one sequence, 8 heads: as many parts as fill the chip once
        (3, 8, 8, 8),  # a short context: a part for every tile
        (64, 512, 4, 4),  # a full wave, not a second one that is nearly empty
        (2048, 64, 1, 2),  # the chip is full anyway
        (1, 1, 1, 1),
    ],
)
def test_parts_of_a_context_fill_the_chip_and_no_more(pairs: int, tiles: int, least: int, most: int) -> None:
    assert least <= mosaic_gpu_decode.best_splits(pairs, tiles) <= most


@pytest.mark.parametrize("full_first", [True, False])
@pytest.mark.parametrize("window", [None, 70])
def test_the_plan_visits_what_is_seen_and_nothing_else(window: int | None, full_first: bool) -> None:
    """Against loops over tiles, queries and slots."""
    case = dataclasses.replace(PREFILL, context=(300, 40), length=9, window=window, deltas=3)
    table, tile, rows = shapes.tables(case, seed=3), 64, 8
    positions = mosaic_gpu.pad_positions(jnp.asarray(table.positions), case.group, 24).reshape(2, -1, rows)
    options = {"page_size": case.page_size, "tile": tile, "window": window, "full_first": full_first}

    @jax.jit
    def planned(*arrays: Any) -> tuple[Any, Any]:
        plan = mosaic_gpu.plan(*arrays, **options)
        return plan.code, plan.count

    codes, counts = planned(table.first, table.lo, table.hi, table.delta_index, positions)
    per_tile, at = tile // case.page_size, np.asarray(positions)
    for b, group in np.ndindex(at.shape[:2]):
        real = at[b, group][at[b, group] >= 0]
        expected: dict[int, bool] = {}
        for number in range(table.page.shape[1] // per_tile):
            entries = range(number * per_tile, (number + 1) * per_tile)
            stands = [table.first[b, m] + s for m in entries for s in range(table.lo[b, m], table.hi[b, m])]
            sees = np.array([[w <= p and (window is None or w > p - window) for w in stands] for p in real])
            # A superset is allowed where no single query sees a slot of a tile between two queries.
            if sees.size and sees.any():
                expected[number] = bool(sees.all()) and len(stands) == tile
        count, full = (int(n) for n in np.asarray(counts)[b, group])
        code = np.asarray(codes)[b, group, :count]
        visited = [int(c) >> 8 for c in code]
        assert set(expected) <= set(visited)
        for number, c in zip(visited, code, strict=True):
            assert int(c) >> 1 & 127 == table.delta_index[b, number * per_tile // case.block]
        if full_first:
            assert set(visited[:full]) == {n for n, whole in expected.items() if whole}
        else:
            assert visited == sorted(visited)


@on_hopper
@pytest.mark.parametrize("case", shapes.DECODE, ids=lambda c: c.name)
def test_decode_on_the_device(case: shapes.Case) -> None:
    assert _error(_hopper(case), mosaic_gpu_decode, False) < tolerance("attention", "bfloat16")


@on_hopper
@pytest.mark.parametrize("case", shapes.PREFILL, ids=lambda c: c.name)
def test_prefill_on_the_device(case: shapes.Case) -> None:
    case = dataclasses.replace(_hopper(case), group=max(case.group, -(-65 // case.length)))
    assert _error(case, mosaic_gpu_prefill, False) < tolerance("attention", "bfloat16")


@on_hopper
def test_relocation_on_the_device() -> None:
    kv, source, target, cos, sin, _ = _moves(np.random.default_rng(0), 9, 8, 128, 16, 64, jnp.bfloat16)
    expected = np.asarray(reference.relocate_pages(kv, source, target, cos, sin)).astype(np.float64)
    found = np.asarray(jax.jit(relocate_pages)(kv, source, target, cos, sin)).astype(np.float64)
    # Two roundings to bfloat16: a step apart.
    np.testing.assert_allclose(found, expected, rtol=2.0**-7, atol=tolerance("relocated_key"))
