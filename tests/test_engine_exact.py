"""Exact prefix reuse: warm equals cold, nothing is computed or written twice, nothing foreign is hit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judge import ATOL, Judge
from reference import Decoder
from tiny import CHUNK, PAGE_SIZE
from tolerances import tolerance

import jaxkv
from jaxkv import Cause

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
P = PAGE_SIZE
LENGTHS = [1, 2, P - 1, P, P + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + P, 100]


def same_bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_equals_float64(engine: jaxkv.Engine, decoder: Decoder, text: Text, length: int) -> None:
    """CASE 10."""
    tokens = text(length)
    result = engine.prefill(tokens)
    np.testing.assert_allclose(result.logits, decoder.logits(tokens)[-1], atol=ATOL)
    assert result.reuse.kind == "exact"
    assert (result.reuse.prompt, result.reuse.forwarded) == (length, length)
    assert result.reuse.match_end.cause is Cause.ABSENT
    assert result.sequence.exact
    assert engine.stats()["pages_live"] == -(-length // P)


@pytest.mark.parametrize("shared", LENGTHS)
def test_warm_equals_cold_bit_by_bit_on_the_chunk_grid(make_engine: Engines, text: Text, shared: int) -> None:
    tokens = np.concatenate([text(shared), text(3 * CHUNK + 5 - shared % 7, seed=1)])
    cold = make_engine(reuse_granularity="chunk").prefill(tokens)
    engine = make_engine(reuse_granularity="chunk")
    first = engine.prefill(np.concatenate([text(shared), text(40, seed=2)]))
    warm = engine.prefill(tokens)
    assert warm.reuse.matched == shared // CHUNK * CHUNK
    same_bits(warm.logits, cold.logits)
    again = engine.prefill(tokens)
    assert again.reuse.matched == (len(tokens) - 1) // CHUNK * CHUNK
    same_bits(again.logits, cold.logits)
    # The shared text may also arrive by an exact edit of the first sequence.
    edited = engine.edit(first.sequence, tokens, jaxkv.Exact())
    assert edited.reuse.matched == shared // CHUNK * CHUNK
    same_bits(edited.logits, cold.logits)


def test_warm_equals_cold_after_an_edit_cut_the_published_text_off_the_grid(
    make_engine: Engines, text: Text
) -> None:
    """What an edit publishes must end on the grid: an extra row shifts the blocks that are folded."""
    tokens = np.concatenate([text(5 * CHUNK), text(9, seed=9)])
    cold = make_engine(reuse_granularity="chunk").prefill(tokens)
    engine = make_engine(reuse_granularity="chunk")
    source = engine.prefill(text(5 * CHUNK), reuse=False).sequence
    cut = np.concatenate([text(5 * CHUNK)[:43], text(5 * CHUNK)[60:]])
    engine.edit(source, cut, jaxkv.SCR(min_span=8, tail=4))
    assert engine.stats()["index_tokens"] % CHUNK == 0
    engine.prefill(text(5 * CHUNK))
    warm = engine.prefill(tokens)
    assert warm.reuse.matched == 5 * CHUNK
    same_bits(warm.logits, cold.logits)


@pytest.mark.parametrize("shared", [1, P - 1, P, P + 3, CHUNK, CHUNK + 1, 90])
def test_token_granularity_reuses_every_token(
    engine: jaxkv.Engine, decoder: Decoder, text: Text, shared: int
) -> None:
    first = engine.prefill(np.concatenate([text(shared), [5], text(30, seed=1)]))
    tokens = np.concatenate([text(shared), [6], text(20, seed=2)])
    warm = engine.prefill(tokens)
    assert (warm.reuse.matched, warm.reuse.forwarded) == (shared, 21)
    assert warm.reuse.match_end == jaxkv.MatchEnd(Cause.TOKENS, shared)
    np.testing.assert_allclose(warm.logits, decoder.logits(tokens)[-1], atol=ATOL)
    # The owner goes on as if nobody shared its pages.
    more = engine.extend(first.sequence, text(9, seed=3))
    np.testing.assert_allclose(more.logits, decoder.logits(more.sequence.tokens)[-1], atol=ATOL)


def test_a_full_hit_computes_one_token_and_writes_none(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """CASE 9, for whole and partial last pages."""
    for length in (1, 5, P, 3 * P, 45):
        first = engine.prefill(text(length, seed=length))
        kv, before = engine.read_kv(first.sequence), engine.stats()
        again = engine.prefill(text(length, seed=length))
        assert (again.reuse.matched, again.reuse.forwarded) == (length - 1, 1)
        assert again.reuse.match_end.cause is Cause.COMPLETE
        for name in ("pages_live", "pages_free", "pages_cached", "index_tokens", "index_nodes"):
            assert engine.stats()[name] == before[name]
        np.testing.assert_array_equal(again.sequence.segments, first.sequence.segments)
        same_bits(engine.read_kv(again.sequence).keys, kv.keys)
        np.testing.assert_allclose(again.logits, first.logits, atol=ATOL)
        more = engine.extend(again.sequence, text(3, seed=99))
        np.testing.assert_allclose(more.logits, decoder.logits(more.sequence.tokens)[-1], atol=ATOL)


def test_the_last_page_fills_exactly_and_then_one_more(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """CASE 11."""
    sequence = engine.prefill(text(P - 1)).sequence
    for n in range(P, P + 3):
        result = engine.extend(sequence, text(1, seed=n))
        sequence = result.sequence
        np.testing.assert_allclose(result.logits, decoder.logits(sequence.tokens)[-1], atol=ATOL)
        assert len(sequence.segments) == -(-n // P)


def test_growing_token_by_token_keeps_one_row_a_page(engine: jaxkv.Engine, text: Text) -> None:
    sequence = engine.prefill(text(3)).sequence
    for i in range(30):
        sequence = engine.extend(sequence, text(1, seed=i)).sequence
    assert len(sequence.segments) == -(-33 // P)
    assert engine.stats()["pages_live"] == -(-33 // P)


def test_siblings_of_a_partial_page_never_see_each_other(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """CASE 33: fork, prefix hit, extend and generate from one half-full page."""
    root = engine.prefill(text(P + 3))
    children = [engine.fork(root.sequence) for _ in range(3)]
    grown = [engine.extend(c, text(7, seed=i)).sequence for i, c in enumerate(children)]
    grown.append(engine.prefill(np.concatenate([text(P + 3), text(7, seed=7)])).sequence)
    grown.append(engine.generate(root.sequence, max_tokens=8, stop=()).sequence)
    bits = [engine.read_kv(s).keys for s in grown]
    twice = [engine.extend(s, text(5, seed=50 + i)) for i, s in enumerate(grown)]
    for sequence, kv, result in zip(grown, bits, twice, strict=True):
        same_bits(engine.read_kv(sequence).keys, kv)
        exact = decoder.logits(result.sequence.tokens)[-1]
        np.testing.assert_allclose(result.logits, exact, atol=ATOL)
    for child in children:
        engine.release(child)
    np.testing.assert_allclose(
        engine.extend(root.sequence, [1]).logits,
        decoder.logits([*text(P + 3), 1])[-1],
        atol=ATOL,
    )


def test_extend_generate_score_and_fork_leave_their_source(engine: jaxkv.Engine, text: Text) -> None:
    source = engine.prefill(text(21)).sequence
    kv = engine.read_kv(source)
    tokens, segments = source.tokens.copy(), source.segments.copy()
    scored = engine.score(source, text(5, seed=1))
    engine.extend(source, text(5, seed=1))
    engine.generate(source, max_tokens=8)
    engine.attention_outputs(source, text(5, seed=2))
    engine.edit(source, text(21)[4:], jaxkv.SCR(min_span=8, tail=2))
    engine.release(engine.fork(source))
    np.testing.assert_array_equal(source.tokens, tokens)
    np.testing.assert_array_equal(source.segments, segments)
    same_bits(engine.read_kv(source).keys, kv.keys)
    same_bits(engine.read_kv(source).values, kv.values)
    # Its last page was taken meanwhile, so new slots and rounding may differ, nothing else.
    np.testing.assert_allclose(engine.score(source, text(5, seed=1)), scored, atol=1e-5)
    for array in (source.tokens, source.segments):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_score_equals_float64_and_publishes_nothing(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    tokens, continuation = text(27), text(40, seed=1)
    source = engine.prefill(tokens).sequence
    before = engine.stats()
    logits = engine.score(source, continuation)
    exact = decoder.logits([*tokens, *continuation])[26:-1]
    np.testing.assert_allclose(logits, exact, atol=ATOL)
    assert logits.dtype == np.float32
    after = engine.stats()
    for name in ("pages_live", "pages_free", "index_tokens", "sequences"):
        assert after[name] == before[name]
    assert engine.prefill(np.concatenate([tokens, continuation])).reuse.matched == 27
    np.testing.assert_array_equal(engine.score(source, continuation[:1]), logits[:1])


def test_attention_outputs_have_their_shape_and_are_the_models(
    engine: jaxkv.Engine, model: jaxkv.Model, text: Text
) -> None:
    config = model.config
    source = engine.prefill(text(12)).sequence
    out = engine.attention_outputs(source, text(3, seed=1))
    assert out.shape == (config.num_layers, 3, config.num_heads * config.head_dim)
    whole = engine.prefill(np.concatenate([text(12), text(1, seed=1)])).sequence
    rest = engine.attention_outputs(whole, text(3, seed=1)[1:])
    np.testing.assert_allclose(out[:, 1:], rest, atol=1e-5)


def test_read_kv_is_the_content_in_float64(engine: jaxkv.Engine, decoder: Decoder, text: Text) -> None:
    import reference

    tokens = text(37)
    kv = engine.read_kv(engine.prefill(tokens).sequence)
    cached = Judge(decoder).prefill(tokens).cached
    np.testing.assert_array_equal(kv.positions, np.arange(37))
    for layer in range(2):
        plain = reference.turn(cached.keys[layer], -cached.birth, decoder.config.rope)
        np.testing.assert_allclose(kv.keys[layer], plain, atol=tolerance("readback"))
        np.testing.assert_allclose(kv.values[layer], cached.values[layer], atol=tolerance("readback"))


def test_any_integer_container_is_the_same_prompt(engine: jaxkv.Engine, text: Text) -> None:
    import jax.numpy as jnp

    tokens = text(20)
    engine.prefill(tokens)
    for other in (
        tokens.astype(np.int64), tokens.astype(np.uint8), tokens.tolist(), tuple(tokens.tolist()),
        jnp.asarray(tokens), tokens[::-1][::-1],
    ):  # fmt: skip
        result = engine.prefill(other)
        assert result.reuse.matched == 19
        assert result.sequence.tokens.dtype == np.int32
    mutable = tokens.copy()
    sequence = engine.prefill(mutable).sequence
    mutable[:] = 0
    np.testing.assert_array_equal(sequence.tokens, tokens)


def test_reuse_can_be_switched_off(make_engine: Engines, text: Text) -> None:
    engine = make_engine()
    fresh = engine.prefill(text(20), reuse=False)
    assert fresh.reuse.match_end.cause is Cause.DISABLED
    assert engine.stats()["index_tokens"] == 0
    engine.prefill(text(20))
    assert engine.prefill(text(20), reuse=False).reuse.matched == 0
    off = make_engine(prefix_cache=False)
    off.prefill(text(20))
    assert off.prefill(text(20)).reuse.matched == 0


def test_a_hit_is_recorded_in_the_ledger(engine: jaxkv.Engine, text: Text) -> None:
    engine.prefill(text(40))
    result = engine.prefill(np.concatenate([text(30), text(10, seed=1)]))
    ledger = result.reuse.ledger
    assert (ledger.prompt, ledger.matched, ledger.forwarded) == (40, 30, 10)
    assert ledger.forwarded_by_cause == {"inserted": 10}
    assert set(result.reuse.timings) == {"plan", "relocate", "forward"}


def test_domains_share_nothing_and_show_nothing(make_engine: Engines, text: Text) -> None:
    """CASE 5, paired: the same tenant does hit, so a disabled cache cannot pass."""
    engine, alone = make_engine(), make_engine()
    engine.prefill(text(40), domain="A")
    other, lonely = engine.prefill(text(40), domain="B"), alone.prefill(text(40), domain="B")
    assert other.reuse.matched == 0
    assert other.reuse.match_end == lonely.reuse.match_end
    assert other.reuse.ledger == lonely.reuse.ledger
    assert engine.prefill(text(40), domain="A").reuse.matched == 39
    assert engine.prefill(text(40), domain="B").reuse.matched == 39
    assert engine.prefill(text(40), domain="A" * 2).reuse.matched == 0
    # What grows from a domain's sequence stays in its domain.
    grown = engine.extend(other.sequence, text(5, seed=1))
    assert engine.prefill(grown.sequence.tokens, domain="A").reuse.matched == 40
    assert engine.prefill(grown.sequence.tokens, domain="B").reuse.matched == 44


def test_new_weights_make_old_pages_unreachable_at_once(
    make_engine: Engines, model: jaxkv.Model, text: Text
) -> None:
    """CASE 7."""
    from reference import decoder_of
    from tiny import sharp_params

    engine = make_engine()
    old = engine.prefill(text(40)).sequence
    params = sharp_params(model.config, seed=9)
    engine.replace_params(params, jaxkv.params_digest(params))
    fresh = engine.prefill(text(40))
    assert fresh.reuse.matched == 0
    exact = decoder_of(params, model.config).logits(text(40))[-1]
    np.testing.assert_allclose(fresh.logits, exact, atol=ATOL)
    for use in (
        lambda: engine.extend(old, [1]),
        lambda: engine.edit(old, text(40), jaxkv.Exact()),
        lambda: engine.generate(old, max_tokens=8),
        lambda: engine.score(old, [1, 2]),
        lambda: engine.fork(old),
    ):
        with pytest.raises(jaxkv.ContractError, match="weights_digest"):
            use()
    engine.release(old)
    assert engine.prefill(text(40)).reuse.matched == 39


def test_bfloat16_pages_stay_near_float64_and_reuse_bitwise(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    def make() -> jaxkv.Engine:
        return make_engine(kv_dtype="bfloat16", reuse_granularity="chunk")

    tokens = text(3 * CHUNK + 1)
    cold, engine = make().prefill(tokens), make()
    engine.prefill(tokens[: 2 * CHUNK])
    warm = engine.prefill(tokens)
    assert warm.reuse.matched == 2 * CHUNK
    same_bits(warm.logits, cold.logits)
    exact = decoder.logits(tokens)[-1]
    assert 1e-4 < np.abs(np.asarray(cold.logits) - exact).max() < tolerance("logits_pages", "bfloat16")
