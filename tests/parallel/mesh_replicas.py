"""Replicas: prompts go where their prefix is, sequences stay where they are, all work at the same time."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest
from on_mesh import CHUNK, EVEN, NUM_PAGES, PAGE_SIZE, model_of, text
from reference import Decoder, decoder_of
from tolerances import tolerance

import jaxkv

LOGITS = tolerance("logits")


@pytest.fixture(scope="module")
def model() -> jaxkv.Model:
    return model_of(**EVEN)


@pytest.fixture(scope="module")
def decoder(model: jaxkv.Model) -> Decoder:
    return decoder_of(model.params, model.config)


def replicas_of(model: jaxkv.Model, mesh: Any = "data:2,model:4", **options: Any) -> jaxkv.Replicas:
    return jaxkv.Replicas(
        model, mesh=mesh, num_pages=NUM_PAGES, page_size=PAGE_SIZE, chunk_size=CHUNK, **options
    )


def test_each_replica_has_devices_and_a_pool_of_its_own(model: jaxkv.Model) -> None:
    both = replicas_of(model)
    sets = [engine._memory.pages[0].kv.sharding.device_set for engine in both.engines]
    assert len(both) == 2
    assert [len(each) for each in sets] == [4, 4]
    assert not sets[0] & sets[1]
    assert both.stats()["pages_total"] == 2 * NUM_PAGES


def test_prompts_go_where_their_prefix_is(model: jaxkv.Model, decoder: Decoder) -> None:
    both = replicas_of(model)
    first = both.prefill(text(32))
    other = both.prefill(text(32, seed=1))
    homes = [both.of(r.sequence) for r in (first, other)]
    assert homes[0] is not homes[1], "the second goes to the emptier pool"
    for seed, home in ((0, homes[0]), (1, homes[1]), (0, homes[0])):
        prompt = np.concatenate([text(32, seed=seed), text(16, seed=2 + seed)])
        again = both.prefill(prompt)
        assert both.of(again.sequence) is home
        assert again.reuse.matched >= 32
        np.testing.assert_allclose(again.logits, decoder.logits(prompt)[-1], atol=LOGITS, rtol=0)
    longer = both.extend(first.sequence, text(16, seed=5))
    assert both.of(longer.sequence) is homes[0]
    both.release(first.sequence)
    with pytest.raises(jaxkv.HandleError, match="no replica's"):
        both.of(first.sequence)
    both.check()


def test_a_batch_is_decoded_by_all_replicas_at_the_same_time(
    model: jaxkv.Model, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = replicas_of(model, route="round_robin")
    prompts = [text(16, seed=i) for i in range(4)]
    made = [both.prefill(prompt).sequence for prompt in prompts]
    homes = [both.of(sequence) for sequence in made]
    assert homes[0] is homes[2] is not homes[1]
    meeting = threading.Barrier(2, timeout=60)
    decode = jaxkv.Engine.generate_batch

    def together(self: jaxkv.Engine, *args: Any, **options: Any) -> Any:
        meeting.wait()  # passes only if both replicas are at work
        return decode(self, *args, **options)

    monkeypatch.setattr(jaxkv.Engine, "generate_batch", together)
    found = both.generate_batch(made, max_tokens=5)
    monkeypatch.undo()
    assert [g.tokens.tolist() for g in found] == [decoder.greedy(prompt, 5) for prompt in prompts]
    assert [both.of(g.sequence) for g in found] == homes


@pytest.mark.slow
def test_requests_are_routed_and_served_as_alone(model: jaxkv.Model, decoder: Decoder) -> None:
    both = replicas_of(model)
    assert both.warm_up(tokens=40) == 2 * both.engines[0].stats()["shapes"] > 0
    prompts = [np.concatenate([text(24, seed=i % 2), text(8, seed=10 + i)]) for i in range(6)]
    handles = [both.submit(prompt, max_tokens=4) for prompt in prompts]
    where = [next(i for i, queue in enumerate(both._queued) if handle in queue) for handle in handles]
    assert where == [0, 1, 0, 1, 0, 1], "those that share a prefix go together, before it is cached"
    gone = both.cancel(handles[5])
    assert gone.finish_reason == "cancelled"
    first = both.step()
    assert first.prefilled > 0
    assert first.running + first.waiting == 5
    results = {id(r.request): r for r in [*first.finished, *both.run()]}
    assert both.step().idle
    for handle, prompt in zip(handles[:5], prompts, strict=False):
        assert results[id(handle)].tokens.tolist() == decoder.greedy(prompt, 4)
    hits = sum(results[id(handle)].metrics.hit_tokens for handle in handles[:5])
    assert hits >= 3 * 24 - 3
    both.check()


def test_bad_replicas_are_refused(model: jaxkv.Model) -> None:
    with pytest.raises(jaxkv.ConfigError, match=r"route is 'best', expected one of longest_match"):
        replicas_of(model, route="best")
    with pytest.raises(jaxkv.ConfigError, match="expected the 8 there are"):
        replicas_of(model, "data:2,model:2")
    with pytest.raises(jaxkv.ConfigError, match="mesh is None"):
        replicas_of(model, None)
    both = replicas_of(model, jaxkv.parse_mesh("data:2", jax.devices()[:2]))
    with pytest.raises(jaxkv.ConfigError, match="sequences are empty"):
        both.generate_batch([], max_tokens=1)


@pytest.mark.slow
def test_the_trace_runs_on_replicas(tmp_path: Any) -> None:
    from experiments import prefix_trace
    from experiments.trace_config import defaults

    config = defaults(smoke=True, mesh="data:2,model:4", name="spread")
    result = prefix_trace.run(config, tmp_path / "run", given=("smoke", "mesh", "name"))
    assert (result.finished, result.failed) == (2, 0)
