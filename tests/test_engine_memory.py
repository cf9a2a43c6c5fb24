"""Who holds which page: release, garbage collection, eviction, pinning, and steps that fail."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judge import ATOL
from reference import Decoder
from tiny import NUM_PAGES, PAGE_SIZE

import jaxkv
from jaxkv import execute, generation

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]


def test_release_gives_back_exactly_its_own_pages(engine: jaxkv.Engine, text: Text) -> None:
    """CASES 29, 34."""
    a = engine.prefill(text(50), reuse=False).sequence
    b = engine.prefill(text(30, seed=1), reuse=False).sequence
    forked = engine.fork(a)
    kv = engine.read_kv(b)
    assert engine.stats()["pages_live"] == 7 + 4
    engine.release(a)
    assert engine.stats()["pages_live"] == 7 + 4
    engine.release(forked)
    assert engine.stats()["pages_live"] == 4
    np.testing.assert_array_equal(engine.read_kv(b).keys, kv.keys)
    with pytest.raises(jaxkv.HandleError, match="released"):
        engine.release(a)
    engine.release(b)
    assert engine.stats()["pages_free"] == NUM_PAGES
    assert np.isnan(np.asarray(engine._memory.pages[0].kv)).all(), "free pages are poisoned"


def test_sequences_that_are_garbage_collected_are_released(engine: jaxkv.Engine, text: Text) -> None:
    result = engine.prefill(text(50), reuse=False)
    engine.fork(result.sequence)
    generated = engine.generate(result.sequence, max_tokens=8)
    edited = engine.edit(result.sequence, text(50)[3:], jaxkv.SCR(form="copy", min_span=8))
    engine.check()
    del generated, edited
    gc.collect()
    assert engine.stats()["sequences"] == 1
    index_pages = engine.stats()["pages_cached"]
    assert engine.stats()["pages_live"] <= 7 + index_pages
    engine.check()
    del result
    gc.collect()
    assert engine.stats()["sequences"] == 0
    assert engine.stats()["pages_live"] == engine.stats()["pages_cached"]
    # Releasing by hand and then collecting is not a double free.
    engine.release(engine.prefill(text(9, seed=1), reuse=False).sequence)
    gc.collect()
    engine.check()


def test_released_prompts_stay_cached_until_room_is_needed(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """CASE 31 and least recently used first."""
    for seed in (1, 2, 3):
        engine.release(engine.prefill(text(20 * PAGE_SIZE, seed=seed)).sequence)
    assert engine.stats()["pages_cached"] == 60
    engine.release(engine.prefill(text(20 * PAGE_SIZE, seed=1)).sequence)  # used last
    fresh = engine.prefill(text(24 * PAGE_SIZE, seed=4))
    exact = decoder.logits(text(24 * PAGE_SIZE, seed=4))[-1]
    np.testing.assert_allclose(fresh.logits, exact, atol=ATOL)
    engine.check()
    matched = {s: engine.prefill(text(20 * PAGE_SIZE, seed=s)[:100]).reuse.matched for s in (1, 3)}
    assert matched[1] == 99
    assert matched[3] == 99


def test_a_match_is_pinned_while_its_prompt_evicts_others(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    """CASE 31: the hit is the oldest entry, and the rest of the prompt needs every other page."""
    engine.release(engine.prefill(text(10 * PAGE_SIZE, seed=1)).sequence)
    for seed in range(2, 7):
        engine.release(engine.prefill(text(10 * PAGE_SIZE, seed=seed)).sequence)
    tokens = np.concatenate([text(10 * PAGE_SIZE, seed=1), text(50 * PAGE_SIZE, seed=9)])
    result = engine.prefill(tokens)
    assert result.reuse.matched == 10 * PAGE_SIZE
    np.testing.assert_allclose(result.logits, decoder.logits(tokens)[-1], atol=ATOL)
    engine.check()


def test_the_same_prompt_published_twice_is_kept_once(engine: jaxkv.Engine, text: Text) -> None:
    """CASE 32."""
    a = engine.prefill(text(45), reuse=False).sequence
    b = engine.prefill(text(45), reuse=False).sequence
    for sequence in (a, b):
        grown = engine.extend(sequence, [3]).sequence
        engine.release(sequence)
        engine.release(grown)
    assert engine.stats()["index_tokens"] == 46
    assert engine.stats()["pages_live"] == engine.stats()["pages_cached"] == 6


# ---- steps that fail -----------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


def fail_before(*_: Any, **__: Any) -> Any:
    raise Boom("before the step")


def failing_after(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        step(*args, **kwargs)
        raise Boom("after the step took the pages")

    return run


CALLS: dict[str, tuple[Any, str, Callable[[jaxkv.Engine, Any, np.ndarray], Any]]] = {
    "prefill": (execute, "run_step", lambda e, _, t: e.prefill(np.concatenate([t[:20], t[:9]]))),
    "extend": (execute, "run_step", lambda e, s, t: e.extend(s, t[:9])),
    "edit": (execute, "run_step", lambda e, s, t: e.edit(s, t[5:], jaxkv.SCR(min_span=8))),
    "copy": (
        execute,
        "relocate",
        lambda e, s, t: e.edit(s, t[5:], jaxkv.SCR(min_span=8, form="copy")),
    ),
    "computing behind a copy": (
        execute,
        "run_step",
        lambda e, s, t: e.edit(s, t[5:], jaxkv.SCR(min_span=8, form="copy")),
    ),
    "score": (execute, "run_step", lambda e, s, t: e.score(s, t[:9])),
    "generate": (generation, "decode_many", lambda e, s, _: e.generate(s, max_tokens=8)),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_step_that_fails_before_it_takes_the_pages_publishes_and_leaks_nothing(
    engine: jaxkv.Engine, decoder: Decoder, text: Text, monkeypatch: Any, name: str
) -> None:
    """CASE 30."""
    module, attribute, call = CALLS[name]
    source = engine.prefill(text(50)).sequence
    before = engine.stats()
    with monkeypatch.context() as patch:
        patch.setattr(module, attribute, fail_before)
        with pytest.raises(Boom):
            call(engine, source, text(50))
    gc.collect()
    engine.check()
    after = engine.stats()
    for key in ("pages_free", "pages_live", "pages_cached", "index_tokens", "sequences"):
        assert after[key] == before[key], key
    # And it goes on: the same call succeeds, the source is what it was.
    call(engine, source, text(50))
    exact = decoder.logits([*text(50), 4])[-1]
    np.testing.assert_allclose(engine.extend(source, [4]).logits, exact, atol=ATOL)


@pytest.mark.parametrize("name", list(CALLS))
def test_a_step_that_fails_after_it_took_the_pages_says_that_all_is_lost(
    engine: jaxkv.Engine, decoder: Decoder, text: Text, monkeypatch: Any, name: str
) -> None:
    """CASE 30: sequences are refused afterwards, the engine is empty and works."""
    module, attribute, call = CALLS[name]
    source = engine.prefill(text(50)).sequence
    other = engine.prefill(text(9, seed=1)).sequence
    with monkeypatch.context() as patch:
        patch.setattr(module, attribute, failing_after(getattr(module, attribute)))
        with pytest.raises(jaxkv.HandleError, match="after its pages were donated") as caught:
            call(engine, source, text(50))
    assert isinstance(caught.value.__cause__, Boom)
    assert "\n" not in str(caught.value)
    engine.check()
    stats = engine.stats()
    assert (stats["pages_free"], stats["sequences"], stats["index_tokens"]) == (NUM_PAGES, 0, 0)
    for sequence in (source, other):
        with pytest.raises(jaxkv.HandleError, match="released"):
            engine.extend(sequence, [1])
    again = engine.prefill(text(50))
    assert again.reuse.matched == 0
    np.testing.assert_allclose(again.logits, decoder.logits(text(50))[-1], atol=ATOL)
    del source, other, caught
    gc.collect()  # sequences of the lost memory must not release pages of the new one
    engine.check()
    assert engine.stats()["sequences"] == 1


def test_a_batch_that_fails_half_way_through_placement_leaks_nothing(
    engine: jaxkv.Engine, text: Text
) -> None:
    rows = [engine.prefill(text(100, seed=s), reuse=False).sequence for s in (1, 2, 3)]
    before = engine.stats()
    with pytest.raises(jaxkv.CapacityError):
        engine.generate_batch(rows, max_tokens=80)
    engine.check()
    assert engine.stats() == before


def test_a_turn_publishes_what_is_new_and_reads_nothing_else(
    make_engine: Engines, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, extend, generate, fork, edit and heal know what the index has of their text already."""
    read: list[int] = []
    publish = jaxkv.PrefixIndex.publish

    def counted(self: Any, root: bytes, tokens: Any, segments: Any, **options: Any) -> Any:
        since = options["since"]
        read.append(len(tokens) - (since.position if since else 0))
        return publish(self, root, tokens, segments, **options)

    monkeypatch.setattr(jaxkv.PrefixIndex, "publish", counted)
    engine, tokens = make_engine(), text(200)
    first = engine.prefill(tokens[:100]).sequence
    longer = engine.extend(engine.fork(first), tokens[100:120]).sequence
    told = engine.generate(longer, max_tokens=7, stop=()).sequence
    again = engine.prefill(np.append(told.tokens, 5)).sequence
    new = np.delete(again.tokens, slice(60, 70))
    engine.edit(again, new, jaxkv.Exact())
    assert read == [100, 20, 7, 1, len(new) - 60]
    stale = engine.edit(again, new, jaxkv.SCR(min_span=4, tail=2)).sequence
    engine.heal(stale, tokens=20)
    assert read[5:] == [0, 20]
    assert engine.stats()["index_tokens"] == 127 + 1 + len(new) - 60
