"""Edits under every policy, followed in float64; forms against each other; what is called exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judge import ATOL, Judge, State, origins
from reference import Decoder, decoder_of
from tiny import make_model, tiny_config
from tolerances import tolerance

import jaxkv
from jaxkv import SCR, Drop, Exact, FirstK, Forget, NoRotation, Sinks, policy_from_name

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
SMALL = SCR(min_span=8, tail=4)
CONTROL = SCR(min_span=8, tail=4, rotate=False)
POLICIES = {
    "scr": SMALL,
    "copy": SCR(form="copy", min_span=8, tail=4),
    "no tail": SCR(min_span=8, tail=0),
    "repaired": SMALL | FirstK(6) | Sinks(3),
    "one span": SCR(min_span=8, tail=4, max_spans=1),
    "first_k": FirstK(5),
    "sinks": Sinks(2),
    "no_rotation": CONTROL,
    "drop": Drop(),
    "forget": Forget(),
    "exact": Exact(),
}
YARN = jaxkv.RopeConfig(
    rotary_dim=16, scaling="yarn", factor=4.0, original_max_positions=64, magnitude=1.1386
)


def edits(text: Text) -> dict[str, np.ndarray]:
    """New texts for `text(180)`."""
    old, new = text(180), text(40, seed=1)
    join = np.concatenate
    return {
        "delete the middle": join([old[:50], old[70:]]),
        "delete the head": old[13:],
        "delete the end": old[:170],
        "insert": join([old[:37], new[:11], old[37:]]),
        "insert at the start": join([new[:3], old]),
        "replace": join([old[:40], new[:10], old[50:]]),
        "append": join([old, new[:6]]),
        "swap halves": join([old[90:], old[:90]]),
        "several": join([old[5:30], new[:7], old[41:90], old[100:160], new[7:9], old[165:]]),
        "nothing is left": text(60, seed=5),
        "nothing changes": old,
    }


EDITS = list(edits(lambda n, seed=0: np.arange(n) + seed))


def start(engine: jaxkv.Engine, decoder: Decoder, tokens: np.ndarray) -> tuple[Any, State]:
    return engine.prefill(tokens), Judge(decoder).prefill(tokens)


def assert_adds_up(result: jaxkv.StepResult, engine: jaxkv.Engine) -> None:
    """Report, ledger, provenance and KV tell the same story."""
    reuse, ledger, n = result.reuse, result.reuse.ledger, len(result.sequence)
    assert reuse.prompt == n == ledger.prompt
    assert reuse.matched + reuse.relocated + reuse.forwarded + reuse.dropped == n
    for name in ("matched", "relocated", "forwarded", "dropped"):
        assert getattr(ledger, name) == getattr(reuse, name)
    found = origins(result.sequence)
    assert reuse.kind == ("exact" if set(found) == {"exact"} else "approximate")
    assert reuse.seams == tuple(s.new for s in reuse.spans)
    kept = [p for p, origin in enumerate(found) if origin != "dropped"]
    np.testing.assert_array_equal(engine.read_kv(result.sequence).positions, kept)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("edit", EDITS)
def test_every_policy_equals_float64_on_every_edit(
    engine: jaxkv.Engine, decoder: Decoder, text: Text, policy: str, edit: str
) -> None:
    """CASES 13-17 through the engine."""
    first, state = start(engine, decoder, text(180))
    result = engine.edit(first.sequence, edits(text)[edit], POLICIES[policy])
    rotate = policy != "no_rotation"
    state = Judge(decoder).edit(state, result, rotate=rotate)
    np.testing.assert_allclose(result.logits, state.logits, atol=ATOL)
    assert_adds_up(result, engine)
    continuation = text(6, seed=7)
    scored = engine.score(result.sequence, continuation)
    np.testing.assert_allclose(scored, Judge(decoder).score(state, continuation), atol=ATOL)
    if result.reuse.kind == "exact":
        exact = decoder.logits(result.sequence.tokens)[-1]
        np.testing.assert_allclose(result.logits, exact, atol=ATOL)


def test_what_policies_compute_differs_as_named(engine: jaxkv.Engine, text: Text) -> None:
    """Insert 11 tokens at 37 of 180: 143 survive behind the seam."""
    first = engine.prefill(text(180)).sequence
    tokens = edits(text)["insert"]
    by_cause = {
        name: engine.edit(first, tokens, policy).reuse.ledger.forwarded_by_cause
        for name, policy in POLICIES.items()
    }
    assert by_cause["scr"] == {"inserted": 11, "tail": 4}
    assert by_cause["copy"] == by_cause["no_rotation"] == by_cause["scr"]
    assert by_cause["no tail"] == {"inserted": 11, "last": 1}
    assert by_cause["repaired"] == {"inserted": 11, "first_k": 6, "tail": 4}
    assert by_cause["first_k"] == {"inserted": 11, "first_k": 5, "tail": 16}
    assert by_cause["drop"] == {"inserted": 11, "last": 1}
    assert by_cause["exact"] == {"inserted": 154}
    assert by_cause["forget"] == {"inserted": 11, "tail": 16}  # nothing was deleted
    head = engine.edit(first, edits(text)["delete the head"], POLICIES["repaired"]).reuse
    assert head.ledger.forwarded_by_cause == {"first_k": 6, "tail": 4}
    assert head.relocated == 167 - 10


def test_view_and_copy_agree_to_rounding_and_keep_the_same_content(engine: jaxkv.Engine, text: Text) -> None:
    first = engine.prefill(text(150)).sequence
    tokens = np.concatenate([text(150)[:20], text(9, seed=1), text(150)[31:]])
    view = engine.edit(first, tokens, SMALL)
    copy = engine.edit(first, tokens, SCR(form="copy", min_span=8, tail=4))
    np.testing.assert_allclose(view.logits, copy.logits, atol=tolerance("view_against_copy"))
    a, b = engine.read_kv(view.sequence), engine.read_kv(copy.sequence)
    np.testing.assert_array_equal(a.positions, b.positions)
    np.testing.assert_allclose(a.keys, b.keys, atol=5e-6)
    moved = [i for i, o in enumerate(origins(view.sequence)) if o == "relocated"]
    np.testing.assert_array_equal(a.values[:, moved], b.values[:, moved])
    assert view.reuse.ledger.kv_bytes_moved == 0
    assert copy.reuse.ledger.kv_bytes_moved > 0
    # A view costs no page for what it keeps.
    assert view.reuse.relocated == copy.reuse.relocated == 115


@pytest.mark.parametrize("granularity", ["token", "chunk"])
def test_an_edit_that_changes_nothing_is_exact_bit_by_bit(
    make_engine: Engines, text: Text, granularity: str
) -> None:
    engine = make_engine(reuse_granularity=granularity)
    first = engine.prefill(text(100))
    exact = engine.edit(first.sequence, text(100), Exact())
    for policy in (SMALL, SCR(), SCR(form="copy"), NoRotation(), Drop(), Forget(), FirstK(8), Sinks(4)):
        same = engine.edit(first.sequence, text(100), policy)
        assert same.reuse.kind == "exact"
        np.testing.assert_array_equal(same.logits, exact.logits)
        assert same.reuse.relocated == same.reuse.dropped == 0


def test_there_and_back_again_changes_no_bit(engine: jaxkv.Engine, text: Text) -> None:
    """A view moved by +11 and by -11 stands on the very slots it was born in."""
    old = text(120)
    first = engine.prefill(old).sequence
    there = engine.edit(first, np.concatenate([old[:40], text(11, seed=1), old[40:]]), SMALL)
    back = engine.edit(there.sequence, old, SMALL)
    kept = np.array([p for p, o in enumerate(origins(back.sequence)) if o == "relocated"])
    assert len(kept) > 60
    a, b = engine.read_kv(first), engine.read_kv(back.sequence)
    np.testing.assert_array_equal(a.keys[:, kept], b.keys[:, kept])
    np.testing.assert_array_equal(a.values[:, kept], b.values[:, kept])
    assert {r.delta for r in back.sequence.provenance} == {0}
    assert back.reuse.kind == "approximate"


@pytest.mark.parametrize("form", ["view", "copy"])
def test_many_edits_in_a_row_past_max_deltas_equal_float64(
    make_engine: Engines, decoder: Decoder, text: Text, form: Any
) -> None:
    """CASE 17: deltas add once. A view holds 8 deltas; the next edit makes it materialize."""
    engine = make_engine(max_deltas=8)
    rng, judge = np.random.default_rng(5), Judge(decoder)
    tokens = text(100)
    result, state = start(engine, decoder, tokens)
    policy = SCR(form=form, min_span=8, tail=2)
    held = []
    for i in range(10):
        at = 90 - 8 * i
        tokens = np.concatenate([tokens[:at], rng.integers(0, 97, 1 + i % 3), tokens[at:]])
        source = result.sequence
        result = engine.edit(source, tokens.astype(np.int32), policy)
        state = judge.edit(state, result)
        np.testing.assert_allclose(result.logits, state.logits, atol=ATOL)
        assert_adds_up(result, engine)
        held.append(result.sequence.copies is not None)
        engine.release(source)
        engine.check()
    assert held[-1], "so many deltas must have been materialized"
    if form == "view":
        assert not held[0]
    continuation = text(6, seed=3)
    np.testing.assert_allclose(
        engine.score(result.sequence, continuation), judge.score(state, continuation), atol=ATOL
    )
    generated = engine.generate(result.sequence, max_tokens=8, stop=())
    assert generated.tokens.tolist() == judge.greedy(state, 8)


def test_policies_in_a_row_equal_float64(engine: jaxkv.Engine, decoder: Decoder, text: Text) -> None:
    """Approximate on approximate, dropped below relocated, exact again at the end."""
    judge, old = Judge(decoder), text(140)
    result, state = start(engine, decoder, old)
    steps = [
        (np.concatenate([old[:60], old[75:]]), SMALL),
        (np.concatenate([text(4, seed=1), old[:60], old[75:]]), SMALL | FirstK(3)),
        (np.concatenate([text(4, seed=1), old[:30], old[75:]]), Drop()),
        (np.concatenate([old[5:30], old[75:130]]), SMALL),
        (np.concatenate([old[5:30], text(3, seed=2), old[75:130]]), SCR(form="copy", min_span=8)),
        (np.concatenate([old[5:30], text(3, seed=2), old[75:130], text(2, seed=3)]), Forget()),
        (np.concatenate([old[7:30], text(3, seed=2), old[75:130], text(2, seed=3)]), SMALL),
    ]
    for tokens, policy in steps:
        result = engine.edit(result.sequence, tokens, policy)
        state = judge.edit(state, result)
        np.testing.assert_allclose(result.logits, state.logits, atol=ATOL)
        assert_adds_up(result, engine)
    exact = engine.edit(result.sequence, old, Exact())
    assert exact.reuse.kind == "exact"
    np.testing.assert_allclose(exact.logits, decoder.logits(old)[-1], atol=ATOL)


@pytest.mark.parametrize("policy", [SMALL, Exact(), Drop()], ids=str)
def test_cutting_into_a_dropped_run_computes_its_last_token(
    engine: jaxkv.Engine, decoder: Decoder, text: Text, policy: jaxkv.Policy
) -> None:
    """CASE 9's other side: the last token has no KV, so it must be computed and written."""
    judge, old = Judge(decoder), text(120)
    first, state = start(engine, decoder, old)
    edited = np.concatenate([text(10, seed=1), old[20:]])
    dropped = engine.edit(first.sequence, edited, Drop())
    state = judge.edit(state, dropped)
    cut = engine.edit(dropped.sequence, edited[:60], policy)
    assert engine.read_kv(cut.sequence).positions[-1] == 59
    before = state.cached.take(np.arange(10), np.arange(10))
    if policy.exact:
        np.testing.assert_allclose(cut.logits, decoder.logits(edited[:60])[-1], atol=ATOL)
    else:
        expected, _ = decoder.run(edited[59:60], [59], before)
        np.testing.assert_allclose(cut.logits, expected[-1], atol=ATOL)
    assert_adds_up(cut, engine)


