"""Random lives of sequences over one pool and one index, checked against what every slot holds.

The oracle remembers for each physical slot which text, under which root, was computed into it.
Reading a sequence's segments must give exactly its own tokens, whatever was shared, forked, evicted
or freed.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.sequence import FIRST, HI, LO, PAGE, clip
from jaxkv.errors import CapacityError

PAGES, P = 20, 4
texts = st.lists(st.integers(0, 1), min_size=1, max_size=24)
roots = st.sampled_from([b"A", b"B"])


class Life:
    """A live sequence."""

    def __init__(self, root: bytes, tokens: list[int], segments: np.ndarray) -> None:
        self.root, self.tokens, self.segments = root, tokens, segments


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, P)
        self.index = PrefixIndex(self.pool)
        self.slots: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}
        self.lives: list[Life] = []

    def forget(self, pages: np.ndarray) -> None:
        gone = set(pages.tolist())
        self.slots = {k: v for k, v in self.slots.items() if k[0] not in gone}

    def grow(self, life: Life, more: list[int]) -> None:
        """Appends tokens: in the last page if nobody wrote behind it, else in a fresh page."""
        start, end = len(life.tokens), len(life.tokens) + len(more)
        rows = life.segments.copy()
        at = start
        if len(rows):
            page, _, hi, first = rows[-1].tolist()
            if hi < P and self.pool.filled[page] == hi and first + hi == start:
                at = min(end, start + P - hi)
                rows[-1, HI] = hi + at - start
        births = np.arange(at, end, P, dtype=np.int32)
        missing = len(births) - self.pool.free_count
        if missing > 0:
            self.forget(self.index.evict(missing))
        fresh = self.pool.allocate(births)
        highs = np.minimum(P, end - births)
        new = np.stack([fresh, np.zeros_like(fresh), highs, births], axis=1).astype(np.int32)
        life.segments = np.concatenate([rows, new])
        life.tokens = life.tokens + more
        for row in clip(life.segments, start, end):
            for slot in range(row[LO], row[HI]):
                key = (int(row[PAGE]), slot)
                assert key not in self.slots, "a slot is written twice"
                self.slots[key] = (life.root, tuple(life.tokens[: row[FIRST] + slot + 1]))
        changed = clip(life.segments, start, end)
        self.pool.fill(changed[:, PAGE], changed[:, HI])

    @rule(root=roots, tokens=texts, publish=st.booleans(), grid=st.sampled_from([1, 1, 3]))
    def submit(self, root: bytes, tokens: list[int], publish: bool, grid: int) -> None:
        match = self.index.match(root, np.array(tokens, np.int32), limit=len(tokens) - 1, granularity=grid)
        life = Life(root, tokens[: match.length], match.segments)
        try:
            self.grow(life, tokens[match.length :])
        except CapacityError:
            self.forget(self.pool.release(match.pages))
            return
        self.lives.append(life)
        if publish:
            self.publish(len(self.lives) - 1)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: self.lives)
    def publish(self, which: int) -> None:
        life = self.lives[which % len(self.lives)]
        before = self.index.tokens
        new = self.index.insert(life.root, np.array(life.tokens, np.int32), life.segments)
        assert self.index.tokens == before + new
        again = self.index.match(life.root, np.array(life.tokens, np.int32))
        assert again.length == len(life.tokens)
        self.pool.release(again.pages)

    @rule(which=st.integers(0, 99), more=texts)
    @precondition(lambda self: self.lives)
    def extend(self, which: int, more: list[int]) -> None:
        life = self.lives[which % len(self.lives)]
        if len(life.tokens) > 40:
            return
        before = (life.tokens, life.segments.tolist())
        try:
            self.grow(life, more)
        except CapacityError:
            assert (life.tokens, life.segments.tolist()) == before

    @rule(which=st.integers(0, 99), cut=st.integers(1, 99))
    @precondition(lambda self: self.lives)
    def fork(self, which: int, cut: int) -> None:
        life = self.lives[which % len(self.lives)]
        n = 1 + cut % len(life.tokens)
        branch = Life(life.root, life.tokens[:n], clip(life.segments, 0, n))
        self.pool.retain(branch.segments[:, PAGE])
        self.lives.append(branch)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: self.lives)
    def release(self, which: int) -> None:
        life = self.lives.pop(which % len(self.lives))
        self.forget(self.pool.release(life.segments[:, PAGE]))

    @rule(need=st.integers(1, PAGES))
    def evict(self, need: int) -> None:
        possible = self.index.reclaimable
        tokens = self.index.tokens
        freed = self.index.evict(need)
        assert len(freed) >= need if need <= possible else self.index.tokens == tokens
        self.forget(freed)

    @rule(root=roots)
    def drop(self, root: bytes) -> None:
        self.forget(self.index.drop(root))
        match = self.index.match(root, np.zeros(4, np.int32))
        assert match.length == 0

    @invariant()
    def nothing_leaks(self) -> None:
        self.index.check()
        self.pool.check([*self.index.references(), *(s.segments[:, PAGE] for s in self.lives)])
        assert self.pool.free_count + self.pool.live_count == PAGES

    @invariant()
    def every_sequence_reads_its_own_text(self) -> None:
        for life in self.lives:
            read = [
                self.slots[(int(row[PAGE]), slot)]
                for row in life.segments
                for slot in range(row[LO], row[HI])
            ]
            assert read == [(life.root, tuple(life.tokens[: n + 1])) for n in range(len(life.tokens))]

    def teardown(self) -> None:
        for life in self.lives:
            self.pool.release(life.segments[:, PAGE])
        reclaimable = self.index.reclaimable
        assert reclaimable == self.index.pages
        assert len(self.index.evict(reclaimable)) == reclaimable
        self.pool.check(self.index.references())
        assert self.pool.free_count == PAGES


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
