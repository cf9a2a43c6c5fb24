"""int8 and float8 pages under local layers with few pages, and beside recurrent layers: against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
from judge import Judge
from recurrent_reference import hybrid_run
from reference import Decoder, decoder_of
from test_bounded_attention import LOCAL_PAGES, MIXED, WINDOW, follow
from test_hybrid_edit import CUT, GAP, KEPT, LENGTH, PREFIX, moved, scr, tails
from tiny import NUM_PAGES, PAGE_SIZE, make_model, tiny_config
from tiny_hybrid import CHUNK, hybrid_model
from tolerances import tolerance

import jaxkv
from jaxkv import SCR

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
STORE = {"int8": reference.stored_int8, "float8_e4m3fn": reference.stored_float8}
WITHOUT = {"int8": tolerance("logits_int8"), "float8_e4m3fn": tolerance("logits_fp8")}
ATOL = tolerance("logits_stored")
quantized = pytest.mark.parametrize("dtype", list(STORE))


@pytest.fixture(scope="module")
def local() -> tuple[jaxkv.Model, Decoder]:
    model = make_model(tiny_config(**MIXED))
    return model, decoder_of(model.params, model.config)


@pytest.fixture(scope="module")
def hybrid() -> jaxkv.Model:
    return hybrid_model()


def held_bits(engine: jaxkv.Engine, group: int = 0) -> list[bytes]:
    """Numbers and scales of all pages of a group."""
    pages = engine._memory.pages[group]
    assert pages.scale is not None
    return [np.asarray(array).tobytes() for array in (pages.kv, pages.scale)]


@quantized
def test_local_layers_with_few_pages(
    make_engine: Engines, local: tuple[jaxkv.Model, Decoder], text: Text, dtype: str
) -> None:
    """Pages that windows left are freed and written again, scales with them; free ones are NaN."""
    model, plain = local
    judge = Judge(dataclasses.replace(plain, store=STORE[dtype]))
    engine = make_engine(model=model, chunk_size=16, local_pages=LOCAL_PAGES, kv_dtype=dtype)
    old = text(160)
    first, state = engine.prefill(old), judge.prefill(old)
    np.testing.assert_allclose(first.logits, state.logits, atol=ATOL, rtol=0)
    exact = plain.logits(old)[-1]
    assert ATOL < np.abs(np.asarray(first.logits) - exact).max() <= WITHOUT[dtype]
    if dtype == "int8":  # a loop to compile; what it does to pages is the same for both
        generated = engine.generate(first.sequence, max_tokens=WINDOW + 3, stop=())
        assert generated.tokens.tolist() == judge.greedy(state, WINDOW + 3)
        engine.release(generated.sequence)
    new = np.concatenate([old[:60], old[70:]])
    edited = engine.edit(first.sequence, new, SCR(min_span=8, tail=4))
    assert edited.reuse.ledger.forwarded_by_cause["resumed"] == 60
    assert edited.reuse.relocated >= 80
    np.testing.assert_allclose(edited.logits, follow(judge, old, new, edited), atol=ATOL, rtol=0)
    stats = engine.stats()
    assert stats["local_pages_evicted"] > 10
    # Two heads of 16 + 16 numbers of one byte and two scales, for each slot that is not there.
    assert stats["local_bytes_saved"] == (NUM_PAGES - LOCAL_PAGES) * PAGE_SIZE * 2 * (32 + 8)


def test_bounded_and_unbounded_agree_bit_for_bit(
    make_engine: Engines, local: tuple[jaxkv.Model, Decoder], text: Text
) -> None:
    results = []
    for few in (None, LOCAL_PAGES):
        options = {"chunk_size": 16, "local_pages": few, "reuse_granularity": "chunk"}
        engine = make_engine(model=local[0], kv_dtype="int8", **options)
        engine.prefill(text(150))
        warm = engine.prefill(np.concatenate([text(150), text(30, seed=1)]))
        assert warm.reuse.matched == 144
        results.append(np.asarray(warm.logits))
    np.testing.assert_array_equal(*results)


@pytest.mark.slow
def test_every_layer_of_a_model_of_local_ones_is_quantized(make_engine: Engines, text: Text) -> None:
    """One group; in view form and in copy form, which takes keys as born and rounds them once."""
    model = make_model(tiny_config(layer_types=("local", "local"), window=13))
    judge = Judge(dataclasses.replace(decoder_of(model.params, model.config), store=STORE["int8"]))
    engine, old = make_engine(model=model, chunk_size=16, kv_dtype="int8"), text(100)
    first, state = engine.prefill(old), judge.prefill(old)
    new = np.concatenate([old[:40], old[53:]])
    before = held_bits(engine)
    view = engine.edit(first.sequence, new, SCR(min_span=8, tail=0))
    np.testing.assert_allclose(view.logits, judge.edit(state, view).logits, atol=ATOL, rtol=0)
    copy = engine.edit(first.sequence, new, SCR(min_span=8, tail=0, form="copy"))
    np.testing.assert_allclose(copy.logits, view.logits, atol=WITHOUT["int8"], rtol=0)
    assert held_bits(engine) != before
    kv, there = engine.read_kv(first.sequence), engine.read_kv(copy.sequence)
    np.testing.assert_array_equal(there.values[:, 40:86], kv.values[:, 53:99])
    bound = 2 * tolerance("stored_int8") * np.abs(kv.keys).max(-1)[:, 53:99].max()
    assert np.abs(there.keys[:, 40:86] - kv.keys[:, 53:99]).max() <= bound


@quantized
def test_hybrids_prefill_resume_and_generate(
    make_engine: Engines, hybrid: jaxkv.Model, text: Text, dtype: str
) -> None:
    """Keys and values are rounded, states are not: float64 with the one and without the other."""
    engine = make_hybrid(make_engine, hybrid, dtype)
    tokens = text(75)
    given = (hybrid.params, hybrid.config)
    expected, _, _ = hybrid_run(*given, tokens, np.arange(75), store=STORE[dtype])
    exact, _, _ = hybrid_run(*given, tokens, np.arange(75))
    result, at = engine.prefill(tokens[:1]), 1
    for count in (7, 1, 20, 33):
        result = engine.extend(result.sequence, tokens[at : at + count])
        at += count
        np.testing.assert_allclose(result.logits, expected[at - 1], atol=ATOL, rtol=0)
    away = np.abs(np.asarray(result.logits) - exact[at - 1]).max()
    assert tolerance("logits") < away <= WITHOUT[dtype]
    other = engine.prefill(tokens)  # resumed at a snapshot, tokens up to the match replayed over stored KV
    assert other.reuse.matched > 0
    np.testing.assert_allclose(other.logits, expected[-1], atol=ATOL, rtol=0)
    if dtype != "int8":
        return
    drawn = engine.generate(other.sequence, max_tokens=12, stop=()).tokens
    whole = np.concatenate([tokens, drawn])
    greedy, _, _ = hybrid_run(*given, whole, np.arange(len(whole)), store=STORE[dtype])
    np.testing.assert_array_equal(drawn, greedy.argmax(-1)[74:-1])


@quantized
@pytest.mark.parametrize("states", ["fork", "replay"])
def test_hybrids_edit_without_rounding_a_key_again(
    make_engine: Engines, hybrid: jaxkv.Model, text: Text, dtype: str, states: str
) -> None:
    engine, old = make_hybrid(make_engine, hybrid, dtype), text(LENGTH)
    new, store = np.delete(old, slice(CUT, CUT + GAP)), STORE[dtype]
    source = engine.prefill(old).sequence
    kv = engine.read_kv(source)
    result = engine.edit(source, new, scr(states))
    given = (hybrid.params, hybrid.config)
    _, cached, stale = hybrid_run(*given, old, np.arange(LENGTH), store=store)
    spans, forward = (PREFIX, KEPT), tails()
    if states == "fork":
        args: Any = (new[forward], forward, moved(cached, spans, forward), stale)
    else:
        _, _, start = hybrid_run(*given, new[:CUT], np.arange(CUT), store=store)
        at = np.arange(CUT, len(new))
        args = (new[at], at, moved(cached, spans, forward), start, np.isin(at, forward))
    logits, _, _ = hybrid_run(*given, *args, store=store)
    np.testing.assert_allclose(result.logits, logits[-1], atol=ATOL, rtol=0)
    after = engine.read_kv(result.sequence)
    kept = slice(CUT, LENGTH - GAP - len(forward))
    np.testing.assert_array_equal(after.keys[:, kept], kv.keys[:, CUT + GAP : LENGTH - len(forward)])
    np.testing.assert_array_equal(after.values[:, kept], kv.values[:, CUT + GAP : LENGTH - len(forward)])


def make_hybrid(make_engine: Engines, hybrid: jaxkv.Model, dtype: str) -> jaxkv.Engine:
    return make_engine(model=hybrid, chunk_size=CHUNK, num_states=16, snapshot_every=32, kv_dtype=dtype)


def test_bytes_of_a_hybrid_are_those_of_its_pages_and_states(
    make_engine: Engines, hybrid: jaxkv.Model
) -> None:
    stats = make_hybrid(make_engine, hybrid, "int8").stats()
    assert stats["page_bytes"] == PAGE_SIZE * 2 * (32 + 8), "one layer attends"
    assert stats["state_bytes"] == hybrid.config.state_bytes(4), "states stay float32"
