"""Divergence against an independent formulation in Python floats with exact summation."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxkv.divergence import (
    Summary,
    bootstrap_interval,
    by_distance,
    divergence,
    layer_divergence,
    standard_error,
)
from jaxkv.errors import ConfigError, TokenError

# The package has a function of the same name, so `import … as` would not reach the module.
module = importlib.import_module("jaxkv.divergence")
finite_logits = st.floats(-60, 60, width=32)


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    total = math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - top - total for x in row]


def reference_kl(p_row: list[float], q_row: list[float]) -> float:
    p, q = log_softmax(p_row), log_softmax(q_row)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def top(row: list[float], k: int) -> set[int]:
    return set(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])


def random_pair(seed: int, t: int = 7, v: int = 33, noise: float = 0.3) -> tuple:
    rng = np.random.default_rng(seed)
    exact = (4 * rng.standard_normal((t, v))).astype(np.float32)
    approx = exact + noise * rng.standard_normal((t, v)).astype(np.float32)
    return exact, approx.astype(np.float32), rng.integers(0, v, t, dtype=np.int32)


@pytest.mark.parametrize("noise", [1e-4, 0.3, 5.0])
def test_every_figure_equals_the_independent_formulation(noise: float) -> None:
    exact, approx, targets = random_pair(1, noise=noise)
    d = divergence(exact, approx, targets)
    rows = [([float(x) for x in a], [float(x) for x in b]) for a, b in zip(exact, approx, strict=True)]
    np.testing.assert_allclose(d.kl_tokens, [reference_kl(a, b) for a, b in rows], atol=2e-14)
    np.testing.assert_allclose(d.reverse_kl_tokens, [reference_kl(b, a) for a, b in rows], atol=2e-14)
    assert d.top1_tokens.tolist() == [top(a, 1) == top(b, 1) for a, b in rows]
    np.testing.assert_allclose(d.top5_tokens, [len(top(a, 5) & top(b, 5)) / 5 for a, b in rows], rtol=1e-15)
    cosine = [
        math.fsum(x * y for x, y in zip(a, b, strict=True))
        / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))
        for a, b in rows
    ]
    np.testing.assert_allclose(d.cosine_tokens, cosine, rtol=1e-13)
    gains = [log_softmax(a)[t] - log_softmax(b)[t] for (a, b), t in zip(rows, targets, strict=True)]
    assert d.delta_nll == pytest.approx(math.fsum(gains) / len(gains), abs=1e-13)
    assert d.perplexity_ratio == pytest.approx(math.exp(math.fsum(gains) / len(gains)))


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=finite_logits),
    st.integers(0, 2**31),
)
def test_identical_logits_diverge_by_exactly_zero(logits: np.ndarray, seed: int) -> None:
    targets = np.random.default_rng(seed).integers(0, logits.shape[1], logits.shape[0])
    d = divergence(logits, logits.copy(), targets)
    assert d.kl.max == d.reverse_kl.max == d.delta_nll == 0.0
    assert d.top1_agreement == d.top5_overlap == d.logit_cosine == d.perplexity_ratio == 1.0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_kl_is_never_negative_and_ignores_a_constant_shift(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=8))
    a = data.draw(hnp.arrays(np.float32, shape, elements=finite_logits))
    b = data.draw(hnp.arrays(np.float32, shape, elements=finite_logits))
    d = divergence(a, b)
    assert (d.kl_tokens >= 0).all()
    assert (np.abs(d.cosine_tokens) <= 1).all()
    shifted = divergence(a.astype(np.float64) + 8.0, b)  # 8.0: exact in float64
    np.testing.assert_allclose(shifted.kl_tokens, d.kl_tokens, rtol=1e-9, atol=1e-13)


def test_small_divergence_is_not_lost_to_cancellation() -> None:
    logits = np.zeros((1, 4))
    other = logits.copy()
    other[0, 0] = 1e-7
    # Second order: KL = ½ · variance of the difference under p = ½ · (1/4 − 1/16) · 1e-14
    assert divergence(logits, other).kl.mean == pytest.approx(0.5 * 3 / 16 * 1e-14, rel=1e-6)


def test_extreme_logits_stay_finite() -> None:
    a = np.array([[1e4, -1e4, 0.0], [3e38, 0.0, -3e38]], np.float32)
    d = divergence(a, a[:, ::-1].copy(), [1, 1])
    assert np.isfinite(d.kl_tokens).all()
    assert d.kl_tokens[0] == pytest.approx(1e4)
    assert d.cosine_tokens.tolist() == pytest.approx([0.5, -1.0])
    assert math.isfinite(d.delta_nll or 0.0)


def test_zero_rows_and_ties() -> None:
    zero = np.zeros((1, 9), np.float32)
    d = divergence(zero, zero)
    assert (d.logit_cosine, d.top1_agreement, d.top5_overlap) == (1.0, 1.0, 1.0)
    raised = zero.copy()
    raised[0, 8] = 1.0  # top five become 8, 0, 1, 2, 3: among equals the lowest ids win
    assert divergence(zero, raised).top5_overlap == pytest.approx(4 / 5)
    assert divergence(zero, raised).logit_cosine == 0.0


def test_row_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, approx, targets = random_pair(2, t=11)
    whole = divergence(exact, approx, targets)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2 * 8 * exact.shape[1])
    parts = divergence(exact, approx, targets)
    for field in dataclasses.fields(whole):
        np.testing.assert_array_equal(getattr(whole, field.name), getattr(parts, field.name))


def test_to_dict_is_strict_json_and_single_rows_have_no_standard_error() -> None:
    exact, approx, targets = random_pair(3, t=1)
    d = divergence(exact, approx, targets)
    data = json.loads(json.dumps(d.to_dict(), allow_nan=False))
    assert data["kl"]["stderr"] is None
    assert data["tokens"] == 1
    assert math.isnan(d.kl.stderr)
    assert "KL" in str(d)
    without = divergence(exact, approx)
    assert without.delta_nll is None
    assert without.perplexity_ratio is None
    assert without.to_dict()["delta_nll"] is None


@pytest.mark.parametrize(
    ("exact", "approx", "message"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), "approx has shape (2, 4), expected that of exact"),
        (np.zeros(3), np.zeros(3), "exact has shape (3,), expected [T, V]"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "exact has shape (0, 3)"),
        (np.zeros((1, 3), int), np.zeros((1, 3)), "exact has dtype int64, expected a floating"),
        (
            np.zeros((2, 2)),
            np.array([[0, 0], [0, np.nan]]),
            "approx holds nan or infinity in row 1",
        ),
        (np.array([[np.inf, 0]]), np.zeros((1, 2)), "exact holds nan or infinity in row 0"),
    ],
)
def test_bad_logits_are_refused_in_one_sentence(exact, approx, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        divergence(exact, approx)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([0], "targets has shape (1,), expected (2,)"),
        ([0.0, 1.0], "targets has dtype float64, expected integers"),
        ([0, 3], "targets holds token 3, expected 0 to 2"),
        ([-1, 0], "targets holds token -1"),
    ],
)
def test_bad_targets_are_refused(targets, message: str) -> None:
    with pytest.raises(TokenError) as error:
        divergence(np.zeros((2, 3)), np.zeros((2, 3)), targets)
    assert message in str(error.value)


def test_by_distance_groups_at_the_edges() -> None:
    distances = np.array([0, 15, 16, 63, 64, 255, 256, 1023, 1024, 5000])
    bins = by_distance(np.arange(10.0), distances)
    assert [b.count for b in bins] == [2, 2, 2, 2, 2]
    assert [b.mean for b in bins] == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert [b.label for b in bins] == ["0–15", "16–63", "64–255", "256–1023", "1024+"]
    assert bins[0].stderr == pytest.approx(0.5)
    empty = by_distance(np.array([1.0]), np.array([3]))[1]
    assert empty.count == 0
    assert math.isnan(empty.mean)
    assert empty.to_dict()["mean"] is None


@pytest.mark.parametrize(
    ("distances", "bins", "message"),
    [
        ([-1], (0, 16), "distances holds -1, expected at least bins[0], 0"),
        ([0, 1], (0, 16), "distances has shape (2,), expected (1,)"),
        ([0.5], (0, 16), "distances has dtype float64"),
        ([0], (16, 0), "expected strictly increasing"),
    ],
)
def test_bad_distances_are_refused(distances, bins, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        by_distance(np.array([1.0]), np.array(distances), bins)
    assert message in str(error.value)


def test_layer_divergence_equals_the_norm_ratio_by_layer_and_bin() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((3, 40, 2, 4)).astype(np.float32)
    approx = exact + 0.1 * rng.standard_normal(exact.shape).astype(np.float32)
    distances = np.arange(40)
    d = layer_divergence(exact, approx, distances, bins=(0, 16, 64))
    diff = approx.astype(np.float64) - exact
    for layer in range(3):
        want = np.linalg.norm(diff[layer]) / np.linalg.norm(exact[layer].astype(np.float64))
        assert d.per_layer[layer] == pytest.approx(want)
        want = np.linalg.norm(diff[layer, :16]) / np.linalg.norm(exact[layer, :16].astype(np.float64))
        assert d.by_distance is not None
        assert d.by_distance[layer, 0] == pytest.approx(want)
    assert d.counts is not None
    assert d.counts.tolist() == [16, 24, 0]
    assert d.to_dict()["by_distance"][0][2] is None
    same = layer_divergence(exact, exact, distances)
    assert same.per_layer.tolist() == [0.0] * 3


def test_layer_divergence_of_zero_references() -> None:
    zero, one = np.zeros((1, 2, 3)), np.ones((1, 2, 3))
    assert layer_divergence(zero, zero).per_layer.tolist() == [0.0]
    assert layer_divergence(zero, one).per_layer.tolist() == [math.inf]


@pytest.mark.parametrize(
    ("exact", "approx", "message"),
    [
        (np.zeros((1, 2, 3)), np.zeros((1, 3, 3)), "expected that of exact"),
        (np.zeros(3), np.zeros(3), "expected [L, n, ...]"),
        (np.zeros((1, 2)), np.array([[0.0, np.nan]]), "approx holds nan or infinity in position 1"),
    ],
)
def test_bad_layer_states_are_refused(exact, approx, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        layer_divergence(exact, approx)
    assert message in str(error.value)


def test_bootstrap_interval_is_seeded_and_covers_the_mean() -> None:
    values = np.random.default_rng(0).standard_normal(200) + 3.0
    lo, hi = bootstrap_interval(values, seed=1)
    assert (lo, hi) == bootstrap_interval(values, seed=1)
    assert (lo, hi) != bootstrap_interval(values, seed=2)
    assert lo < values.mean() < hi
    # For a mean the interval is close to the normal one.
    assert hi - lo == pytest.approx(2 * 1.96 * standard_error(values), rel=0.1)
    assert bootstrap_interval(np.array([2.0])) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval([]), "expected [n] with n of at least 1"),
        (lambda: bootstrap_interval([math.nan]), "expected finite numbers"),
        (lambda: bootstrap_interval([1.0], confidence=95), "confidence is 95"),
        (lambda: bootstrap_interval([1.0], resamples=0), "resamples is 0"),
        (lambda: Summary.of(np.zeros((2, 2))), "values has shape (2, 2)"),
    ],
)
def test_bad_statistics_arguments_are_refused(call, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert message in str(error.value)


def test_summary_of_known_values() -> None:
    s = Summary.of(np.arange(101.0))
    assert (s.mean, s.p50, s.p95, s.max) == (50.0, 50.0, 95.0, 100.0)
    assert s.stderr == pytest.approx(math.sqrt(sum((x - 50) ** 2 for x in range(101)) / 100 / 101))
