"""Suffix Cache Reuse on a hybrid: what a stale and what a replayed state answer, judged in float64."""

# ruff: noqa: F401, F811 - fixtures are imported

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recurrent_reference import hybrid_logits, hybrid_run, mixer_inputs, mixer_of
from test_hybrid_engine import Make, hybrid, make, snapshots
from tolerances import tolerance

import jaxkv
from jaxkv import SCR, Span

CUT, GAP, LENGTH, TAIL = 40, 10, 110, 6
PREFIX = Span(0, 0, CUT)
KEPT = Span(CUT + GAP, CUT, LENGTH - CUT - GAP)


def scr(states: str) -> jaxkv.SCR:
    return SCR(min_span=16, tail=TAIL, states=states)


def moved(cached: Any, kept: tuple[Span, ...], forward: Any) -> Any:
    """KV of the kept spans where they stand in the new text, without the positions that are computed."""
    found = []
    for at, keys, values in cached:
        parts = []
        for span in kept:
            rows = np.arange(span.old, span.old + span.length)
            stands = rows + span.delta
            rows, stands = rows[~np.isin(stands, forward)], stands[~np.isin(stands, forward)]
            assert (at[rows] == rows).all()
            parts.append((stands, keys[rows], values[rows]))
        found.append(tuple(np.concatenate(column) for column in zip(*parts, strict=True)))
    return found


def tails() -> np.ndarray:
    return np.arange(LENGTH - GAP - TAIL, LENGTH - GAP)


@pytest.mark.parametrize("states", ["fork", "replay"])
def test_a_deletion_answers_as_float64_does(
    make: Make,
    hybrid: jaxkv.Model,
    text: Any,
    states: str,
) -> None:
    engine, old = make(), text(LENGTH)
    new = np.delete(old, slice(CUT, CUT + GAP))
    source = engine.prefill(old).sequence
    result = engine.edit(source, new, scr(states))
    _, cached, stale = hybrid_run(hybrid.params, hybrid.config, old, np.arange(LENGTH))
    spans, forward = (PREFIX, KEPT), tails()
    if states == "fork":
        args = (new[forward], forward, moved(cached, spans, forward), stale)
        logits, _, after = hybrid_run(hybrid.params, hybrid.config, *args)
    else:
        _, _, start = hybrid_run(hybrid.params, hybrid.config, new[:CUT], np.arange(CUT))
        at = np.arange(CUT, len(new))
        args = (new[at], at, moved(cached, spans, forward), start, np.isin(at, forward))
        logits, kv, after = hybrid_run(hybrid.params, hybrid.config, *args)
        logits = logits[-1:]
    np.testing.assert_allclose(result.logits, logits[-1], atol=tolerance("logits"), rtol=0)
    assert result.reuse.kind == "approximate"
    exact = hybrid_logits(hybrid.params, hybrid.config, new)[0][-1]
    assert np.abs(exact - logits[-1]).max() > 1e-3  # the test would notice an exact answer
    if states == "fork":
        assert (result.reuse.matched, result.reuse.relocated, result.reuse.forwarded) == (40, 54, 6)
    else:
        assert (result.reuse.matched, result.reuse.forwarded) == (32, 68)
        assert result.reuse.ledger.forwarded_by_cause == {"replayed": 62, "tail": 6}
    # What follows goes on from the same state and the same keys.
    follow = text(5, seed=8)
    scored = engine.score(result.sequence, follow)
    everything = moved(cached, spans, forward)
    if states == "fork":
        _, everything, _ = hybrid_run(hybrid.params, hybrid.config, new[forward], forward, everything, stale)
    else:
        everything = kv
    expected = hybrid_run(hybrid.params, hybrid.config, follow, len(new) + np.arange(5), everything, after)[0]
    np.testing.assert_allclose(scored[1:], expected[:-1], atol=tolerance("logits"), rtol=0)


def test_composed_states_are_what_float64_composes(make: Make, hybrid: jaxkv.Model, text: Any) -> None:
    """The kept span between two snapshots is passed over: its operator and its sum, from a float64 loop."""
    engine, old = make(keep_operators=True), text(LENGTH)
    assert engine.stats()["state_bytes"] == hybrid.config.state_bytes(4, operators=True)
    new = np.delete(old, slice(CUT, CUT + GAP))
    source = engine.prefill(old).sequence
    result = engine.edit(source, new, scr("compose"))
    low, high = 64 - GAP, 96 - GAP  # the snapshots of the old text at 64 and 96, where they stand now
    reuse = result.reuse
    assert (reuse.kind, reuse.matched, reuse.relocated) == ("approximate", 32, high - low)
    assert reuse.forwarded == len(new) - 32 - (high - low)
    model = hybrid.params, hybrid.config
    _, cached, _ = hybrid_run(*model, old, np.arange(LENGTH))
    ran = {n: hybrid_run(*model, old[:n], np.arange(n))[2] for n in (64, 96)}
    _, _, start = hybrid_run(*model, new[:CUT], np.arange(CUT))
    forward, before = tails(), np.arange(CUT, low)
    spans = moved(cached, (PREFIX, KEPT), forward)
    _, _, front = hybrid_run(*model, new[before], before, spans, start, np.zeros(len(before), bool))
    behind = []
    for layer, ((_, then), (conv, end), (_, now)) in enumerate(zip(ran[64], ran[96], front, strict=True)):
        operator = transition(hybrid, old, layer)
        behind.append((conv, end + np.einsum("hij,hjv->hiv", operator, now - then)))
    at = np.arange(high, len(new))
    logits, kv, after = hybrid_run(*model, new[at], at, spans, behind, np.isin(at, forward))
    np.testing.assert_allclose(result.logits, logits[-1], atol=tolerance("logits"), rtol=0)
    follow = text(5, seed=8)
    scored = engine.score(result.sequence, follow)
    expected = hybrid_run(*model, follow, len(new) + np.arange(5), kv, after)[0]
    np.testing.assert_allclose(scored[1:], expected[:-1], atol=tolerance("logits"), rtol=0)
    plain = make()
    with pytest.raises(jaxkv.ConfigError, match="composes states, expected an engine with keep_operators"):
        plain.edit(plain.prefill(old).sequence, new, scr("compose"))


