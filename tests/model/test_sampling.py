"""Sampling against distributions computed in NumPy, and its independence of batch and neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.model.sampling import SamplingInput, sample

V = 23
DRAWS = 4096
draw = jax.jit(sample)


def logits_of(seed: int = 0) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal(V)).astype(np.float32)


def expected(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution that the papers define, f64[V]: top-k, then top-p over what is left."""
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    mass, kept = 0.0, np.zeros(V, bool)
    for token in order:
        if mass >= top_p and kept.any():
            break
        kept[token] = True
        mass += p[token]
    p[~kept] = 0
    return p / p.sum()


def many(logits: np.ndarray, **params: Any) -> np.ndarray:
    """DRAWS tokens, one a seed."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **params}
    inputs = SamplingInput(
        temperature=jnp.full(DRAWS, values["temperature"], jnp.float32),
        top_k=jnp.full(DRAWS, values["top_k"], jnp.int32),
        top_p=jnp.full(DRAWS, values["top_p"], jnp.float32),
        seed=jnp.arange(DRAWS, dtype=jnp.uint32),
    )
    rows = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, V))
    return np.asarray(draw(rows, inputs, jnp.full(DRAWS, 5, jnp.int32)))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 5, 1.0),
        (1.0, 0, 0.7),
        (1.5, 8, 0.6),
        (1.0, 100, 1.0),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-6),
    ],
)
def test_tokens_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = logits_of()
    counts = np.bincount(many(logits, temperature=temperature, top_k=top_k, top_p=top_p), minlength=V)
    p = expected(logits, temperature, top_k, top_p)
    assert (counts[p == 0] == 0).all(), "a token outside the set was drawn"
    # Five standard deviations of a binomial count; seeds are fixed, so this never flickers.
    assert (np.abs(counts - DRAWS * p) <= 5 * np.sqrt(DRAWS * p * (1 - p)) + 1).all()


def test_temperature_zero_is_argmax_and_the_first_of_equals() -> None:
    logits = logits_of()
    logits[[4, 9]] = 50.0
    assert set(many(logits, temperature=0.0, top_k=3, top_p=0.5)) == {4}


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = logits_of(1)
    assert set(many(logits, temperature=1e-5)) == {int(logits.argmax())}


def test_equal_logits_are_all_drawn() -> None:
    counts = np.bincount(many(np.zeros(V, np.float32)), minlength=V)
    assert counts.min() > DRAWS / V / 2


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, V)).astype(np.float32)
    inputs = SamplingInput(
        temperature=np.array([0, 1, 0.7, 1, 2, 1, 0, 1], np.float32),
        top_k=np.array([0, 0, 5, 3, 0, 0, 1, 0], np.int32),
        top_p=np.array([1, 0.9, 1, 0.5, 1, 0.3, 1, 1], np.float32),
        seed=np.array([0, 1, 1, 7, 2**32 - 1, 5, 6, 7], np.uint32),
    )
    positions = np.arange(8, dtype=np.int32) * 3
    together = np.asarray(draw(jnp.asarray(logits), inputs, positions))
    for b in range(8):
        alone = jax.tree.map(lambda x, b=b: x[b : b + 1], inputs)
        assert draw(jnp.asarray(logits[b : b + 1]), alone, positions[b : b + 1])[0] == together[b]


def test_seed_and_position_both_matter_and_repeat() -> None:
    logits = np.zeros(V, np.float32)
    first = many(logits)
    np.testing.assert_array_equal(first, many(logits))
    assert len(set(first[:50])) > 10  # seeds differ
    rows = jnp.zeros((50, V))
    same_seed = SamplingInput(
        temperature=jnp.ones(50), top_k=jnp.zeros(50, jnp.int32), top_p=jnp.ones(50),
        seed=jnp.zeros(50, jnp.uint32),
    )  # fmt: skip
    assert len(set(np.asarray(draw(rows, same_seed, jnp.arange(50))).tolist())) > 10


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 2**32},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(jaxkv.ConfigError, match=next(iter(bad))):
        jaxkv.Sampling(**bad)
