"""The TPU kernels that write pages, interpreted: append and relocate_pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import EAGER, GENERIC, ON_WAIT, found_race, fresh_interpreter, quick_compiles, without_waits
from tolerances import tolerance

import pallas_kernels
from pallas_kernels import judge, reference, tpu_append, tpu_relocate

__all__ = ["quick_compiles"]  # a fixture of this module

DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def _pages(rng: np.random.Generator, dtype: str, *, rows: int = 7, size: int = 32, head: int = 64) -> Any:
    """Pages of 3 KV heads and their scales; NaN where floats can hold it and nobody wrote."""
    shape = (rows, 3, size, 2 * head)
    kv = rng.standard_normal(shape, np.float32)
    if dtype not in ("int8", "float8_e4m3fn"):
        kv[-1] = np.nan
        return jnp.asarray(kv).astype(dtype), None
    factors = rng.uniform(0.5, 2.0, (*shape[:3], 2)).astype(np.float32)
    return reference.cast(kv * 40, dtype), pallas_kernels.pack_scales(factors, tiles=True)


def _bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_equals_the_definition_bit_for_bit(dtype: str) -> None:
    """Tokens in any order: several in a tile, in several tiles of a page, dropped ones between them."""
    rng = np.random.default_rng(0)
    kv, scale = _pages(rng, dtype)
    places = rng.permutation(6 * 32)[:21].astype(np.int32)
    row, slot = places // 32, places % 32
    row[3], row[9], row[11] = 7, -1, 7
    new = rng.standard_normal((2, len(row), 3, 64), np.float32)
    expected = reference.append(kv, row, slot, new[0], new[1], scale=scale)
    found = jax.jit(lambda *a, scale: tpu_append.append(*a, scale=scale, interpret=GENERIC))(
        kv, row, slot, new[0], new[1], scale=scale
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(_bits(a), _bits(b))


def test_append_in_several_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that ends one chunk and opens the next gets the tokens of both."""
    monkeypatch.setattr(tpu_append, "CHUNK_BYTES", 1)
    rng = np.random.default_rng(1)
    kv, _ = _pages(rng, "float32", size=8, head=8)
    places = np.arange(13, 33, dtype=np.int32)
    new = rng.standard_normal((2, len(places), 3, 8), np.float32)
    args = (kv, places // 8, places % 8, new[0], new[1])
    np.testing.assert_array_equal(tpu_append.append(*args, interpret=GENERIC), reference.append(*args))


def test_scales_of_many_pages_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages share tiles of 8 rows of scales; a tile ends one chunk and opens the next; slots keep apart."""
    monkeypatch.setattr(tpu_append, "CHUNK_BYTES", 1)
    rng = np.random.default_rng(7)
    kv, scale = _pages(rng, "int8", rows=21, size=8, head=8)
    places = rng.permutation(20 * 8)[:30].astype(np.int32)
    row, slot = places // 8, places % 8
    row[5], slot[6], slot[7] = -1, 8, -1  # dropped
    new = rng.standard_normal((2, 30, 3, 8), np.float32)
    given = rng.uniform(0.01, 0.1, (30, 3)).astype(np.float32)
    args = (kv, row, slot, new[0], new[1], scale, given)
    found = jax.jit(lambda *a: tpu_append.append(*a[:5], scale=a[5], value_scale=a[6], interpret=GENERIC))(
        *args
    )
    expected = jax.jit(lambda *a: reference.append(*a[:5], scale=a[5], value_scale=a[6]))(*args)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(_bits(a), _bits(b))
    written = np.delete(np.arange(30), [5, 6, 7])
    by_slot = judge.factors(found[1], 21, 8)[row[written], :, slot[written]]
    np.testing.assert_allclose(by_slot[..., 0], np.abs(new[0, written]).max(-1) / 127, rtol=1e-6)
    np.testing.assert_array_equal(by_slot[..., 1], given[written])


def test_append_of_nothing_writes_nothing() -> None:
    kv, _ = _pages(np.random.default_rng(2), "float32", size=8, head=8)
    none = jnp.full(3, 7, jnp.int32)
    found = tpu_append.append(kv, none, none * 0, jnp.ones((3, 3, 8)), jnp.ones((3, 3, 8)), interpret=GENERIC)
    np.testing.assert_array_equal(_bits(found), _bits(kv))


def _moves(rng: np.random.Generator, half: int) -> tuple[np.ndarray, ...]:
    angle = rng.uniform(-3, 3, (4, half))
    source, target = np.array([0, 5, 1, 6], np.int32), np.array([2, 3, 7, 4], np.int32)
    return source, target, angle, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "half"), [("float32", 16), ("bfloat16", 32), ("int8", 32), ("float8_e4m3fn", 16)]
)
def test_relocate_pages_rotates_keys_and_copies_everything_else(dtype: str, half: int) -> None:
    rng = np.random.default_rng(3)
    kv, scale = _pages(rng, dtype)
    source, target, angle, cos, sin = _moves(rng, half)
    found = jax.jit(lambda *a, scale: tpu_relocate.relocate_pages(*a, scale=scale, interpret=GENERIC))(
        kv, source, target, cos, sin, scale=scale
    )
    stored, factors = found if scale is not None else (found, None)
    if factors is not None:
        scale, factors = (judge.factors(x, 7, 32) for x in (scale, factors))
    untouched = [0, 1, 5, 6]
    bits = _bits(stored)
    np.testing.assert_array_equal(bits[untouched], _bits(kv)[untouched])
    stored, old = np.asarray(stored).astype(np.float64), np.asarray(kv).astype(np.float64)
    for n in (0, 1, 3):  # the third move is dropped
        s, t = source[n], target[n]
        np.testing.assert_array_equal(bits[t, ..., 64:], _bits(kv)[s, ..., 64:])
        if factors is None or scale is None:
            if half < 32:
                np.testing.assert_array_equal(stored[t, ..., 2 * half : 64], old[s, ..., 2 * half : 64])
            exact = judge.rotated(old[s, ..., :64], angle[n])
            # A rounding to bfloat16 on top of the rotation's own error.
            allowed = tolerance("relocated_key") + (np.abs(exact) * 2.0**-8 if dtype == "bfloat16" else 0)
            assert np.all((np.abs(stored[t, ..., :64] - exact) <= allowed) | np.isnan(exact))
            continue
        np.testing.assert_array_equal(factors[t, ..., 1], scale[s, ..., 1])
        np.testing.assert_array_equal(factors[untouched], scale[untouched])
        exact = judge.rotated(old[s, ..., :64] * np.asarray(scale, np.float64)[s, ..., :1], angle[n])
        factor = np.asarray(factors, np.float64)[t, ..., :1]
        step = factor if dtype == "int8" else np.maximum(np.abs(exact) / 8, factor * 2.0**-9)
        assert np.all(np.abs(stored[t, ..., :64] * factor - exact) <= 0.5001 * step)


def test_many_moves_wrap_around_the_ring_and_over_grid_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_relocate, "MOVES", 9)
    rng = np.random.default_rng(5)
    kv = jnp.asarray(rng.standard_normal((41, 1, 8, 16), np.float32))
    rows = rng.permutation(40).astype(np.int32)
    source, target = rows[:20], np.where(rng.uniform(size=20) < 0.2, 41, rows[20:]).astype(np.int32)
    angle = rng.uniform(-3, 3, (20, 4))
    args = (kv, source, target, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    found = tpu_relocate.relocate_pages(*args, interpret=GENERIC)
    np.testing.assert_allclose(found, reference.relocate_pages(*args), atol=tolerance("relocated_key"))


def _run(operation: str, interpret: Any, dtype: str = "float32") -> Any:
    rng = np.random.default_rng(6)
    kv, scale = jnp.asarray(rng.standard_normal((9, 1, 8, 16), np.float32)), None
    if dtype == "int8":
        kv, scale = (
            reference.cast(kv * 40, dtype),
            pallas_kernels.pack_scales(rng.uniform(1, 2, (9, 1, 8, 2))),
        )
        scale = scale.astype(jnp.float32)
    if operation == "append":
        places = np.array([0, 1, 9, 17, 30, 33, 41, 50], np.int32)
        new = rng.standard_normal((2, 8, 1, 8), np.float32)
        args: Any = (kv, places // 8, places % 8, new[0], new[1])
        found = tpu_append.append(*args, scale=scale, interpret=interpret)
        return found, reference.append(*args, scale=scale)
    angle = rng.uniform(-3, 3, (4, 4)).astype(np.float32)
    args = (kv, np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32), np.cos(angle), np.sin(angle))
    found = tpu_relocate.relocate_pages(*args, scale=scale, interpret=interpret)
    return found, reference.relocate_pages(*args, scale=scale)


@pytest.mark.parametrize("operation", ["append", "relocate_pages"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("interpret", [ON_WAIT, EAGER], ids=["on_wait", "eager"])
def test_copies_are_ordered(
    operation: str,
    dtype: str,
    interpret: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tpu_relocate, "DEPTH", 3)
    results: list[Any] = []
    with fresh_interpreter():
        assert not found_race(lambda: results.append(_run(operation, interpret, dtype)), capfd)
    found, expected = (jax.tree.leaves(x) for x in results[0])
    # A key on the border of two int8 steps may fall on either side.
    np.testing.assert_allclose(
        found[0], expected[0], atol=1 if dtype == "int8" else tolerance("relocated_key")
    )
    for a, b in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("operation", ["append", "relocate_pages"])
def test_a_missing_wait_is_caught(
    operation: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without_waits(monkeypatch, {"append": tpu_append, "relocate_pages": tpu_relocate}[operation])
    with fresh_interpreter():
        assert found_race(lambda: jax.block_until_ready(_run(operation, EAGER)), capfd)


def test_a_missing_wait_for_scales_is_caught(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without_waits(monkeypatch, tpu_append)
    scale, new = jnp.ones((1, 16, 16)), jnp.ones((4, 1, 16))
    row = jnp.array([0, 3, 9, 15], jnp.int32)
    with fresh_interpreter():
        assert found_race(
            lambda: jax.block_until_ready(tpu_append.write_scales(scale, row, 16, new, interpret=EAGER)),
            capfd,
        )


def test_pages_that_are_no_whole_tiles_are_refused() -> None:
    one, kv = jnp.zeros(1, jnp.int32), jnp.zeros((3, 2, 8, 128), jnp.bfloat16)
    with pallas_kernels.compiling_for("tpu"):
        with pytest.raises(NotImplementedError, match="page size is 8"):
            pallas_kernels.append(
                kv, one, one, jnp.ones((1, 2, 64)), jnp.ones((1, 2, 64)), implementation="pallas_tpu"
            )
        kv, new = jnp.zeros((3, 2, 32, 128), jnp.int8), jnp.ones((1, 2, 64))
        with pytest.raises(NotImplementedError, match=r"scale has shape \(2, 3, 64\), the TPU kernels"):
            pallas_kernels.append(
                *(kv, one, one, new, new), scale=jnp.ones((2, 3, 64)), implementation="pallas_tpu"
            )
        with pytest.raises(NotImplementedError, match="head dim is 40"):
            pallas_kernels.relocate_pages(
                *(jnp.zeros((3, 2, 16, 80)), one, one, jnp.ones((1, 20)), jnp.ones((1, 20))),
                implementation="pallas_tpu",
            )
