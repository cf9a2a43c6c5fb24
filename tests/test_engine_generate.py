"""Generation: alone or in a batch, greedy or seeded, stopping, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from judge import ATOL
from reference import Decoder

import jaxkv
from jaxkv import SCR, Sampling

Text = Callable[..., np.ndarray]


def test_greedy_generation_is_float64_greedy(engine: jaxkv.Engine, decoder: Decoder, text: Text) -> None:
    source = engine.prefill(text(19)).sequence
    out = engine.generate(source, max_tokens=8, stop=())
    assert out.tokens.tolist() == decoder.greedy(text(19), 8)
    assert out.finish_reason == "length"
    assert out.text is None
    assert out.tokens.dtype == np.int32
    np.testing.assert_array_equal(out.sequence.tokens, [*text(19), *out.tokens])
    assert out.sequence.exact
    exact = decoder.logits(out.sequence.tokens)[-1]
    np.testing.assert_allclose(out.sequence.logits, exact, atol=ATOL)
    # What was generated is published, all of it, and is exact.
    hit = engine.prefill(np.concatenate([out.sequence.tokens, [1]]))
    assert hit.reuse.matched == 27
    np.testing.assert_allclose(hit.logits, decoder.logits(hit.sequence.tokens)[-1], atol=ATOL)


def test_generation_in_pieces_is_generation_at_once(engine: jaxkv.Engine, text: Text) -> None:
    source = engine.prefill(text(19)).sequence
    whole = engine.generate(source, max_tokens=40, stop=()).tokens
    sequence, parts = source, []
    for n in (8, 8, 7, 8, 8, 1):
        out = engine.generate(sequence, max_tokens=n, stop=())
        sequence = out.sequence
        parts.append(out.tokens)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_stop_token_is_neither_returned_nor_written(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    source = engine.prefill(text(19)).sequence
    expected = decoder.greedy(text(19), 8)
    for at in (0, 3, 7):
        before = engine.stats()["pages_free"]
        count = expected.index(expected[at])
        out = engine.generate(source, max_tokens=8, stop=(expected[at], 200))
        assert out.tokens.tolist() == expected[:count]
        assert out.finish_reason == "stop"
        assert len(out.sequence) == 19 + count
        np.testing.assert_allclose(out.sequence.logits, decoder.logits(out.sequence.tokens)[-1], atol=ATOL)
        assert engine.read_kv(out.sequence).positions.tolist() == list(range(19 + count))
        # Pages that were reserved and not needed went back.
        assert before - engine.stats()["pages_free"] <= 1 + count // 8
        grown = engine.extend(out.sequence, [5])
        np.testing.assert_allclose(grown.logits, decoder.logits(grown.sequence.tokens)[-1], atol=ATOL)
        engine.release(out.sequence)
        engine.check()


def test_a_batch_equals_its_rows_alone(engine: jaxkv.Engine, decoder: Decoder, text: Text) -> None:
    """Different lengths, one moved view, one row twice, siblings of one page: 3 rows in a batch of 4."""
    old = text(100)
    first = engine.prefill(old).sequence
    edited = engine.edit(first, old[9:], SCR(min_span=8, tail=4)).sequence
    short = engine.prefill(text(5, seed=1)).sequence
    rows = [edited, short, short]
    samplings = [
        Sampling(),
        Sampling(temperature=0.8, seed=3),
        Sampling(temperature=1.2, top_k=20, top_p=0.9, seed=4),
    ]
    together = engine.generate_batch(rows, max_tokens=8, sampling=samplings)
    for sequence, choice, out in zip(rows, samplings, together, strict=True):
        alone = engine.generate_batch([sequence], max_tokens=8, sampling=choice)[0]
        np.testing.assert_array_equal(alone.tokens, out.tokens)
        np.testing.assert_allclose(alone.sequence.logits, out.sequence.logits, atol=2e-5)
        alone_again = engine.generate(
            sequence, max_tokens=8, temperature=choice.temperature, top_k=choice.top_k,
            top_p=choice.top_p, seed=choice.seed, stop=(),
        )  # fmt: skip
        np.testing.assert_array_equal(alone_again.tokens, out.tokens)
    for out in together[1:]:
        exact = decoder.logits(out.sequence.tokens)[-1]
        np.testing.assert_allclose(out.sequence.logits, exact, atol=ATOL)
    assert not together[0].sequence.exact
    assert together[1].tokens.tolist() != together[2].tokens.tolist()


def test_rows_that_end_early_leave_the_others_alone(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    a, b = engine.prefill(text(9)).sequence, engine.prefill(text(14, seed=1)).sequence
    expected = decoder.greedy(text(9), 1)
    out = engine.generate_batch([a, b], max_tokens=40, sampling=[Sampling(stop=(expected[0],)), Sampling()])
    assert (out[0].finish_reason, len(out[0].tokens)) == ("stop", 0)
    assert (out[1].finish_reason, len(out[1].tokens)) == ("length", 40)
    assert out[1].tokens.tolist() == decoder.greedy(text(14, seed=1), 40)


def test_generation_may_fill_the_model_and_no_more(
    engine: jaxkv.Engine, model: jaxkv.Model, text: Text
) -> None:
    limit = model.config.max_positions
    source = engine.prefill(text(limit - 8)).sequence
    out = engine.generate(source, max_tokens=8, stop=())
    assert len(out.sequence) == limit
    with pytest.raises(jaxkv.CapacityError, match=f"{limit + 1} tokens"):
        engine.generate(source, max_tokens=9)
    with pytest.raises(jaxkv.CapacityError, match=f"{limit + 1} tokens"):
        engine.generate(out.sequence, max_tokens=1)
