"""Random lives of an engine: everything exact equals the dense oracle, everything held adds up.

A small pool, so that most prompts evict something; free pages are NaN, so that a stray read shows.
Nothing compares approximate results here but their finiteness: `test_engine_edit.py` does.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from judge import ATOL, origins
from reference import Decoder, decoder_of
from tiny import CHUNK, NUM_PAGES, PAGE_SIZE, make_model, tiny_config

import jaxkv
from jaxkv import SCR, Drop, Exact, FirstK, Forget, Policy, Sinks, execute

SYMBOLS = 3  # few, so that texts share prefixes and repeat themselves
LONGEST = 200
POLICIES: list[Policy] = [
    Exact(), SCR(min_span=4, tail=2), SCR(min_span=8, tail=0), SCR(form="copy", min_span=4, tail=2),
    SCR(min_span=4, tail=2) | FirstK(3) | Sinks(2), SCR(min_span=8, tail=2, rotate=False), Forget(),
    Drop(), FirstK(4),
]  # fmt: skip

# Long runs come from a fixed text, so that examples stay small and yet fill pages.
BOOK = np.random.default_rng(0).integers(0, SYMBOLS, 400).astype(np.int32)
pieces = st.one_of(
    st.lists(st.integers(0, SYMBOLS - 1), min_size=1, max_size=6),
    st.tuples(st.integers(0, 200), st.integers(1, 90)).map(lambda p: BOOK[p[0] : p[0] + p[1]].tolist()),
)


@functools.cache
def subject() -> tuple[jaxkv.Model, Decoder]:
    model = make_model(tiny_config())
    return model, decoder_of(model.params, model.config)


@functools.lru_cache(maxsize=4096)
def exact_logits(tokens: bytes) -> np.ndarray:
    logits: np.ndarray = subject()[1].logits(np.frombuffer(tokens, np.int32))[-1]
    return logits


EVICTION = [jaxkv.LRU(), jaxkv.LFU(), jaxkv.TTL(seconds=5), jaxkv.Priority(), jaxkv.CostPerByte()]


class StepError(RuntimeError):
    pass


class EngineMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    narrow_views = False  # whether some engines hold two deltas only: shapes of their own to compile

    @initialize(
        chunked=st.booleans(), narrow=st.booleans(), eviction=st.sampled_from(EVICTION), tier=st.booleans(),
        quota=st.sampled_from([None, 9, 40]),
    )  # fmt: skip
    def start(
        self, chunked: bool, narrow: bool, eviction: jaxkv.EvictionPolicy, tier: bool, quota: int | None
    ) -> None:
        self.clock = 100.0
        self.engine = jaxkv.Engine(
            subject()[0],
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            chunk_size=CHUNK,
            max_deltas=2 if narrow and self.narrow_views else 8,
            reuse_granularity="chunk" if chunked else "token",
            poison_free_pages=True,
            eviction=eviction,
            clock=lambda: self.clock,
            host_tier_bytes=2**19 if tier else 0,
        )
        if quota:
            page_bytes = int(self.engine.stats()["page_bytes"])
            self.engine.set_quota("B", quota * page_bytes)
        self.quota, self.pinned = quota, False
        self.pins: list[jaxkv.Pin] = []
        self.saved = Path(tempfile.mkdtemp()) / "cache"
        self.chunked = chunked
        self.tokens: dict[int, np.ndarray] = {}  # what every live sequence must hold

    def attempt(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """The call's result, or None where the pool is full: then nothing may have changed.

        What a tier gave back before stays, and what gave way to it went: with a tier only sequences count.
        """
        memory = self.engine._memory
        self.clock += 1
        memory.begin()
        before = memory.pool.refcount.copy()
        try:
            return call(*args, **kwargs)
        except jaxkv.CapacityError:
            if memory.tiers is None:
                np.testing.assert_array_equal(memory.pool.refcount, before)
            return None

    def adopt(self, sequence: jaxkv.Sequence, tokens: Any) -> jaxkv.Sequence:
        tokens = np.asarray(tokens, np.int32)
        np.testing.assert_array_equal(sequence.tokens, tokens)
        found = origins(sequence)
        kept = [p for p, origin in enumerate(found) if origin != "dropped"]
        kv = self.engine.read_kv(sequence)
        np.testing.assert_array_equal(kv.positions, kept)
        assert np.isfinite(kv.keys).all()
        assert np.isfinite(kv.values).all()
        logits = np.asarray(sequence.logits)
        assert np.isfinite(logits).all()
        if sequence.exact:
            np.testing.assert_allclose(logits, exact_logits(tokens.tobytes()), atol=ATOL)
        self.tokens[sequence.id] = tokens
        return sequence

    @rule(target=sequences, parts=st.lists(pieces, min_size=1, max_size=3), domain=st.sampled_from("AB"),
          reuse=st.sampled_from([True, True, True, False]), priority=st.integers(0, 2))  # fmt: skip
    def prefill(self, parts: list[list[int]], domain: str, reuse: bool, priority: int) -> Any:
        tokens = np.concatenate(parts).astype(np.int32)[:LONGEST]
        result = self.attempt(self.engine.prefill, tokens, domain=domain, reuse=reuse, priority=priority)
        if result is None:
            return multiple()
        assert result.reuse.kind == "exact"
        if not reuse:
            assert result.reuse.matched == 0
        elif self.chunked:
            assert result.reuse.matched % CHUNK == 0
        return self.adopt(result.sequence, tokens)

    @rule(target=sequences, source=sequences, part=pieces)
    def extend(self, source: jaxkv.Sequence, part: list[int]) -> Any:
        tokens = np.concatenate([self.tokens[source.id], part])
        if len(tokens) > LONGEST:
            return multiple()
        result = self.attempt(self.engine.extend, source, part)
        if result is None:
            return multiple()
        assert (result.reuse.kind == "exact") == source.exact
        return self.adopt(result.sequence, tokens)

    @rule(target=sequences, source=sequences, policy=st.sampled_from(POLICIES), at=st.integers(0, 200),
          removed=st.integers(0, 40), part=pieces | st.just([]), to=st.integers(0, 200))  # fmt: skip
    def edit(
        self, source: jaxkv.Sequence, policy: Policy, at: int, removed: int, part: list[int], to: int
    ) -> Any:
        old = self.tokens[source.id]
        at = at % (len(old) + 1)
        rest = np.concatenate([old[:at], old[at + removed :]])
        to = to % (len(rest) + 1)
        tokens = np.concatenate([rest[:to], part, rest[to:]]).astype(np.int32)[:LONGEST]
        if not len(tokens):
            return multiple()
        result = self.attempt(self.engine.edit, source, tokens, policy)
        if result is None:
            return multiple()
        reuse = result.reuse
        assert reuse.matched + reuse.relocated + reuse.forwarded + reuse.dropped == len(tokens)
        if policy.exact:
            # Forget keeps what stood before the first deletion, and an insertion before that moves it.
            assert reuse.kind == "exact" or (isinstance(policy, Forget) and reuse.relocated)
        return self.adopt(result.sequence, tokens)

    @rule(target=sequences, source=sequences, steps=st.integers(1, 8), hot=st.booleans())
    def generate(self, source: jaxkv.Sequence, steps: int, hot: bool) -> Any:
        # Tokens outside the few symbols come up; stop at most of them, so that some rows end early.
        stop = tuple(range(60, 97))
        out = self.attempt(
            self.engine.generate, source, max_tokens=steps, temperature=float(hot), seed=steps, stop=stop
        )
        if out is None:
            return multiple()
        assert len(out.tokens) == steps or out.finish_reason == "stop"
        return self.adopt(out.sequence, np.concatenate([self.tokens[source.id], out.tokens]))

    @rule(target=sequences, source=sequences)
    def fork(self, source: jaxkv.Sequence) -> jaxkv.Sequence:
        return self.adopt(self.engine.fork(source), self.tokens[source.id])

    @rule(source=sequences, part=st.lists(st.integers(0, 96), min_size=2, max_size=12))
    def score(self, source: jaxkv.Sequence, part: list[int]) -> None:
        logits = self.attempt(self.engine.score, source, part)
        if logits is not None and source.exact:
            tokens = np.concatenate([self.tokens[source.id], part[:-1]]).astype(np.int32)
            np.testing.assert_allclose(logits[-1], exact_logits(tokens.tobytes()), atol=ATOL)

    @rule(source=consumes(sequences))
    def release(self, source: jaxkv.Sequence) -> None:
        self.engine.release(source)
        del self.tokens[source.id]
        with pytest.raises(jaxkv.HandleError):
            self.engine.read_kv(source)

    @rule(need=st.integers(1, NUM_PAGES))
    def evict(self, need: int) -> None:
        memory = self.engine._memory
        possible, free = memory.index.reclaimable, memory.pool.free_count
        memory._make_room(free + need)
        assert memory.pool.free_count >= free + (need if need <= possible else 0)

    @rule(tokens=pieces, seconds=st.integers(1, 20), domain=st.sampled_from("AB"))
    def pin(self, tokens: list[int], seconds: int, domain: str) -> None:
        pin = self.engine.pin(tokens, seconds=seconds, domain=domain)
        self.pinned = True
        root = self.engine.contract.within(jaxkv.Domain(tenant=domain)).digest()
        if pin.length:
            self.pins.append(pin)
            text = np.asarray(tokens[: pin.length], np.int32)
            memory = self.engine._memory
            memory._make_room(memory.pool.free_count + memory.index.reclaimable)
            assert self.engine._memory.index.node_at(root, text) is not None

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 99))
    def unpin(self, number: int) -> None:
        self.engine.unpin(self.pins.pop(number % len(self.pins)))

    @rule(tokens=pieces)
    def declare(self, tokens: list[int]) -> None:
        self.attempt(self.engine.publish_prefix, tokens)

    @rule()
    def save(self) -> None:
        assert self.engine.save_cache(self.saved).tokens == self.engine.stats()["index_tokens"]

    @precondition(lambda self: self.saved.exists())
    @rule()
    def load(self) -> None:
        free = self.engine.stats()["pages_free"]
        loaded = self.engine.load_cache(self.saved)
        assert loaded.tokens <= free * PAGE_SIZE

    @rule(part=st.lists(st.integers(0, SYMBOLS - 1), min_size=1, max_size=30))
    def a_step_fails(self, part: list[int]) -> None:
        """Before it takes the pages: nothing is published, nothing leaks."""
        step, before = execute.run_step, self.engine.stats()

        def fail(*_: Any, **__: Any) -> Any:
            raise StepError

        execute.run_step = fail
        try:
            with pytest.raises((StepError, jaxkv.CapacityError)):
                self.engine.prefill(part, domain="A")
        finally:
            execute.run_step = step
        after = self.engine.stats()
        if self.engine._memory.tiers is None:
            assert after["index_tokens"] <= before["index_tokens"]
        assert after["sequences"] == before["sequences"]

    @rule(source=sequences)
    def look_again(self, source: jaxkv.Sequence) -> None:
        """A sequence still is what it was, whatever was made of it since."""
        kv = self.engine.read_kv(source)
        assert np.isfinite(kv.keys).all()
        np.testing.assert_array_equal(source.tokens, self.tokens[source.id])

    @invariant()
    def everything_held_adds_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        stats = self.engine.stats()
        assert stats["sequences"] == len(self.tokens)
        assert stats["pages_free"] + stats["pages_live"] == stats["pages_total"]
        if self.quota and not self.pinned:  # pins count, and stay when a branch makes two rows of one
            assert self.engine.stats(domain="B")["quota_pages_used"] <= self.quota

    def teardown(self) -> None:
        if hasattr(self, "saved"):
            shutil.rmtree(self.saved.parent)


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

TestEngineLife = EngineMachine.TestCase
TestEngineLife.settings = settings(
    max_examples=8, stateful_step_count=14, deadline=None, suppress_health_check=CHECKS
)


class LongMachine(EngineMachine):
    """10,000 operations."""

    narrow_views = True


TestEngineLongLife = pytest.mark.slow(LongMachine.TestCase)
TestEngineLongLife.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=CHECKS
)
