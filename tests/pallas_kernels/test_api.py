"""Dispatch, argument checks and the shared cases."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import dispatch, judge, reference, scales, shapes, xla

CASE = shapes.Case(name="", context=(20, 7), head_dim=8, page_size=4)


def _arrays(case: shapes.Case = CASE) -> dict[str, Any]:
    names = ("q", "kv", "page", "first", "lo", "hi", "delta_index", "positions")
    inputs = shapes.build(case)
    return {n: jnp.asarray(a) for n, a in zip(names, inputs.arrays(), strict=True)}


def test_auto_on_a_cpu_is_xla() -> None:
    arrays = _arrays()
    found = pallas_kernels.paged_attention(**arrays)
    np.testing.assert_array_equal(found, xla.paged_attention(**arrays))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu", "triton"])
def test_a_forced_implementation_that_cannot_run_here_raises(implementation: str) -> None:
    if jax.default_backend() == dispatch.PLATFORMS[implementation]:
        pytest.skip(f"{implementation} runs on this machine")
    with pytest.raises(NotImplementedError, match=f"'{implementation}' needs a"):
        pallas_kernels.paged_attention(**_arrays(), implementation=implementation)


@pytest.mark.parametrize(
    ("implementation", "operation", "platform", "expected"),
    [
        ("auto", "decode", "cpu", ("xla",)),
        ("auto", "decode", "tpu", ("pallas_tpu", "xla")),
        ("auto", "decode", "gpu", ("pallas_gpu", "triton", "xla")),
        ("auto", "prefill", "gpu", ("pallas_gpu", "xla")),
        ("auto", "append", "gpu", ("xla",)),
        ("pallas_gpu", "append", "gpu", ("xla",)),
        ("xla", "prefill", "tpu", ("xla",)),
    ],
)
def test_what_is_tried_in_which_order(
    implementation: str, operation: str, platform: str, expected: tuple[str, ...]
) -> None:
    assert dispatch.resolve(implementation, operation, platform) == expected


def test_a_backend_without_the_operation_says_so() -> None:
    with pytest.raises(NotImplementedError, match="'triton' has no kernel for prefill"):
        dispatch.resolve("triton", "prefill", "gpu")


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match="implementation is 'cuda', expected one of auto"):
        pallas_kernels.paged_attention(**_arrays(), implementation="cuda")


def test_auto_falls_back_to_xla_where_a_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("head_dim is 8")

    def choose(implementation: str, operation: str, name: str) -> Any:  # noqa: ARG001
        return getattr(xla, name) if implementation == "xla" else refuse

    monkeypatch.setattr(dispatch, "_function", choose)
    arrays = _arrays()
    with dispatch.compiling_for("tpu"):
        result = pallas_kernels.paged_attention(**arrays)
        with pytest.raises(NotImplementedError, match="head_dim is 8"):
            pallas_kernels.paged_attention(**arrays, implementation="pallas_tpu")
    np.testing.assert_array_equal(result, xla.paged_attention(**arrays))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 1, 1, 2, 8)}, r"q has shape \(2, 1, 1, 2, 8\), expected \[B, R, T, K, G, H\]"),
        ({"q": (2, 1, 0, 2, 2, 8)}, "all at least 1"),
        ({"page": (2, 0)}, r"page has shape \(2, 0\), expected \[2, M\], M at least 1"),
        ({"q": (2, 1, 1, 3, 2, 8)}, "q has 3 KV heads of 8, expected 2 of 8"),
        ({"kv": (9, 2, 4, 15)}, "kv has shape"),
        ({"lo": (2, 7)}, "lo has shape"),
        ({"delta_index": (2, 5)}, "page has 8 entries, expected a multiple of the 5 blocks"),
        ({"positions": (2, 2)}, "positions has shape"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(change: dict[str, tuple[int, ...]], message: str) -> None:
    arrays = _arrays()
    for name, shape in change.items():
        arrays[name] = jnp.zeros(shape, arrays[name].dtype)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_attention(**arrays)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", jnp.bfloat16, "q has dtype bfloat16, expected float32"),
        ("page", jnp.float32, "page has dtype float32, expected int"),
        ("delta_index", jnp.float32, "delta_index has dtype float32, expected int"),
        ("positions", jnp.float32, "positions has dtype float32, expected int"),
        ("kv", [1.0], "kv is a list, expected an array"),
        ("lo", [1.0], "lo is a list, expected an array"),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_a_dtype_that_does_not_fit_is_named(name: str, value: Any, message: str, implementation: str) -> None:
    arrays = _arrays()
    arrays[name] = value if isinstance(value, list) else arrays[name].astype(value)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_attention(**arrays, implementation=implementation, interpret=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": 2.5}, "window is 2.5, expected None or a positive whole number"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"scale": jnp.ones((2, 2))}, "scale is given for float32 pages"),
    ],
)
def test_an_option_that_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_attention(**_arrays(), **options)


def test_int8_pages_need_a_scale() -> None:
    arrays = _arrays()
    arrays["kv"] = arrays["kv"].astype(jnp.int8)
    with pytest.raises(ValueError, match="scale is None"):
        pallas_kernels.paged_attention(**arrays)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 8, 2), r"scale has shape \(2, 4, 8, 2\), expected \(2, 4 or more, 16 or more\)"),
        ((2, 3, 16), r"scale has shape \(2, 3, 16\)"),
        ((2, 4, 15), r"scale has shape \(2, 4, 15\)"),
        ((3, 4, 16), r"scale has shape \(3, 4, 16\)"),
    ],
)
def test_scales_that_do_not_fit_their_pages_are_named(shape: tuple[int, ...], message: str) -> None:
    kv, one, new = jnp.zeros((4, 2, 8, 16), jnp.int8), jnp.zeros(1, jnp.int32), jnp.zeros((1, 2, 8))
    with pytest.raises(ValueError, match=message):
        pallas_kernels.append(kv, one, one, new, new, scale=jnp.zeros(shape))


def test_packed_scales_are_those_of_their_slots() -> None:
    factors = np.random.default_rng(0).standard_normal((5, 3, 4, 2)).astype(np.float32)
    for tiles, shape in ((False, (3, 5, 8)), (True, (3, 8, 128))):
        packed = pallas_kernels.pack_scales(factors, tiles=tiles)
        assert packed.shape == pallas_kernels.scale_shape((5, 3, 4, 16), tiles=tiles) == shape
        np.testing.assert_array_equal(judge.factors(packed, 5, 4), factors)
        page = np.array([[4, 0], [2, 9]], np.int32)
        found = scales.scales_of_pages(packed, page, 4)
        np.testing.assert_array_equal(np.asarray(found)[:1], factors[page[:1]])
        row, slot = np.array([3, 1], np.int32), np.array([0, 3], np.int32)
        np.testing.assert_array_equal(scales.scales_of_slots(packed, row, slot, 4), factors[row, :, slot])


def test_append_and_relocate_pages_check_their_arguments() -> None:
    kv, one = jnp.zeros((4, 2, 4, 16)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="keys has shape"):
        pallas_kernels.append(kv, one, one, jnp.zeros((1, 2, 4)), jnp.zeros((1, 2, 8)))
    with pytest.raises(ValueError, match="value_scale is given without scale"):
        pallas_kernels.append(
            kv, one, one, jnp.zeros((1, 2, 8)), jnp.zeros((1, 2, 8)), value_scale=jnp.ones((1, 2))
        )
    with pytest.raises(ValueError, match="cos has 8 angles a move, expected 1 to 4"):
        pallas_kernels.relocate_pages(kv, one, one, jnp.zeros((1, 8)), jnp.zeros((1, 8)))
    with pytest.raises(ValueError, match="target has shape"):
        pallas_kernels.relocate_pages(kv, one, jnp.zeros(2, jnp.int32), jnp.zeros((1, 4)), jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="source has dtype float32, expected int"):
        pallas_kernels.relocate_pages(kv, jnp.zeros(1), one, jnp.zeros((1, 4)), jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="keys has dtype int32, expected float"):
        pallas_kernels.append(kv, one, one, jnp.zeros((1, 2, 8), jnp.int32), jnp.zeros((1, 2, 8)))
    with pytest.raises(ValueError, match="target slot has shape"):
        reference.relocate(
            kv, (one, one), (one, jnp.zeros(2, jnp.int32)), jnp.zeros((1, 4)), jnp.zeros((1, 4))
        )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_nothing_to_write_or_move_leaves_the_pages_alone(implementation: str, dtype: str) -> None:
    kv, none = jnp.ones((4, 2, 8, 16), dtype), jnp.zeros(0, jnp.int32)
    scale = None if dtype == "float32" else jnp.ones(pallas_kernels.scale_shape(kv.shape, tiles=True))
    how = {"scale": scale, "implementation": implementation, "interpret": True}
    new, angles = jnp.zeros((0, 2, 8)), jnp.zeros((0, 4))
    for found in (
        pallas_kernels.append(kv, none, none, new, new, **how),
        pallas_kernels.relocate_pages(kv, none, none, angles, angles, **how),
    ):
        pages, *factors = found if isinstance(found, tuple) else (found,)
        np.testing.assert_array_equal(pages, kv)
        assert len(factors) == (scale is not None)
        for factor in factors:
            np.testing.assert_array_equal(factor, scale)


@pytest.mark.parametrize("case", shapes.DECODE + shapes.PREFILL, ids=lambda c: c.name)
def test_a_case_is_small_write_once_and_poisoned_where_nobody_reads(case: shapes.Case) -> None:
    inputs = shapes.build(case)
    table = inputs.tables
    assert inputs.kv.nbytes <= 1 << 20
    assert table.delta_index.size <= 64
    owned, stands = set(), set()
    for b, m in np.ndindex(table.page.shape):
        for s in range(table.lo[b, m], table.hi[b, m]):
            assert (table.page[b, m], s) not in owned
            owned.add((int(table.page[b, m]), s))
            stands.add((b, int(table.first[b, m]) + s))
    assert stands == {(b, p) for b, context in enumerate(case.context) for p in range(context)}
    poisoned = inputs.kv
    if inputs.scale is not None:
        poisoned = judge.factors(inputs.scale, len(inputs.kv), case.page_size)
    nan = np.isnan(poisoned.astype(np.float32)).all((1, 3))
    assert {(int(r), int(s)) for r, s in np.argwhere(~nan)} == owned
    assert nan.any()


def test_benchmark_cases_name_their_bytes() -> None:
    case = shapes.benchmark_case("llama-8b", 8, 4096)
    assert case.kv_bytes == 8 * 4096 * 8 * 256 * 2
    assert case.flops == 4 * 8 * 4096 * 32 * 128
    ragged = shapes.benchmark_case("smollm2", 4, 1024, ragged=True, deltas=4)
    assert ragged.context == (256, 512, 768, 1024)
    assert len(np.unique(shapes.tables(ragged).delta_index)) == 4
