"""Probes against float64: what deviates, who attended what, and that asking leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference import Decoder, turn
from tolerances import tolerance

import jaxkv
from jaxkv import SCR, Attention, Deviation, Encoded
from jaxkv.probing import Prober
from jaxkv.reuse.plan import make_edit

Text = Callable[..., np.ndarray]
SMALL = SCR(min_span=8, tail=4)


def prober_of(engine: jaxkv.Engine, sequence: jaxkv.Sequence, tokens: np.ndarray) -> Prober:
    def trial(_: Any) -> Any:
        pytest.fail("no trial was asked for")

    return Prober(
        engine._memory,
        engine._params,
        sequence,
        tokens,
        chunk_size=engine.chunk_size,
        max_deltas=engine.max_deltas,
        encode=None,
        trial=trial,
    )


def unrotated(cached: Any, layer: int, rope: Any) -> np.ndarray:
    return turn(cached.keys[layer], -cached.birth, rope)


def test_deviation_is_that_of_a_float64_prefill_at_the_layer(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    old = text(150)
    new = np.concatenate([old[:40], text(9, seed=1), old[55:]]).astype(np.int32)
    sequence = engine.prefill(old).sequence
    edit = make_edit(sequence, new, SMALL)
    found, flops = prober_of(engine, sequence, new)(edit, Deviation(1))
    rope = decoder.config.rope
    before, after = (decoder.run(t, np.arange(len(t)), decoder.empty())[1] for t in (old, new))
    survivors = np.arange(49, len(new))
    a, b = unrotated(before, 1, rope)[survivors + 6], unrotated(after, 1, rope)[survivors]
    v, w = before.values[1][survivors + 6], after.values[1][survivors]
    expected = ((a - b) ** 2).sum((1, 2)) / (b**2).sum((1, 2)).mean()
    expected += ((v - w) ** 2).sum((1, 2)) / (w**2).sum((1, 2)).mean()
    assert np.isnan(found[:49]).all()
    np.testing.assert_allclose(found[49:], expected, atol=tolerance("deviation"))
    # Both layers of all 104 tokens behind the prefix, each with the keys before it.
    positions = np.arange(40, len(new))
    layer = (decoder.config.body_params - decoder.config.embed_dim) // 2
    per_key = 4 * 2 * decoder.config.num_heads * decoder.config.head_dim
    assert (
        flops == 2 * (2 * layer + decoder.config.embed_dim) * len(positions) + per_key * (positions + 1).sum()
    )


def test_recovered_attention_is_the_true_one_where_the_keys_and_values_span_the_state(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """2·K·H = 64 features of K and V determine the 48 of the state: the query is then the real one."""
    old = text(120)
    new = np.concatenate([old[:30], old[45:80], old[90:]]).astype(np.int32)
    sequence = engine.prefill(old).sequence
    edit = make_edit(sequence, new, SMALL)
    found, flops = prober_of(engine, sequence, new)(edit, Attention(depths=(0.5,)))
    deleted = np.zeros(120, bool)
    deleted[30:45] = deleted[80:90] = True
    np.testing.assert_array_equal(edit.deleted, deleted)
    mass = deleted_mass(decoder, old, deleted, layer=1)
    stands = np.concatenate([np.arange(30), np.arange(45, 80), np.arange(90, 120)])
    expected = np.where(stands > 30, mass[stands], 0)
    np.testing.assert_allclose(found, expected, atol=tolerance("recovered_attention"))
    assert found.max() > 0.3
    assert flops > 0


def deleted_mass(decoder: Decoder, tokens: np.ndarray, deleted: np.ndarray, layer: int) -> np.ndarray:
    """The largest share of any head's attention that falls on deleted keys, for each token."""
    watched: list[np.ndarray] = []
    decoder.run(tokens, np.arange(len(tokens)), decoder.empty(), watch=watched)
    mass: np.ndarray = (watched[layer] * deleted).sum(-1).max(0)
    return mass