def test_dropped_tokens_are_still_counted_as_dropped_after_the_next_edit(
    engine: jaxkv.Engine, text: Text
) -> None:
    """A prefix or a span that has no KV is neither matched nor relocated."""
    old = text(120)
    first = engine.prefill(old).sequence
    edited = np.concatenate([text(10, seed=1), old[20:]])
    dropped = engine.edit(first, edited, Drop())
    assert dropped.reuse.dropped == 99
    more = engine.edit(dropped.sequence, np.concatenate([edited, [3]]), SMALL)
    assert (more.reuse.dropped, more.reuse.matched, more.reuse.forwarded) == (99, 11, 1)


def test_cutting_a_text_of_which_nothing_has_kv_is_computed_not_an_error(
    engine: jaxkv.Engine, text: Text
) -> None:
    old = text(120)
    first = engine.prefill(old).sequence
    dropped = engine.edit(first, old[20:], Drop())
    assert dropped.reuse.dropped == 99
    cut = engine.edit(dropped.sequence, old[20:80], SMALL)
    assert cut.reuse.forwarded == 1


def test_approximate_kv_never_enters_the_index(engine: jaxkv.Engine, decoder: Decoder, text: Text) -> None:
    """CASE 30's kin: what the index gives out is exact, whatever was edited, extended or generated."""
    old = text(120)
    first = engine.prefill(old).sequence
    policies = (SMALL, SCR(form="copy", min_span=8, tail=4), CONTROL, Drop(), SMALL | FirstK(8))
    for number, policy in enumerate(policies):
        new = np.concatenate([old[:30], text(7, seed=10 + number), old[45:]])
        edited = engine.edit(first, new, policy).sequence
        extended = engine.extend(edited, text(9, seed=2)).sequence
        generated = engine.generate(extended, max_tokens=8, stop=()).sequence
        assert 37 <= edited.exact_length < 60
        assert edited.exact_length == extended.exact_length == generated.exact_length
        again = engine.prefill(generated.tokens)
        assert again.reuse.matched == edited.exact_length
        assert again.reuse.kind == "exact"
        exact = decoder.logits(generated.tokens)[-1]
        np.testing.assert_allclose(again.logits, exact, atol=ATOL)


