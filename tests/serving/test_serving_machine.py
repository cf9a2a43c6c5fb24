"""Random loads: submit, step, cancel, other sequences' pages; everything adds up, tokens are float64's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference import Decoder, decoder_of
from tiny import CHUNK, NUM_PAGES, PAGE_SIZE, make_model, tiny_config

import jaxkv
from jaxkv import ManualClock, ServingConfig

BOOK = np.random.default_rng(0).integers(0, 3, 400).astype(np.int32)


@functools.cache
def subject() -> tuple[jaxkv.Model, Decoder]:
    model = make_model(tiny_config())
    return model, decoder_of(model.params, model.config)


@functools.lru_cache(maxsize=1024)
def greedy(tokens: bytes, steps: int) -> list[int]:
    return subject()[1].greedy(np.frombuffer(tokens, np.int32), steps)


class ServingMachine(RuleBasedStateMachine):
    @initialize(
        chunked=st.booleans(),
        admission=st.sampled_from(["preempt", "reserve"]),
        order=st.sampled_from(["prefix", "arrival"]),
        steps=st.integers(1, 5),
    )
    def start(self, chunked: bool, admission: str, order: str, steps: int) -> None:
        self.clock = ManualClock()
        self.engine = jaxkv.Engine(
            subject()[0],
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            chunk_size=CHUNK,
            reuse_granularity="chunk" if chunked else "token",
            poison_free_pages=True,
            serving=ServingConfig(
                max_running=4, decode_steps=steps, admission=admission, order=order, clock=self.clock
            ),
        )
        # Leaves 20 pages to the loop.
        self.held: list[jaxkv.Sequence] = []
        self.keep(40)
        self.open: list[jaxkv.Request] = []

    def keep(self, pages: int) -> None:
        tokens = np.full(pages * PAGE_SIZE, 96, np.int32)
        self.held.append(self.engine.prefill(tokens, reuse=False).sequence)

    @rule(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=2),
          most=st.integers(1, 30), domain=st.sampled_from("aab"), priority=st.integers(0, 2),
          later=st.integers(0, 2))  # fmt: skip
    def submit(self, parts: list[tuple[int, int]], most: int, domain: str, priority: int, later: int) -> None:
        tokens = np.concatenate([BOOK[40 * a : 40 * a + n] for a, n in parts])
        self.open.append(
            self.engine.submit(
                tokens, max_tokens=most, domain=domain, priority=priority, arrival=self.clock.now() + later
            )
        )

    @rule(rounds=st.integers(1, 4))
    def step(self, rounds: int) -> None:
        for _ in range(rounds):
            done = self.engine.step()
            assert done.running <= 4
            for result in done.finished:
                self.end(result)
            self.clock.advance(0.5)

    def end(self, result: jaxkv.RequestResult) -> None:
        request = result.request
        expected = greedy(request.tokens.tobytes(), request.max_tokens)
        assert result.tokens.tolist() == expected[: len(result.tokens)]
        assert result.finish_reason == "cancelled" or len(result.tokens) == request.max_tokens
        if request in self.open:
            self.open.remove(request)

    @precondition(lambda self: getattr(self, "open", None))
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.open))
        self.end(self.engine.cancel(request))

    @precondition(lambda self: len(getattr(self, "held", [])) > 1)
    @rule()
    def give_back(self) -> None:
        self.engine.release(self.held.pop())

    @rule()
    def take_pages_outside_the_loop(self) -> None:
        if self.engine.stats()["pages_free"] > 2 and len(self.held) < 2:
            self.keep(2)

    @invariant()
    def everything_held_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            running = len(self.engine._loop.running)
            assert self.engine.stats()["sequences"] == running + len(self.held)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while len(self.held) > 1:
            self.engine.release(self.held.pop())
        for result in self.engine.run():
            self.end(result)
        assert not self.open, "every request ends"
        assert self.engine.stats()["requests"] == 0
        self.engine.check()


TestServingLife = ServingMachine.TestCase
TestServingLife.settings = settings(
    max_examples=10,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
