"""The error estimate: it finds a law that is there, its bound covers what it says, files are checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxkv.errors import ConfigError, FormatError
from jaxkv.reuse.estimate import COVERAGE, Calibration, Signals, fit, load_calibration


def edits(count: int, seed: int, noise: float = 0.3) -> tuple[list[Signals], list[float]]:
    """Made-up edits whose KL follows drift² · stale attention · 10^(2·sink), times noise."""
    rng = np.random.default_rng(seed)
    signals, kl = [], []
    for _ in range(count):
        drift, mass = 10.0 ** rng.uniform(-3, 0), 10.0 ** rng.uniform(-2, 0)
        sink = bool(rng.random() < 0.2)
        signals.append(
            Signals(
                key_drift=drift * 10 ** rng.normal(0, 0.05),
                value_drift=drift,
                stale_mass=mass,
                deleted_mass=10.0 ** rng.uniform(-4, 0),
                sink_stale=sink,
                stale_share=float(rng.random()),
                distance=int(rng.integers(10, 2000)),
                deleted=int(rng.integers(0, 300)),
                inserted=int(rng.integers(0, 300)),
                length=2000,
            )
        )
        kl.append(drift**2 * mass * 100.0**sink * 10 ** rng.normal(0, noise))
    return signals, kl


def make(count: int = 150, seed: int = 0) -> Calibration:
    return fit(*edits(count, seed), weights_digest="ab" * 32, model="m", source="s")


def test_it_predicts_what_follows_a_law_of_its_signals() -> None:
    calibration = make()
    signals, kl = edits(400, seed=1)
    found = [calibration.estimate(s) for s in signals]
    error = np.log10([e.kl for e in found]) - np.log10(kl)
    assert np.sqrt(np.mean(error**2)) < 0.45, "the noise that was put in is 0.3 decades"
    assert abs(error.mean()) < 0.1
    assert found[0].signals is signals[0]


def test_the_bound_covers_its_share_of_edits_it_never_saw() -> None:
    covered = []
    for seed in range(5):
        calibration = make(120, seed)
        signals, kl = edits(300, seed=100 + seed)
        covered += [k <= calibration.estimate(s).bound for s, k in zip(signals, kl, strict=True)]
    share = float(np.mean(covered))
    # 1,500 edits: a standard error of 0.006, and the quantile of 120 residuals varies by as much.
    assert COVERAGE - 0.03 < share < COVERAGE + 0.03


def test_few_edits_give_a_wide_margin_and_none_gives_an_error() -> None:
    assert make(20).margin > 0
    with pytest.raises(ConfigError, match="at least 20 answers"):
        make(19)
    signals, kl = edits(30, 0)
    with pytest.raises(ConfigError, match="negative or not finite"):
        fit(signals, [*kl[:-1], -1.0], weights_digest="", model="")
    with pytest.raises(ConfigError, match="expected as many"):
        fit(signals, kl[:-1], weights_digest="", model="")


def test_answers_to_one_edit_are_left_out_together() -> None:
    """Four answers share what is unlike the law in their edit: the margin is that of an edit never seen."""

    def shared(count: int, seed: int) -> tuple[list[Signals], list[float], list[str]]:
        rng = np.random.default_rng([seed, 3])
        one, kl = edits(count, seed, noise=0.05)
        offset = 10 ** rng.normal(0, 0.5, count)
        return (
            [s for s in one for _ in range(4)],
            [k * offset[i] * 10 ** rng.normal(0, 0.02) for i, k in enumerate(kl) for _ in range(4)],
            [f"edit {i}" for i in range(count) for _ in range(4)],
        )

    known = {"weights_digest": "ab" * 32, "model": "m"}
    covered, alone = [], []
    for seed in range(8):
        signals, kl, names = shared(18, seed)
        together, apart = fit(signals, kl, edits=names, **known), fit(signals, kl, **known)
        # By definition: fit without each edit, and look at what it gets wrong there.
        left_out = []
        for name in dict.fromkeys(names):
            rest = [i for i, n in enumerate(names) if n != name]
            own = [i for i, n in enumerate(names) if n == name]
            again = fit([signals[i] for i in rest], [kl[i] for i in rest], **known)
            left_out += [np.log10(kl[i] / again.estimate(signals[i]).kl) for i in own]
        assert together.margin > apart.margin
        # Scaled by other means and deviations without an edit: near, not equal.
        assert together.margin == pytest.approx(np.sort(left_out)[69], rel=0.25)
        new, measured, _ = shared(100, 50 + seed)
        covered += [k <= together.estimate(s).bound for s, k in zip(new, measured, strict=True)]
        alone += [k <= apart.estimate(s).bound for s, k in zip(new, measured, strict=True)]
    assert np.mean(alone) < np.mean(covered)
    assert np.mean(covered) > COVERAGE - 0.05
    with pytest.raises(ConfigError, match="3 of them different, expected 72 and at least 5"):
        fit(signals, kl, edits=["a", "b", "c"] * 24, **known)


def test_a_calibration_reads_back_as_itself_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    calibration = make()
    again = Calibration.read(calibration.to_json())
    assert again == calibration
    assert hash(again) == hash(calibration)
    path = tmp_path / f"{'ab' * 8}.json"
    path.write_text(calibration.to_json())
    assert load_calibration("ab" * 32, tmp_path) == calibration
    with pytest.raises(ConfigError, match="no calibration is known for the weights cdcdcdcd"):
        load_calibration("cd" * 32, tmp_path)
    other = json.loads(calibration.to_json()) | {"weights_digest": "ee" * 32}
    path.write_text(json.dumps(other))
    with pytest.raises(FormatError, match="other weights"):
        load_calibration("ab" * 32, tmp_path)
    short = json.loads(calibration.to_json())
    short["weights"] = short["weights"][:-1]
    for bad in ("{", "[]", "{}", json.dumps(short), json.dumps(other | {"extra": 1})):
        path.write_text(bad)
        with pytest.raises(FormatError, match="json"):
            load_calibration("ab" * 32, tmp_path)


def test_signals_of_zero_have_features_and_a_finite_prediction() -> None:
    nothing = Signals(
        key_drift=0.0, value_drift=0.0, stale_mass=0.0, deleted_mass=0.0, sink_stale=False,
        stale_share=0.0, distance=0, deleted=0, inserted=0, length=1,
    )  # fmt: skip
    assert np.isfinite(nothing.features()).all()
    found = make().estimate(nothing)
    assert 0 <= found.kl < found.bound < 1e4
