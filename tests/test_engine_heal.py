"""Healing: left to right, never published before it is exact, and at the end equal to a fresh prefill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from judge import origins
from reference import Decoder
from tolerances import tolerance

import jaxkv
from jaxkv import SCR, Drop, FirstK, NoRotation

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
POLICIES = {
    "view": SCR(min_span=8, tail=4),
    "copy": SCR(form="copy", min_span=8, tail=4),
    "repaired": SCR(min_span=8, tail=4) | FirstK(6),
    "no_rotation": NoRotation(min_span=8, tail=4),
    "drop": Drop(),
}


def edited(engine: jaxkv.Engine, text: Text, policy: jaxkv.Policy) -> tuple[jaxkv.Sequence, np.ndarray]:
    old = text(180)
    new = np.concatenate([old[:50], text(7, seed=1), old[70:]]).astype(np.int32)
    return engine.edit(engine.prefill(old).sequence, new, policy).sequence, new


@pytest.mark.parametrize("name", list(POLICIES))
def test_healing_ends_at_a_fresh_prefill_and_every_step_is_exact_so_far(
    engine: jaxkv.Engine, decoder: Decoder, text: Text, name: str
) -> None:
    sequence, new = edited(engine, text, POLICIES[name])
    fresh = engine.read_kv(engine.prefill(new, reuse=False).sequence)
    before = engine.read_kv(sequence)
    while not sequence.exact:
        length = sequence.exact_length
        result = engine.heal(sequence, tokens=25)
        healed = result.sequence
        end = min(length + 25, len(new))
        assert healed.exact_length == end, "what is next is healed, and no more"
        assert origins(healed)[end:] == origins(sequence)[end:], "what is behind is kept"
        np.testing.assert_array_equal(healed.tokens, new)
        reuse = result.reuse
        assert reuse.ledger.forwarded_by_cause == {"healed": end - length}
        assert reuse.matched + reuse.relocated + reuse.forwarded + reuse.dropped == len(new)
        assert reuse.kind == ("exact" if end == len(new) else "approximate")
        state = engine.read_kv(healed)
        np.testing.assert_allclose(state.keys[:, :end], fresh.keys[:, :end], atol=tolerance("readback"))
        hit = engine.prefill(np.append(new, 3)[: end + 1])
        assert hit.reuse.matched == end, "what is exact is shared at once"
        sequence = healed
    exact = decoder.logits(new)[-1]
    np.testing.assert_allclose(sequence.logits, exact, atol=tolerance("healed"))
    assert sequence.influences == ()
    assert sequence.rotate
    assert (before.positions[:50] == np.arange(50)).all()
    again = engine.heal(sequence, tokens=9)
    assert again.reuse.forwarded == 0
    assert again.reuse.kind == "exact"
    np.testing.assert_array_equal(again.logits, sequence.logits)


@pytest.mark.parametrize("tokens", [1, 32, 200])
def test_on_the_chunk_grid_a_healed_sequence_has_the_bits_of_a_cold_one(
    make_engine: Engines, text: Text, tokens: int
) -> None:
    engine = make_engine(reuse_granularity="chunk")
    sequence, new = edited(engine, text, POLICIES["view"])
    while not sequence.exact:
        sequence = engine.heal(sequence, tokens=tokens).sequence
    cold = make_engine(reuse_granularity="chunk").prefill(new)
    np.testing.assert_array_equal(sequence.logits, cold.logits)
    mine, theirs = engine.read_kv(sequence), engine.prefill(new, reuse=False)
    theirs = engine.read_kv(theirs.sequence)
    np.testing.assert_array_equal(mine.keys, theirs.keys)
    np.testing.assert_array_equal(mine.values, theirs.values)
    hit = engine.prefill(new)
    assert hit.reuse.matched == len(new) // 32 * 32
    np.testing.assert_array_equal(hit.logits, cold.logits)


def test_nothing_approximate_is_published_while_healing(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    sequence, new = edited(engine, text, POLICIES["view"])
    for _ in range(4):
        hit = engine.prefill(new)
        assert hit.reuse.matched <= sequence.exact_length
        np.testing.assert_allclose(hit.logits, decoder.logits(new)[-1], atol=tolerance("logits"))
        engine = _fresh(engine)
        sequence, new = edited(engine, text, POLICIES["view"])
        sequence = engine.heal(sequence, tokens=20).sequence


def _fresh(engine: jaxkv.Engine) -> jaxkv.Engine:
    return jaxkv.Engine(engine.model, num_pages=64, page_size=8, chunk_size=32, poison_free_pages=True)


def test_the_next_token_knows_of_each_repair(engine: jaxkv.Engine, decoder: Decoder, text: Text) -> None:
    """Half healed, the last logits are those of the last token over what is healed by then."""
    sequence, new = edited(engine, text, POLICIES["view"])
    exact = decoder.logits(new)[-1]
    errors = [np.abs(np.asarray(sequence.logits) - exact).max()]
    for _ in range(3):
        sequence = engine.heal(sequence, tokens=35).sequence
        scored = engine.score(sequence, np.array([5, 6]))
        np.testing.assert_array_equal(scored[0], np.asarray(sequence.logits))
        errors.append(np.abs(np.asarray(sequence.logits) - exact).max())
    assert errors[-1] < errors[0]
    assert len(set(errors)) == len(errors)


def test_healing_refuses_what_it_cannot_do(engine: jaxkv.Engine, text: Text) -> None:
    sequence, _ = edited(engine, text, POLICIES["view"])
    with pytest.raises(jaxkv.ConfigError, match="tokens is 0, expected a whole number of at least 1"):
        engine.heal(sequence, tokens=0)
    engine.release(sequence)
    with pytest.raises(jaxkv.HandleError):
        engine.heal(sequence, tokens=5)


def test_a_displaced_sequence_differs_by_rotation_alone(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """CASE 17: there and back is one rounding of each key; values and the rest keep their bits."""
    tokens = text(150)
    exact = engine.prefill(tokens)
    spans = (jaxkv.Span(70, 20, 40), jaxkv.Span(10, 75, 50))
    moved = engine.displace(exact.sequence, spans)
    a, b = engine.read_kv(exact.sequence), engine.read_kv(moved)
    np.testing.assert_array_equal(a.values, b.values)
    np.testing.assert_allclose(a.keys, b.keys, atol=tolerance("readback"))
    rotated = np.zeros(150, bool)
    rotated[20:60] = rotated[75:125] = True
    np.testing.assert_array_equal(a.keys[:, ~rotated], b.keys[:, ~rotated])
    assert not np.array_equal(a.keys[:, rotated], b.keys[:, rotated])
    continuation = text(5, seed=3)
    expected = decoder.logits(np.concatenate([tokens, continuation]))[149:-1]
    np.testing.assert_allclose(engine.score(moved, continuation), expected, atol=tolerance("logits"))
    assert moved.exact_length == 20
    assert not moved.exact
    assert [(r.start, r.end, r.delta) for r in moved.provenance if r.origin == "relocated"] == [
        (20, 60, -50),
        (75, 125, 65),
    ]