def test_a_repaired_head_that_is_exact_is_shared_and_no_more(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    old = text(120)
    first = engine.prefill(old).sequence
    new = np.concatenate([text(7, seed=1), old[15:]])
    edited = engine.edit(first, new, SMALL | FirstK(6)).sequence
    assert edited.exact_length == 13
    hit = engine.prefill(new)
    assert hit.reuse.matched == 13
    np.testing.assert_allclose(hit.logits, decoder.logits(new)[-1], atol=ATOL)


def test_the_first_tokens_of_a_kept_span_may_be_reused_nowhere_as_exact(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """An exact edit of an approximate sequence recomputes from the first approximate token."""
    old = text(120)
    first = engine.prefill(old).sequence
    replaced = np.concatenate([old[:30], text(6, seed=1), old[36:]])  # delta 0: nothing moves
    edited = engine.edit(first, replaced, SMALL)
    assert edited.reuse.kind == "approximate"
    assert [s.delta for s in edited.reuse.spans] == [0]
    exact = engine.edit(edited.sequence, np.concatenate([replaced, [1]]), Exact())
    assert exact.reuse.matched == 36
    np.testing.assert_allclose(exact.logits, decoder.logits([*replaced, 1])[-1], atol=ATOL)


def test_one_layer_keeps_values_bitwise_and_keys_to_one_rounding(make_engine: Engines, text: Text) -> None:
    """Without a layer below, K and V depend on the token alone: SCR is then exact."""
    model = make_model(tiny_config(rope=YARN, num_layers=1))
    decoder = decoder_of(model.params, model.config)
    engine = make_engine(model=model)
    old = text(100)
    first = engine.prefill(old)
    new = np.concatenate([old[:20], text(5, seed=1), old[33:]])
    source, moved = np.arange(33, 96), np.arange(25, 88)
    for form in ("view", "copy"):
        edited = engine.edit(first.sequence, new, SCR(form=form, min_span=8, tail=4))
        np.testing.assert_allclose(edited.logits, decoder.logits(new)[-1], atol=ATOL)
        a, b = engine.read_kv(first.sequence), engine.read_kv(edited.sequence)
        np.testing.assert_array_equal(a.values[:, source], b.values[:, moved])
        scale = np.abs(a.keys).max()
        np.testing.assert_allclose(a.keys[:, source], b.keys[:, moved], atol=scale * 2.0**-22)


def test_yarn_magnitude_is_applied_once(make_engine: Engines, text: Text) -> None:
    """CASE 18, through the engine: forwards, backwards, view and copy, against float64."""
    model = make_model(tiny_config(rope=YARN, num_layers=1))
    decoder = decoder_of(model.params, model.config)
    engine = make_engine(model=model)
    old = text(100)
    result, state = start(engine, decoder, old)
    norms = np.linalg.norm(engine.read_kv(result.sequence).keys[:, 60:90], axis=-1)
    for form in ("view", "copy", "copy"):
        added = np.concatenate([text(5, seed=len(result.sequence)), result.sequence.tokens])
        result = engine.edit(result.sequence, added, SCR(form=form, min_span=8, tail=4))
        state = Judge(decoder).edit(state, result)
        np.testing.assert_allclose(result.logits, state.logits, atol=ATOL)
        at = np.arange(60, 90) + len(added) - 100
        moved = np.linalg.norm(engine.read_kv(result.sequence).keys[:, at], axis=-1)
        np.testing.assert_allclose(moved / norms, 1, atol=tolerance("key_norm_ratio"))


def test_names_are_policies(engine: jaxkv.Engine, text: Text) -> None:
    first = engine.prefill(text(100)).sequence
    new = np.concatenate([text(100)[:10], text(100)[15:]])
    for name in ("exact", "drop", "no_rotation", "scr", "first_k", "sinks", "forget"):
        policy = policy_from_name(name)
        assert engine.edit(first, new, policy).reuse.policy == str(policy)


def test_forget_after_another_edit_keeps_nothing_that_attended_deleted_text(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    """The deletion may lie in an earlier edit: what was relocated then is not exact, so not kept."""
    engine = make_engine()
    whole = text(150)
    secret, rest = whole[40:60], np.concatenate([whole[:40], whole[60:]])
    assert len(secret) == 20
    relocated = engine.edit(engine.prefill(whole).sequence, rest, jaxkv.SCR(min_span=8)).sequence
    assert relocated.exact_length <= 41
    longer = np.concatenate([rest, text(5, seed=9)])
    result = engine.edit(relocated, longer, jaxkv.Forget())
    assert result.reuse.matched <= relocated.exact_length
    assert result.reuse.relocated == 0
    assert result.reuse.kind == "exact"
    np.testing.assert_allclose(result.logits, decoder.logits(longer)[-1], atol=ATOL)
