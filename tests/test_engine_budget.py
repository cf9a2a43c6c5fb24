"""A budget climbs its ladder, pays for what it gave up, and ends at exact; estimates need a calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tolerances import tolerance

import jaxkv
from jaxkv import SCR, Budget, Estimate, FirstK, Signals

Text = Callable[..., np.ndarray]
RUNGS = (SCR(min_span=8, tail=4), SCR(min_span=8, tail=4) | FirstK(20))


@pytest.fixture
def edit(text: Text) -> tuple[np.ndarray, np.ndarray]:
    old = text(180)
    return old, np.concatenate([old[:50], text(6, seed=1), old[70:]]).astype(np.int32)


class Judged(jaxkv.Engine):
    """An engine whose estimates are given."""

    bounds: dict[str, float]

    def estimate(self, source: Any, result: Any, calibration: Any = None) -> Estimate:
        assert calibration is None
        self._require_live(source)
        bound = self.bounds[result.reuse.policy]
        return Estimate(kl=bound / 2, bound=bound)


@pytest.fixture
def judged(model: jaxkv.Model) -> Judged:
    return Judged(model, num_pages=64, page_size=8, chunk_size=32, poison_free_pages=True)


@pytest.mark.parametrize(
    ("bounds", "chosen"),
    [((0.01, 0.001), 0), ((0.2, 0.01), 1), ((0.2, 0.02), None), ((float("inf"), 0.01), 1)],
)
def test_the_first_rung_within_the_budget_is_taken_and_what_was_given_up_is_paid(
    judged: Judged, edit: tuple[np.ndarray, np.ndarray], bounds: tuple[float, float], chosen: int | None
) -> None:
    old, new = edit
    source = judged.prefill(old).sequence
    plain = [judged.edit(source, new, rung) for rung in RUNGS]
    exact = judged.edit(source, new, jaxkv.Exact())
    names = [str(rung) for rung in RUNGS]
    judged.bounds = dict(zip(names, bounds, strict=True))
    sequences = judged.stats()["sequences"]
    result = judged.edit(source, new, Budget(0.01, RUNGS))
    assert judged.stats()["sequences"] == sequences + 1, "rungs that were given up are released"
    same = exact if chosen is None else plain[chosen]
    np.testing.assert_array_equal(result.logits, same.logits)
    np.testing.assert_array_equal(result.sequence.tokens, new)
    assert result.reuse.kind == same.reuse.kind
    assert result.reuse.forwarded == same.reuse.forwarded
    tried = plain[: 2 if chosen is None else chosen]
    spent = sum(r.reuse.ledger.flops for r in tried)
    ledger = result.reuse.ledger
    assert ledger.flops_by_cause.get("probe", 0.0) == spent
    assert ledger.flops == same.reuse.ledger.flops + spent
    assert result.reuse.policy.startswith("budget(0.01)")
    assert (names[chosen] in result.reuse.policy.partition(": ")[2]) if chosen is not None else True
    judged.check()


def test_nothing_to_keep_is_exact_without_a_trial(judged: Judged, text: Text) -> None:
    judged.bounds = {}
    source = judged.prefill(text(100)).sequence
    result = judged.edit(source, text(60, seed=5), Budget(0.01))
    assert result.reuse.kind == "exact"
    assert "probe" not in result.reuse.ledger.flops_by_cause


def test_an_exact_fallback_of_an_approximate_source_keeps_only_what_is_exact(
    judged: Judged, decoder: Any, edit: tuple[np.ndarray, np.ndarray]
) -> None:
    old, new = edit
    stale = judged.edit(judged.prefill(old).sequence, new, RUNGS[0]).sequence
    assert not stale.exact
    judged.bounds = {str(rung): 9.0 for rung in RUNGS}
    longer = np.concatenate([new[:120], new[125:]])
    result = judged.edit(stale, longer, Budget(0.01, RUNGS))
    assert result.reuse.kind == "exact"
    assert result.reuse.matched <= stale.exact_length
    np.testing.assert_allclose(result.logits, decoder.logits(longer)[-1], atol=tolerance("logits"))


def test_weights_without_a_calibration_are_refused_with_the_command_that_makes_one(
    engine: jaxkv.Engine, edit: tuple[np.ndarray, np.ndarray]
) -> None:
    old, new = edit
    source = engine.prefill(old).sequence
    sequences = engine.stats()["sequences"]
    with pytest.raises(jaxkv.ConfigError, match=r"no calibration.*experiments\.calibrate"):
        engine.edit(source, new, Budget(0.01, RUNGS))
    assert engine.stats()["sequences"] == sequences
    exact = engine.edit(source, new, jaxkv.Exact())
    assert engine.estimate(source, exact) == Estimate(kl=0.0, bound=0.0)


def test_signals_say_what_happened(
    make_engine: Callable[..., jaxkv.Engine], edit: tuple[np.ndarray, np.ndarray]
) -> None:
    engine = make_engine(num_pages=256)
    old, new = edit
    long = np.concatenate([old, old[::-1]])
    source = engine.prefill(long).sequence
    changed = np.concatenate([new, old[::-1]]).astype(np.int32)
    plain = engine.edit(source, changed, SCR())
    found = engine.signals(source, plain)
    assert isinstance(found, Signals)
    assert (found.deleted, found.inserted, found.length) == (20, 6, len(changed))
    assert found.distance == len(changed) - 56
    assert not found.sink_stale
    assert found.stale_share == plain.reuse.relocated / len(changed)
    assert 0 < found.stale_mass < 1
    assert 0 < found.deleted_mass < 1
    assert 0 < found.value_drift < 2
    repaired = engine.signals(source, engine.edit(source, changed, SCR() | FirstK(200)))
    assert repaired.stale_mass < found.stale_mass
    head = engine.edit(source, long[20:], SCR())
    assert engine.signals(source, head).sink_stale
    # Where nothing is deleted nobody attended what was; where nothing changes nothing drifts.
    inserted = np.concatenate([long[:50], new[50:56], long[50:]]).astype(np.int32)
    assert engine.signals(source, engine.edit(source, inserted, SCR())).deleted_mass == 0


def test_drift_is_the_change_of_keys_and_values_that_were_computed_again(
    engine: jaxkv.Engine, edit: tuple[np.ndarray, np.ndarray]
) -> None:
    old, new = edit
    source = engine.prefill(old).sequence
    result = engine.edit(source, new, SCR(min_span=64, tail=16))
    found = engine.signals(source, result)
    before, after = engine.read_kv(source), engine.read_kv(result.sequence)
    tail = np.arange(len(new) - 16, len(new))
    layer = 1
    for name, a, b in (
        ("key_drift", before.keys, after.keys),
        ("value_drift", before.values, after.values),
    ):
        x = a[layer, tail + len(old) - len(new)].astype(np.float64)
        y = b[layer, tail].astype(np.float64)
        expected = np.sqrt(((x - y) ** 2).sum() / (y**2).sum())
        assert getattr(found, name) == pytest.approx(expected, rel=1e-4)
    assert dataclasses.asdict(found)
