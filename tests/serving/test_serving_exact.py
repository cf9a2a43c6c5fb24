"""Whatever shares a batch, waits, is cut into parts or is cached: a request's tokens are its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from judge import ATOL
from reference import Decoder
from tiny import CHUNK, PAGE_SIZE

import jaxkv
from jaxkv import ManualClock, Sampling, ServingConfig

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]


def submit_mixed(
    engine: jaxkv.Engine, text: Text, *, sampled: bool = False, longest: int = 20
) -> list[jaxkv.Request]:
    """Twelve requests of many lengths; some share prefixes, some domains."""
    rng = np.random.default_rng(5)
    requests = []
    for number in range(12):
        shared = text(int(rng.integers(0, 70)), seed=number % 3)
        tokens = np.concatenate([shared, text(int(rng.integers(1, 50)), seed=100 + number)])
        choice = Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=number) if sampled else Sampling()
        requests.append(
            engine.submit(
                tokens,
                max_tokens=int(rng.integers(1, longest)),
                sampling=choice,
                domain="ab"[number % 2],
                priority=number % 3,
                arrival=float(number // 4),
            )
        )
    return requests


@pytest.mark.parametrize("granularity", ["token", "chunk"])
@pytest.mark.parametrize("short", [False, True])
def test_every_request_gets_its_own_greedy_tokens(
    make_engine: Engines, decoder: Decoder, text: Text, granularity: str, short: bool
) -> None:
    """With pages for all, and with so few that requests lose theirs and come back."""
    config = ServingConfig(max_running=4, prefill_budget=32, decode_steps=4, clock=ManualClock())
    engine = make_engine(reuse_granularity=granularity, serving=config)
    held = [engine.prefill(text(40 * PAGE_SIZE), reuse=False).sequence] if short else []
    requests = submit_mixed(engine, text, longest=36)
    results = {r.request: r for r in engine.run()}
    assert set(results) == set(requests)
    for request in requests:
        result = results[request]
        assert result.finish_reason == "length"
        assert result.tokens.tolist() == decoder.greedy(request.tokens, request.max_tokens)
        assert result.metrics.prompt_tokens == len(request.tokens)
        assert result.metrics.generated_tokens == request.max_tokens
    preemptions = sum(r.metrics.preemptions for r in results.values())
    assert preemptions > 0 or not short
    assert engine.stats()["preemptions"] == preemptions
    assert (engine.stats()["sequences"], engine.stats()["requests"]) == (len(held), 0)
    for sequence in held:
        engine.release(sequence)
    assert engine.stats()["pages_live"] == engine.stats()["pages_cached"]


def test_sampled_tokens_depend_on_the_request_alone(make_engine: Engines, text: Text) -> None:
    config = ServingConfig(max_running=4, prefill_budget=32, decode_steps=3, clock=ManualClock())
    busy = make_engine(serving=config)
    submit_mixed(busy, text, sampled=True)
    for result in busy.run():
        request, choice = result.request, result.request.sampling
        alone = make_engine(prefix_cache=False)
        sequence = alone.prefill(request.tokens).sequence
        out = alone.generate_batch([sequence], max_tokens=request.max_tokens, sampling=choice)[0]
        np.testing.assert_array_equal(result.tokens, out.tokens)


def test_rounds_stream_what_results_hold(make_engine: Engines, text: Text) -> None:
    clock = ManualClock()
    config = ServingConfig(max_running=4, prefill_budget=16, decode_steps=2, clock=clock)
    engine = make_engine(serving=config)
    requests = submit_mixed(engine, text)
    streamed: dict[jaxkv.Request, list[int]] = {request: [] for request in requests}
    results = []
    while True:
        done = engine.step()
        assert done.running <= 4
        assert done.prefilled <= 16
        assert all(1 <= len(tokens) <= 2 for tokens in done.tokens.values())
        assert done.decoded == sum(map(len, done.tokens.values()))
        for request, tokens in done.tokens.items():
            streamed[request] += tokens.tolist()
        results += done.finished
        if done.idle:
            break
        if not done.progressed:
            clock.advance(1.0)  # on to the next arrivals
    assert len(results) == len(requests)
    for result in results:
        assert streamed[result.request] == result.tokens.tolist()


def test_a_stop_token_ends_a_request_and_is_not_returned(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    engine = make_engine(serving=ServingConfig(decode_steps=4))
    expected = decoder.greedy(text(30), 12)
    stop = expected[6]
    count = expected.index(stop)
    request = engine.submit(text(30), max_tokens=12, sampling=Sampling(stop=(stop,)))
    other = engine.submit(text(9, seed=1), max_tokens=12)
    first, second = sorted(engine.run(), key=lambda r: r.request.id)
    assert (first.request, second.request) == (request, other)
    assert first.finish_reason == "stop"
    assert first.tokens.tolist() == expected[:count]
    assert len(second.tokens) == 12


def test_what_a_request_generated_is_found_by_the_next_turn(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    engine = make_engine(serving=ServingConfig(decode_steps=4))
    engine.submit(text(30), max_tokens=10, domain="a")
    (first,) = engine.run()
    turn = np.concatenate([text(30), first.tokens, text(5, seed=1)])
    requests = [engine.submit(turn, max_tokens=6, domain=domain) for domain in "ab"]
    results = {r.request.domain: r for r in engine.run()}
    assert results["a"].metrics.hit_tokens == 40
    assert results["b"].metrics.hit_tokens == 0, "domains share nothing"
    for request in requests:
        assert results[request.domain].tokens.tolist() == decoder.greedy(turn, 6)


def test_a_prompt_in_parts_is_bitwise_the_prompt_at_once(make_engine: Engines, text: Text) -> None:
    """Chunk granularity keeps its promise when a prompt is computed over many rounds."""
    config = ServingConfig(prefill_budget=CHUNK, decode_steps=4)
    engine = make_engine(reuse_granularity="chunk", serving=config)
    tokens = text(150)
    engine.submit(tokens, max_tokens=4)
    engine.run()
    warm = engine.prefill(np.concatenate([tokens, [3]]))
    assert warm.reuse.matched == 150 // CHUNK * CHUNK, "parts are published on the grid"
    cold = make_engine(reuse_granularity="chunk").prefill(np.concatenate([tokens, [3]]))
    np.testing.assert_array_equal(warm.logits, cold.logits)


def test_extending_at_the_end_of_whole_chunks_stays_on_the_grid(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    engine, other = (make_engine(reuse_granularity="chunk") for _ in range(2))
    tokens = text(3 * CHUNK + 5)
    whole = engine.prefill(tokens)
    first = other.prefill(tokens[:CHUNK])
    parts = other.extend(first.sequence, tokens[CHUNK:])
    np.testing.assert_array_equal(parts.logits, whole.logits)
    assert other.prefill(tokens).reuse.matched == 3 * CHUNK
    # Not so from anywhere else: those chunks are none that a cold run has.
    odd = make_engine(reuse_granularity="chunk")
    first = odd.prefill(tokens[: CHUNK + 7])
    longer = odd.extend(first.sequence, tokens[CHUNK + 7 :])
    np.testing.assert_allclose(longer.logits, decoder.logits(tokens)[-1], atol=ATOL)
    assert odd.prefill(tokens).reuse.matched == CHUNK