def transition(hybrid: jaxkv.Model, tokens: np.ndarray, number: int) -> np.ndarray:
    """What tokens 64..95 make of a state, [Hv, Dk, Dk]: by how what they leave answers to a change of it."""
    config, shape = hybrid.config, hybrid.config.recurrent
    before, state = hybrid_run(hybrid.params, config, tokens[:64], np.arange(64))[2][number]
    # A change of one layer's state changes what later layers see: each is looked at alone.
    inputs = mixer_inputs(hybrid, tokens[:96], number)[64:]
    mixer = mixer_of(hybrid.params.layers[config.recurrent_layers[number]], shape, config.norm_eps)
    base = mixer.run(inputs, before, state)[2]
    operator = np.zeros((shape.num_value_heads, shape.key_dim, shape.key_dim))
    for j in range(shape.key_dim):
        changed = state.copy()
        changed[:, j, 0] += 1
        operator[:, :, j] = (mixer.run(inputs, before, changed)[2] - base)[:, :, 0]
    return operator


def test_an_inserted_token_before_a_stale_state_is_not_exact(make: Make, text: Any) -> None:
    """Computed in front of every kept key, but from the state behind the old text: it stays private."""
    engine, old = make(), text(LENGTH)
    new = np.concatenate([old[:CUT], text(9, seed=5), old[CUT:]])
    source = engine.prefill(old).sequence
    before = dict(snapshots(engine))
    result = engine.edit(source, new, scr("fork"))
    assert result.sequence.exact_length == CUT
    assert snapshots(engine) == before
    assert engine.prefill(new, reuse=True).reuse.kind == "exact"
    fresh = engine.prefill(new, reuse=False)
    np.testing.assert_allclose(engine.prefill(new).logits, fresh.logits, atol=tolerance("logits"), rtol=0)
    replayed = engine.edit(source, new, scr("replay"))
    assert replayed.sequence.exact_length == CUT + 9  # from an exact state, in front of what is stale


def test_nothing_kept_means_an_exact_answer(make: Make, hybrid: jaxkv.Model, text: Any) -> None:
    """A cut at the end: every key is exact, and so the state is resumed, not taken over."""
    engine, old = make(), text(LENGTH)
    result = engine.edit(engine.prefill(old).sequence, old[:70], scr("fork"))
    assert result.reuse.kind == "exact"
    expected = hybrid_logits(hybrid.params, hybrid.config, old[:70])[0][-1]
    np.testing.assert_allclose(result.logits, expected, atol=tolerance("logits"), rtol=0)


def test_an_approximate_source_is_edited_back_to_an_exact_one(
    make: Make,
    hybrid: jaxkv.Model,
    text: Any,
) -> None:
    engine, old = make(), text(LENGTH)
    new = np.delete(old, slice(CUT, CUT + GAP))
    stale = engine.edit(engine.prefill(old).sequence, new, scr("fork")).sequence
    longer = np.concatenate([new, text(4)])
    for tokens in (new, longer):
        result = engine.edit(stale, tokens, jaxkv.Exact())
        assert result.reuse.kind == "exact"
        expected = hybrid_logits(hybrid.params, hybrid.config, tokens)[0][-1]
        np.testing.assert_allclose(result.logits, expected, atol=tolerance("logits"), rtol=0)
    again = engine.extend(stale, text(4))
    assert again.reuse.kind == "approximate"


@pytest.mark.parametrize("form", ["view", "copy"])
def test_both_forms_answer_alike(make: Make, text: Any, form: str) -> None:
    engine, old = make(), text(LENGTH)
    new = np.concatenate([old[:CUT], text(9, seed=5), old[CUT + 3 :]])
    source = engine.prefill(old).sequence
    policies = [SCR(form=f, min_span=16, tail=TAIL) for f in ("view", form)]
    first, second = (engine.edit(source, new, policy) for policy in policies)
    np.testing.assert_allclose(first.logits, second.logits, atol=tolerance("view_against_copy"), rtol=0)


def test_policies_that_states_cannot_follow_are_refused(make: Make, text: Any) -> None:
    engine, old = make(), text(LENGTH)
    source = engine.prefill(old).sequence
    with pytest.raises(jaxkv.ConfigError, match="policy 'drop' drops tokens, which a recurrent state"):
        engine.edit(source, np.delete(old, slice(0, 10)), jaxkv.Drop())
    with pytest.raises(jaxkv.ConfigError, match="states is 'forks', expected one of fork, replay, compose"):
        SCR(states="forks")
    assert str(scr("replay")) == "scr(min_span=16,tail=6,states=replay)"
    assert jaxkv.policy_from_name(str(scr("replay"))) == scr("replay")
    free = engine.stats()
    engine.check()
    assert free["states_free"] == engine.stats()["states_free"]
