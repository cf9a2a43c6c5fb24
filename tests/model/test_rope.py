"""Rotary positions: frequencies against Hugging Face, angles against float64, and how they compose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import tolerance

import jaxkv
from jaxkv.io.configs import config_from_hf
from jaxkv.model.rope import inverse_frequencies, rope_angles, rotate

GOLDENS = Path(__file__).parent.parent / "goldens"
ROPE = jaxkv.RopeConfig(theta=10_000.0, rotary_dim=64)
LONGEST = 131_072


def golden_ropes() -> list[tuple[jaxkv.RopeConfig, list[float], float]]:
    base = json.loads((GOLDENS / "tiny_llama.json").read_text())["untied"]
    rows = json.loads((GOLDENS / "rope.json").read_text())
    return [
        (
            config_from_hf({**base, **row["config"]}).rope,
            row["inverse_frequencies"],
            row["magnitude"],
        )
        for row in rows
    ]


@pytest.mark.parametrize(("rope", "expected", "magnitude"), golden_ropes())
def test_frequencies_equal_hugging_face(
    rope: jaxkv.RopeConfig, expected: list[float], magnitude: float
) -> None:
    # Hugging Face computes in float32; jaxkv in float64.
    np.testing.assert_allclose(inverse_frequencies(rope), expected, rtol=2e-6)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize("rope", [row[0] for row in golden_ropes()])
def test_frequencies_equal_the_papers(rope: jaxkv.RopeConfig) -> None:
    np.testing.assert_allclose(inverse_frequencies(rope), reference.frequencies(rope), rtol=1e-13)


def phase_error(cos: Any, sin: Any, exact: np.ndarray) -> float:
    """Largest angle, in radians, between (cos, sin) and the exact angle."""
    turned = (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)) * np.exp(-1j * exact)
    return float(np.abs(np.angle(turned)).max())


@pytest.mark.parametrize("rope", [ROPE, *(row[0] for row in golden_ropes())])
def test_phase_is_exact_to_a_millionth_at_long_positions(rope: jaxkv.RopeConfig) -> None:
    """CASE 22: angles never lose bits with distance."""
    near = np.arange(1030)
    far = LONGEST - np.arange(600)
    positions = np.concatenate([near, far, np.random.default_rng(0).integers(0, LONGEST, 500)])
    cos, sin = rope_angles(jnp.asarray(positions, jnp.int32), rope, LONGEST)
    exact = positions[:, None] * reference.frequencies(rope)
    assert phase_error(cos, sin, exact) < tolerance("rope_phase")
    assert cos.dtype == sin.dtype == jnp.float32


def test_naive_float32_angles_would_be_a_thousand_times_worse() -> None:
    positions = (LONGEST - np.arange(600)).astype(np.float32)
    angles = positions[:, None] * inverse_frequencies(ROPE).astype(np.float32)
    exact = positions[:, None].astype(np.float64) * inverse_frequencies(ROPE)
    assert phase_error(np.cos(angles), np.sin(angles), exact) > 1e-3


@settings(max_examples=30, deadline=None)
@given(a=st.integers(-5000, 5000), b=st.integers(-5000, 5000), seed=st.integers(0, 99))
def test_rotations_compose(a: int, b: int, seed: int) -> None:
    """R(a) R(b) = R(a + b), backwards too."""
    x = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)

    def turn(value: Any, by: int) -> Any:
        cos, sin = rope_angles(jnp.asarray([abs(by)]), ROPE, 10_000)
        return rotate(jnp.asarray(value), cos, sin if by >= 0 else -sin)

    np.testing.assert_allclose(turn(turn(x, a), b), turn(x, a + b), atol=4e-6)
    exact = reference.turn(x[None].astype(np.float64), np.array([a]), ROPE)[0]
    np.testing.assert_allclose(turn(x, a), exact, atol=3e-6)


def test_position_zero_changes_no_bit() -> None:
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    cos, sin = rope_angles(jnp.zeros(3, jnp.int32), ROPE, 100)
    np.testing.assert_array_equal(rotate(jnp.asarray(x), cos, sin), x)


@pytest.mark.parametrize("magnitude", [1.0, 1.2])
def test_partial_rotary_passes_the_rest_through_bitwise(magnitude: float) -> None:
    """CASE 20."""
    rope = jaxkv.RopeConfig(theta=10_000.0, rotary_dim=24)
    x = np.random.default_rng(0).standard_normal((5, 2, 64)).astype(np.float32)
    positions = jnp.asarray([0, 1, 77, 256, 9999])
    cos, sin = rope_angles(positions, rope, 10_000)
    out = rotate(jnp.asarray(x), cos[:, None], sin[:, None], magnitude=magnitude)
    np.testing.assert_array_equal(out[..., 24:], x[..., 24:])
    exact = reference.turn(x.astype(np.float64), np.asarray(positions), rope, magnitude)
    np.testing.assert_allclose(out, exact, atol=2e-6)
    assert np.abs(np.asarray(out[1:, :, :24]) - x[1:, :, :24]).min() > 0


@pytest.mark.parametrize("limit", [1, 255, 256, 257, 1000])
def test_the_last_position_of_a_table_is_right(limit: int) -> None:
    cos, sin = rope_angles(jnp.asarray([limit]), ROPE, limit)
    assert phase_error(cos, sin, limit * reference.frequencies(ROPE)[None]) < tolerance("rope_phase")
