"""Pages in the loop: admission, preemption, cancellation, failure. Nobody's pages but one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference import Decoder
from tiny import NUM_PAGES, PAGE_SIZE, make_model, tiny_config

import jaxkv
from jaxkv import CapacityError, HandleError, ManualClock, ServingConfig, execute, generation
from jaxkv.cache.pool import PagePool

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]


def leave(engine: jaxkv.Engine, pages: int, text: Text) -> jaxkv.Sequence:
    """A sequence that the loop does not own and that leaves so many pages to it."""
    return engine.prefill(text((NUM_PAGES - pages) * PAGE_SIZE, seed=99), reuse=False).sequence


def test_preemption_takes_the_lowest_and_latest_and_changes_no_token(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    engine = make_engine(serving=ServingConfig(max_running=3, decode_steps=8, clock=ManualClock()))
    held = leave(engine, 12, text)
    requests = [
        engine.submit(text(20, seed=seed), max_tokens=30, priority=priority)
        for seed, priority in ((1, 0), (2, 1), (3, 0))
    ]
    preempted = []
    free = engine.stats()["pages_free"]
    results = {}
    while not (done := engine.step()).idle:
        preempted += done.preempted
        results |= {r.request: r for r in done.finished}
        engine.check()
    results |= {r.request: r for r in done.finished}
    assert preempted
    assert preempted[0] is requests[2], "of equal priority, the latest arrival"
    assert requests[1] not in preempted, "the highest priority"
    for request in requests:
        assert results[request].tokens.tolist() == decoder.greedy(request.tokens, 30)
        assert results[request].metrics.preemptions == preempted.count(request)
    engine.release(held)
    stats = engine.stats()
    assert stats["pages_free"] + stats["pages_cached"] == NUM_PAGES
    assert free <= 12


def test_a_preempted_request_gives_back_its_own_pages_and_no_others(make_engine: Engines, text: Text) -> None:
    config = ServingConfig(max_running=2, decode_steps=2, clock=ManualClock())
    engine = make_engine(serving=config)
    system = text(40)
    prompts = [np.concatenate([system, text(9, seed=s)]) for s in (1, 2)]
    low = engine.submit(prompts[0], max_tokens=16, priority=0)
    engine.submit(prompts[1], max_tokens=16, priority=1)
    while engine.step().decoded < 4:
        pass
    before = engine._memory.pool.refcount.copy()
    job = next(j for j in engine._loop.jobs if j.request is low)
    assert job.sequence is not None
    held = job.sequence.held_pages.copy()
    engine.submit(text(8, seed=5), max_tokens=1, priority=2)
    done = engine.step()
    assert done.preempted == (low,)
    expected = before.copy()
    np.subtract.at(expected, held, np.int32(1))
    others = np.ones(NUM_PAGES, bool)
    for j in engine._loop.running:  # the others went on in the same round
        assert j.sequence is not None
        others[j.sequence.held_pages] = False
    changed = np.flatnonzero((engine._memory.pool.refcount != expected) & others)
    # Pages that this round filled and published belong to the third request.
    assert all(engine._memory.index._held[page] for page in changed)
    engine.run()


@pytest.mark.parametrize("admission", ["reserve", "preempt"])
def test_reserving_admits_only_what_fits_with_its_generation(
    make_engine: Engines, decoder: Decoder, text: Text, admission: str
) -> None:
    config = ServingConfig(max_running=4, decode_steps=4, admission=admission, clock=ManualClock())
    engine = make_engine(serving=config)
    held = leave(engine, 12, text)
    requests = [engine.submit(text(16, seed=seed), max_tokens=24) for seed in range(4)]  # 5 pages each
    most = 0
    results = []
    while not (done := engine.step()).idle:
        most = max(most, done.running + len(done.finished))
        results += done.finished
    results += done.finished
    preemptions = sum(r.metrics.preemptions for r in results)
    assert (most, preemptions) == (2, 0) if admission == "reserve" else (most > 2 and preemptions > 0)
    for result in results:
        assert result.tokens.tolist() == decoder.greedy(result.request.tokens, 24)
    assert {r.request for r in results} == set(requests)
    engine.release(held)


def test_a_request_that_fits_only_without_its_cached_prefix_is_computed_cold(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    """What it would share is pinned beside what it needs anew: the match itself makes it too big."""
    engine = make_engine(serving=ServingConfig(clock=ManualClock()))
    held = leave(engine, 4, text)
    engine.release(engine.prefill(text(20)).sequence)  # ends in the middle of a page
    tokens = np.concatenate([text(13), text(11, seed=1)])
    engine.submit(tokens, max_tokens=8)  # 32 tokens: four pages; with two shared ones, five
    (result,) = engine.run()
    assert result.metrics.hit_tokens == 0
    assert result.tokens.tolist() == decoder.greedy(tokens, 8)
    engine.release(held)


@pytest.mark.parametrize("rounds", [0, 1, 2, 4])
def test_cancelling_gives_back_exactly_what_the_request_held(
    make_engine: Engines, decoder: Decoder, text: Text, rounds: int
) -> None:
    """CASE 34: pending, waiting, in prefill and decoding; a sibling shares its prefix."""
    config = ServingConfig(prefill_budget=16, decode_steps=2, clock=ManualClock())
    engine = make_engine(serving=config)
    system = text(16)
    sibling = engine.submit(np.concatenate([system, [1, 2]]), max_tokens=20, priority=1)
    victim = engine.submit(np.concatenate([system, text(30, seed=1)]), max_tokens=20)
    late = engine.submit(text(5), max_tokens=3, arrival=50.0)
    for _ in range(rounds):
        engine.step()
    job = next(j for j in engine._loop.jobs if j.request is victim)
    held = [] if job.sequence is None else job.sequence.held_pages
    expected = engine._memory.pool.refcount.copy()
    np.subtract.at(expected, np.asarray(held, np.int32), np.int32(1))
    result = engine.cancel(victim)
    np.testing.assert_array_equal(engine._memory.pool.refcount, expected)
    assert result.finish_reason == "cancelled"
    assert result.tokens.tolist() == decoder.greedy(victim.tokens, 20)[: len(result.tokens)]
    assert engine.cancel(late).metrics.to_dict()["admitted"] is None
    engine.check()
    for ended in (victim, late):
        with pytest.raises(HandleError, match="has ended or is another engine's"):
            engine.cancel(ended)
    results = {r.request: r for r in engine.run()}
    assert set(results) == {sibling, victim, late}, "a round tells of cancelled ones too"
    assert results[victim] is result
    assert results[sibling].tokens.tolist() == decoder.greedy(sibling.tokens, 20)
    with pytest.raises(HandleError, match="has ended"):
        engine.cancel(sibling)


def test_pages_that_others_hold_stop_the_run_with_a_reason(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    engine = make_engine(serving=ServingConfig(clock=ManualClock()))
    held = leave(engine, 4, text)
    small = engine.submit(text(10), max_tokens=4)
    large = engine.submit(text(60, seed=1), max_tokens=4)
    with pytest.raises(CapacityError, match=r"needs 8 pages and 4 can be had.*release sequences"):
        engine.run()
    engine.release(held)
    results = {r.request: r for r in engine.run()}
    assert set(results) == {small, large}, "what ended before is not lost"
    assert results[large].tokens.tolist() == decoder.greedy(large.tokens, 4)


def test_requests_outlive_a_step_that_loses_all_pages(
    make_engine: Engines, decoder: Decoder, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(serving=ServingConfig(prefill_budget=32, decode_steps=2, clock=ManualClock()))
    requests = [engine.submit(text(40, seed=seed), max_tokens=8) for seed in (1, 2)]
    while engine.step().decoded < 2:
        pass
    real = generation.decode_many

    def broken(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)  # takes the pages
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(generation, "decode_many", broken)
        with pytest.raises(HandleError, match="a step failed"):
            engine.run()
    results = {r.request: r for r in engine.run()}
    for request in requests:
        assert results[request].tokens.tolist() == decoder.greedy(request.tokens, 8)
    assert sum(r.metrics.preemptions for r in results.values()) >= 1


def test_new_weights_compute_running_requests_again(make_engine: Engines, text: Text) -> None:
    engine = make_engine(serving=ServingConfig(decode_steps=2, clock=ManualClock()))
    engine.submit(text(20), max_tokens=4)
    engine.step()
    other = make_model(tiny_config(), seed=3)
    engine.replace_params(other.params, other.weights_digest)
    (result,) = engine.run()
    first, rest = result.tokens[:2], result.tokens[2:]
    fresh = make_engine(model=other)
    sequence = fresh.prefill(np.concatenate([text(20), first])).sequence
    np.testing.assert_array_equal(fresh.generate(sequence, max_tokens=2).tokens, rest)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (PagePool, "allocate"),
        (PagePool, "fill"),
        (PagePool, "release"),
        (execute, "run_step"),
        (generation, "decode_many"),
        (ManualClock, "now"),
        (jaxkv.Engine, "extend"),
        (jaxkv.Engine, "release"),
        (jaxkv.Engine, "_decode"),
        (jaxkv.Engine, "_finish"),
    ],
)
def test_an_interrupt_anywhere_loses_no_request_and_changes_no_token(
    target: Any, name: str, make_engine: Engines, decoder: Decoder, text: Text,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The function does its work, then Ctrl-C strikes, at its first to ninth call."""
    real = getattr(target, name)
    engine = make_engine(serving=ServingConfig(prefill_budget=32, decode_steps=4, clock=ManualClock()))
    requests = [engine.submit(text(40, seed=seed), max_tokens=10) for seed in (1, 2)]
    results: list[jaxkv.RequestResult] = []
    for number in range(1, 10):
        calls = 0

        def struck(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            value = real(*args, **kwargs)
            calls += 1
            if calls == number:  # noqa: B023
                raise KeyboardInterrupt
            return value

        with monkeypatch.context() as patch:
            patch.setattr(target, name, struck)
            try:
                results += engine.run()
                break
            except KeyboardInterrupt:
                engine.check()
    results += engine.run()
    assert {r.request for r in results} == set(requests)
    for result in results:
        assert result.tokens.tolist() == decoder.greedy(result.request.tokens, 10)
    engine.check()
    assert engine.stats()["sequences"] == 0
