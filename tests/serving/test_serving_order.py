"""Who is served when: arrival, priority, what is cached and what is being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from reference import Decoder

import jaxkv
from jaxkv import ManualClock, ServingConfig

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]


def join(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def order_of_admission(engine: jaxkv.Engine) -> list[int]:
    """Runs to the end; ids in the order in which requests got pages."""
    seen: list[int] = []
    for _ in range(500):
        done = engine.step()
        seen += [request.id for request in done.admitted]
        if done.idle:
            return seen
    raise AssertionError("the loop does not come to an end")


@pytest.mark.parametrize("order", ["prefix", "arrival"])
def test_the_second_of_two_waits_for_the_pages_that_the_first_computes(
    make_engine: Engines, decoder: Decoder, text: Text, order: str
) -> None:
    """It could start at once, having the higher priority; without the wait both compute 96 tokens."""
    config = ServingConfig(prefill_budget=32, decode_steps=4, order=order)
    engine = make_engine(serving=config)
    prompts = [join(text(96), text(20, seed=seed)) for seed in (1, 2)]
    first = engine.submit(prompts[0], max_tokens=5)
    assert engine.step().admitted == (first,)
    second = engine.submit(prompts[1], max_tokens=5, priority=1)
    stranger = engine.submit(text(8, seed=9), max_tokens=5, priority=1)
    done = engine.step()
    # Nobody else waits with it.
    assert done.admitted == ((stranger,) if order == "prefix" else (second,))
    results = {r.request: r for r in engine.run()}
    assert results[second].metrics.hit_tokens == (96 if order == "prefix" else 32)
    computed = sum(r.metrics.computed_tokens for r in results.values())
    assert computed == 116 + 20 + 8 + (0 if order == "prefix" else 64)
    for request, prompt in zip((first, second), prompts, strict=True):
        assert results[request].tokens.tolist() == decoder.greedy(prompt, 5)


def test_other_domains_do_not_wait_for_each_other(make_engine: Engines, text: Text) -> None:
    engine = make_engine(serving=ServingConfig(prefill_budget=64))
    engine.submit(text(96), max_tokens=1, domain="a")
    engine.step()
    b = engine.submit(text(96), max_tokens=1, domain="b", priority=1)
    assert engine.step().admitted == (b,)
    assert [r.metrics.hit_tokens for r in engine.run()] == [0, 0]


def test_a_cancelled_leader_keeps_nobody_waiting(make_engine: Engines, text: Text) -> None:
    engine = make_engine(serving=ServingConfig(prefill_budget=32))
    leader = engine.submit(text(96), max_tokens=1)
    follower = engine.submit(join(text(96), [1]), max_tokens=1)
    assert engine.step().admitted == (leader,)
    assert engine.step().admitted == ()
    engine.cancel(leader)
    assert engine.step().admitted == (follower,)
    (result,) = [r for r in engine.run() if r.request is follower]
    assert result.metrics.hit_tokens == 64, "what the leader had published stays"


def test_hot_requests_go_first_but_overtake_no_one_for_ever(make_engine: Engines, text: Text) -> None:
    def admitted(order: str, patience: int) -> list[int]:
        config = ServingConfig(max_running=1, decode_steps=1, order=order, patience=patience)
        engine = make_engine(serving=config)
        engine.prefill(text(48))
        cold = engine.submit(text(60, seed=5), max_tokens=1)
        hot = [engine.submit(join(text(48), [seed]), max_tokens=1) for seed in range(4)]
        return [[cold, *hot].index(r) for r in by_id(order_of_admission(engine), [cold, *hot])]

    assert admitted("prefix", 8) == [1, 2, 3, 4, 0]
    assert admitted("prefix", 2) == [1, 2, 0, 3, 4]
    assert admitted("prefix", 0) == admitted("arrival", 8) == [0, 1, 2, 3, 4]


def by_id(ids: list[int], requests: list[jaxkv.Request]) -> list[jaxkv.Request]:
    return [next(r for r in requests if r.id == i) for i in ids]


def test_priority_goes_first_and_may_take_pages_and_rows(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    config = ServingConfig(max_running=2, prefill_budget=64, decode_steps=2, clock=ManualClock())
    engine = make_engine(serving=config)
    low = [engine.submit(text(20, seed=s), max_tokens=12, priority=-1) for s in (1, 2)]
    engine.step()
    high = engine.submit(text(30, seed=3), max_tokens=4, priority=5)
    middle = engine.submit(text(30, seed=4), max_tokens=4)
    done = engine.step()
    assert done.admitted == (high, middle)
    assert done.preempted == (low[1], low[0]), "the later arrival loses its row first"
    results = {r.request: r for r in engine.run()}
    assert [results[r].metrics.preemptions for r in (*low, high, middle)] == [1, 1, 0, 0]
    for request, result in results.items():
        assert result.tokens.tolist() == decoder.greedy(request.tokens, request.max_tokens)


def test_equal_priority_takes_nothing(make_engine: Engines, text: Text) -> None:
    engine = make_engine(serving=ServingConfig(max_running=1, decode_steps=2))
    engine.submit(text(20), max_tokens=12, priority=3)
    engine.step()
    engine.submit(text(20, seed=1), max_tokens=2, priority=3)
    assert sum(r.metrics.preemptions for r in engine.run()) == 0


def test_requests_wait_for_their_arrival(make_engine: Engines, text: Text) -> None:
    clock = ManualClock(100.0)
    engine = make_engine(serving=ServingConfig(clock=clock))
    late = engine.submit(text(10), max_tokens=3, arrival=107.0)
    later = engine.submit(text(10, seed=1), max_tokens=3, arrival=109.0)
    done = engine.step()
    assert (done.pending, done.waiting, done.running, done.progressed, done.idle) == (2, 0, 0, False, False)
    results = engine.run()
    assert [r.request for r in results] == [late, later]
    assert clock.now() == 109.0
    assert [r.metrics.queue_seconds for r in results] == [0.0, 0.0]


def test_metrics_tell_how_a_request_fared(make_engine: Engines, text: Text) -> None:
    clock = ManualClock()
    engine = make_engine(serving=ServingConfig(clock=clock, prefill_budget=32, decode_steps=4, max_running=1))
    engine.prefill(text(16))
    a = engine.submit(text(70), max_tokens=10)
    b = engine.submit(text(8, seed=1), max_tokens=1)
    while not (done := engine.step()).idle:
        clock.advance(1.0)
        for result in done.finished:
            if result.request is a:
                metrics = result.metrics
    # 54 tokens in two parts at 0 and 1 s; then 4, 4 and 2 tokens at 1, 2 and 3 s.
    assert (metrics.admitted, metrics.first_token, metrics.finished) == (0.0, 1.0, 3.0)
    assert (metrics.hit_tokens, metrics.computed_tokens, metrics.preemptions) == (16, 54, 0)
    assert (metrics.queue_seconds, metrics.ttft, metrics.prefill_seconds) == (0.0, 1.0, 1.0)
    assert metrics.tokens_per_second == 10 / 2
    result = done.finished[0]
    assert result.request is b
    assert result.metrics.queue_seconds == 4.0
    assert result.metrics.to_dict()["tokens_per_second"] is None, "no time passed"
    assert a.arrival == b.arrival == 0.0