def test_probes_leave_no_page_and_no_trace(engine: jaxkv.Engine, text: Text) -> None:
    old = text(120)
    new = np.concatenate([old[:30], old[45:]]).astype(np.int32)
    first = engine.prefill(old)
    before, free = engine.read_kv(first.sequence), engine.stats()["pages_free"]
    prober = prober_of(engine, first.sequence, new)
    edit = make_edit(first.sequence, new, SMALL)
    for probe in (Deviation(1), Attention()):
        answer, flops = prober(edit, probe)
        again, nothing = prober(edit, probe)
        assert again is answer
        assert flops > nothing == 0
    after = engine.read_kv(first.sequence)
    np.testing.assert_array_equal(before.keys, after.keys)
    assert engine.stats()["pages_free"] == free
    answer, flops = prober(edit, Encoded("text"))
    assert (len(answer), flops) == (0, 0)


def test_a_layer_the_model_does_not_have_is_refused(engine: jaxkv.Engine, text: Text) -> None:
    first = engine.prefill(text(100)).sequence
    new = np.concatenate([text(100)[:10], text(100)[15:]])
    with pytest.raises(jaxkv.ConfigError, match="layer is 2, expected one of the model's 0 to 1"):
        engine.edit(first, new, jaxkv.TopDeviation(0.5, 2))


def test_recomputing_all_that_deviates_is_exact(engine: jaxkv.Engine, decoder: Decoder, text: Text) -> None:
    """`top_deviation` with ratio 1 is a prefill; with a share of the tokens it is nearer than none."""
    old = text(150)
    new = np.concatenate([old[:40], old[55:]]).astype(np.int32)
    first = engine.prefill(old).sequence
    whole = engine.edit(first, new, SMALL | jaxkv.TopDeviation(1.0, 1))
    exact = decoder.logits(new)[-1]
    np.testing.assert_allclose(whole.logits, exact, atol=tolerance("logits"))
    assert whole.reuse.kind == "exact"
    part = engine.edit(first, new, SMALL | jaxkv.TopDeviation(0.3, 1))
    none = engine.edit(first, new, SMALL)
    assert np.abs(part.logits - exact).max() < np.abs(none.logits - exact).max()
    ledger = part.reuse.ledger
    assert ledger.flops_by_cause["probe"] > 0
    assert "probe" not in ledger.forwarded_by_cause
    # 95 survive; the tail's four count where they were chosen first.
    assert ledger.forwarded_by_cause["top_deviation"] == 29


def test_dependents_are_those_that_attend_the_edit_most(engine: jaxkv.Engine, text: Text) -> None:
    old = text(150)
    new = np.concatenate([old[:40], old[55:]]).astype(np.int32)
    first = engine.prefill(old).sequence
    prober = prober_of(engine, first, new)
    mass, _ = prober(make_edit(first, new, SMALL), Attention())
    result = engine.edit(first, new, SMALL | jaxkv.Dependents(6, 10))
    expected = set(range(40, 46)) | {46 + i for i in np.argsort(-mass[46:], kind="stable")[:10]}
    stale = {p for r in result.sequence.provenance if r.origin == "relocated" for p in range(r.start, r.end)}
    assert expected == set(range(40, 135)) - stale - set(range(131, 135)) | (expected & set(range(131, 135)))
    inserted = np.concatenate([old[:40], text(5, seed=1), old[40:]])
    only = engine.edit(first, inserted, SMALL | jaxkv.Dependents(6, 10)).reuse.ledger
    assert only.forwarded_by_cause == {"inserted": 5, "dependents": 6, "tail": 4}
    assert "probe" not in only.flops_by_cause


def test_an_erratum_appends_and_says_that_it_answers_for_another_text(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    old = text(120)
    new = np.concatenate([old[:40], text(3, seed=1), old[50:]]).astype(np.int32)
    first = engine.prefill(old)
    result = engine.edit(first.sequence, new, jaxkv.Erratum())
    expected = np.concatenate([old, old[40:50], text(3, seed=1)])
    np.testing.assert_array_equal(result.sequence.tokens, expected)
    np.testing.assert_allclose(result.logits, decoder.logits(expected)[-1], atol=tolerance("logits"))
    assert result.sequence.exact, "of its own tokens"
    assert result.reuse.kind == "approximate"
    assert result.reuse.matched == 120
    moved = np.concatenate([old[60:], old[:60]])
    assert engine.edit(first.sequence, moved, jaxkv.Erratum()).reuse.kind == "exact"
