"""Healing a hybrid: from the nearest exact snapshot, left to right, in the end equal to a fresh prefill."""

# ruff: noqa: F401, F811 - fixtures are imported

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recurrent_reference import hybrid_logits
from test_hybrid_engine import Make, content, hybrid, make, snapshots
from tolerances import tolerance

import jaxkv
from jaxkv import SCR

CUT, GAP, LENGTH = 40, 10, 110


def edited(engine: jaxkv.Engine, text: Any, states: str) -> tuple[jaxkv.Sequence, np.ndarray]:
    old = text(LENGTH)
    new = np.delete(old, slice(CUT, CUT + GAP))
    policy = SCR(min_span=16, tail=6, states=states)
    return engine.edit(engine.prefill(old).sequence, new, policy).sequence, new


@pytest.mark.parametrize("states", ["fork", "replay"])
def test_healing_ends_at_a_fresh_prefill_and_what_is_healed_is_exact(
    make: Make, hybrid: jaxkv.Model, text: Any, states: str
) -> None:
    engine = make()
    sequence, new = edited(engine, text, states)
    stale = np.asarray(sequence.logits)
    fresh = engine.prefill(new, reuse=False).sequence
    kv = engine.read_kv(fresh)
    for number, count in enumerate((25, 25, 25)):
        causes = {"healed": (25, 25, 10)[number]}
        if states == "fork" and not number:
            causes["replayed"] = 8
        before = sequence.exact_length
        result = engine.heal(sequence, tokens=count)
        reuse, end = result.reuse, min(before + count, len(new))
        # A replay left a state behind the prefix, else there is one of the old text behind 32 tokens; later
        # steps find that behind what was healed before.
        assert reuse.ledger.forwarded_by_cause == causes
        assert reuse.matched == before - causes.get("replayed", 0)
        assert reuse.matched + reuse.relocated + reuse.forwarded == len(new)
        sequence = result.sequence
        assert sequence.exact_length == end
        keys = engine.read_kv(sequence).keys[:, :end]
        np.testing.assert_allclose(keys, kv.keys[:, :end], atol=tolerance("readback"), rtol=0)
        hit = engine.prefill(np.append(new, 3)[: end + 1])
        assert (hit.reuse.matched, hit.reuse.forwarded) == (end, 1), "what is exact is shared at once"
        if end < len(new):
            assert reuse.kind == "approximate"
            np.testing.assert_array_equal(sequence.logits, stale)
        engine.check()
    assert (result.reuse.kind, sequence.influences) == ("exact", ())
    for mine, theirs in zip(content(engine, sequence.state), content(engine, fresh.state), strict=True):
        for one, two in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, two, atol=tolerance("logits"), rtol=0)
    expected = hybrid_logits(hybrid.params, hybrid.config, new)[0][-1]
    np.testing.assert_allclose(sequence.logits, expected, atol=tolerance("logits"), rtol=0)
    assert np.abs(stale - expected).max() > 1e-3
    drawn = engine.generate(sequence, max_tokens=6, stop=()).tokens
    np.testing.assert_array_equal(drawn, engine.generate(fresh, max_tokens=6, stop=()).tokens)
    assert engine.heal(sequence, tokens=1).reuse.forwarded == 0


def test_nothing_of_a_stale_state_is_kept_and_without_a_snapshot_healing_begins_at_0(
    make: Make, text: Any
) -> None:
    engine = make()
    sequence, _ = edited(engine, text, "fork")
    engine.forget_domain("default")
    result = engine.heal(sequence, tokens=20)
    assert result.reuse.ledger.forwarded_by_cause == {"healed": 20, "replayed": CUT}
    kept = snapshots(engine)
    assert max(kept) == CUT + 20
    assert sequence.state not in kept.values()
    longer = engine.extend(result.sequence, text(3, seed=5))
    assert longer.reuse.kind == "approximate"
    assert max(snapshots(engine)) == CUT + 20


def test_on_the_chunk_grid_a_healed_hybrid_has_the_bits_of_a_cold_one(make: Make, text: Any) -> None:
    engine = make(reuse_granularity="chunk")
    sequence, new = edited(engine, text, "fork")
    while not sequence.exact:
        sequence = engine.heal(sequence, tokens=20).sequence
    cold = make(reuse_granularity="chunk").prefill(new)
    np.testing.assert_array_equal(np.asarray(sequence.logits), np.asarray(cold.logits))
    mine, theirs = engine.read_kv(sequence), engine.read_kv(engine.prefill(new, reuse=False).sequence)
    np.testing.assert_array_equal(mine.keys, theirs.keys)
    np.testing.assert_array_equal(mine.values, theirs.values)
