"""Snapshots beside the prefix index: none leaks, none is where it is not, whatever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.eviction import LRU, CostPerByte
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.radix import below
from jaxkv.cache.snapshots import Snapshots, StateSlots
from jaxkv.errors import CapacityError, HandleError

P = 4
ROOTS = (b"a", b"b")
CONTRACT = CacheContract(weights_digest="w", architecture="{}", kv_dtype="float32")


class Cache:
    """An index with snapshots, and a model of what is known: (root, tokens) with a state, by slot."""

    def __init__(
        self, slots: int, pages: int, grid: int = 1, cost: bool = False, quota: int | None = None
    ) -> None:
        self.pool = PagePool(pages, P)
        self.slots = StateSlots(slots)
        policy = CostPerByte(token_flops=1.0, attention_flops=0.0) if cost else LRU()
        snapshots = Snapshots(self.slots, 100)
        self.index = PrefixIndex(
            self.pool,
            grid=grid,
            policy=policy,
            page_bytes=10,
            snapshots=snapshots,
            quota_of=lambda _: quota,
        )
        self.policy, self.snapshots, self.grid = policy, snapshots, grid
        self.written: dict[int, tuple[bytes, bytes]] = {}  # slot -> root and the tokens before it

    def add(self, root: bytes, tokens: np.ndarray, positions: list[int]) -> None:
        """Computes and publishes a text, whose steps leave states at some positions."""
        need = -(-len(tokens) // P)
        if self.pool.free_count < need:
            self.index.evict(need - self.pool.free_count)
        if self.pool.free_count < need:
            return
        births = np.arange(0, len(tokens), P, dtype=np.int32)
        pages = self.pool.allocate(births)
        high = np.minimum(len(tokens) - births, P)
        self.pool.fill(pages, high)
        rows = np.stack([pages, np.zeros_like(pages), high, births], 1).astype(np.int32)
        held = []
        for position in positions:
            if not self.slots.free_count:
                self.snapshots.evict(1, self.policy)
            try:
                slot = self.slots.allocate()
            except CapacityError:
                break
            held.append((position, slot))
            self.written[slot] = root, tokens[:position].tobytes()
        whole = len(tokens) // self.grid * self.grid
        cut = rows[: -(-whole // P)].copy()
        if len(cut):
            cut[-1, 2] = whole - cut[-1, 3]
        self.index.insert(root, tokens[:whole], cut, contract=CONTRACT)
        self.index.enforce(root)
        self.index.keep_states(root, tokens[:whole], held)
        self.index.enforce(root)
        self.pool.release(pages)
        for _, slot in held:
            self.slots.release(slot)

    def match(self, root: bytes, tokens: np.ndarray) -> None:
        """What is found is a state behind exactly these tokens, as deep as any that is kept."""
        match = self.index.match(root, tokens, limit=len(tokens))
        limit = min(match.length, len(tokens) - 1)
        kept = [
            s.position
            for s in self.snapshots._all.values()
            if self.written[s.slot] == (root, tokens[: s.position].tobytes()) and s.position <= limit
        ]
        assert match.resume == max(kept, default=0)
        if match.state is not None:
            assert self.written[match.state] == (root, tokens[: match.resume].tobytes())
            self.slots.release(match.state)
        self.pool.release(match.pages)

    def check(self) -> None:
        self.index.check()
        self.slots.check(self.snapshots.references())
        self.pool.check(self.index.references())
        assert len(self.snapshots) + self.slots.free_count == self.slots.num_slots


texts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(lambda t: np.array(t, np.int32))
actions = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(ROOTS), texts, st.lists(st.integers(1, 14), max_size=3)),
    st.tuples(st.just("match"), st.sampled_from(ROOTS), texts),
    st.tuples(st.just("evict"), st.integers(1, 4)),
    st.tuples(st.just("give up"), st.integers(1, 3)),
    st.tuples(st.just("drop"), st.sampled_from(ROOTS)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(actions, max_size=30),
    st.integers(1, 6),
    st.integers(4, 12),
    st.sampled_from([1, 4]),
    st.booleans(),
)
def test_whatever_happens_every_snapshot_is_where_it_says(
    steps: list[tuple[object, ...]], slots: int, pages: int, grid: int, cost: bool
) -> None:
    cache = Cache(slots, pages, grid, cost)
    for name, *args in steps:
        if name == "add":
            root, tokens, positions = args
            cache.add(root, tokens, sorted({p for p in positions if p <= len(tokens)}))
        elif name == "match":
            cache.match(*args)
        elif name == "evict":
            cache.index.evict(*args)
        elif name == "give up":
            cache.snapshots.evict(args[0], cache.policy)
        else:
            cache.index.drop(*args)
        cache.check()
    for root in ROOTS:
        cache.index.drop(root)
    assert cache.slots.free_count == slots
    assert cache.pool.free_count == pages


@settings(max_examples=40, deadline=None)
@given(st.lists(actions, max_size=20), st.integers(110, 400), st.booleans())
def test_a_quota_holds_for_pages_and_snapshots_together(
    steps: list[tuple[object, ...]], quota: int, cost: bool
) -> None:
    """A page counts 10 bytes and a snapshot 100. Whatever is over goes, and only the root's own."""
    cache = Cache(8, 40, cost=cost, quota=quota)
    for name, *args in steps:
        others = {root: charge(cache, root) for root in ROOTS if root != args[0]}
        if name == "add":
            root, tokens, positions = args
            cache.add(root, tokens, sorted({p for p in positions if p <= len(tokens)}))
            assert charge(cache, root) <= quota
            if cache.pool.free_count and cache.slots.free_count:
                assert {r: charge(cache, r) for r in others} == others
        elif name == "match":
            cache.match(*args)
        cache.check()


def charge(cache: Cache, root: bytes) -> int:
    tree = cache.index.tree(root)
    if tree is None:
        return 0
    pages = sum(len(node.segments) for node in below(tree.top))
    assert tree.charge(10) == 10 * pages + 100 * sum(len(node.states or ()) for node in below(tree.top))
    return tree.charge(10)


def test_a_text_that_is_too_long_is_cut_to_leave_room_for_one_snapshot() -> None:
    """12 pages and 4 snapshots have 520 bytes. Of 195, 9 pages and one snapshot stay, the deepest."""
    cache = Cache(8, 40, quota=195)
    cache.add(b"a", np.arange(48, dtype=np.int32), [12, 24, 36, 48])
    tree = cache.index.tree(b"a")
    assert tree is not None
    assert (tree.rows, tree.states, charge(cache, b"a")) == (9, 1, 190)
    assert [s.position for s in cache.snapshots._all.values()] == [36]
    cache.add(b"a", np.arange(100, 108, dtype=np.int32), [4])  # another text: the oldest goes first
    assert charge(cache, b"a") <= 195
    assert cache.index.match(b"a", np.arange(100, 108, dtype=np.int32)).resume == 4


def test_an_entry_is_worth_what_it_saves_up_to_its_last_snapshot() -> None:
    """KV behind the last snapshot saves no computing, so that entry goes first, younger or not."""
    cache = Cache(4, 16, cost=True)
    cache.add(b"a", np.arange(12, dtype=np.int32), [12])
    cache.add(b"a", np.arange(100, 112, dtype=np.int32), [])
    freed = cache.index.evict(1)
    assert len(freed) == 3
    assert len(cache.snapshots) == 1
    cache.check()


def test_pinned_and_used_snapshots_stay() -> None:
    cache = Cache(2, 16)
    cache.add(b"a", np.arange(8, dtype=np.int32), [4, 8])
    match = cache.index.match(b"a", np.arange(5, dtype=np.int32))
    assert cache.snapshots.evict(2, cache.policy) == 1  # that at 8
    assert match.state is not None
    cache.slots.release(match.state)
    cache.pool.release(match.pages)
    pin = cache.index.pin(b"a", np.arange(8, dtype=np.int32), None)
    assert cache.snapshots.evict(1, cache.policy) == 0
    cache.index.unpin(pin.id)
    assert cache.snapshots.evict(1, cache.policy) == 1
    cache.check()


def test_a_slot_that_nobody_holds_is_refused() -> None:
    slots = StateSlots(2)
    slot = slots.allocate()
    assert not slots.release(slots.none)
    slots.retain(slots.none)
    assert slots.release(slot)
    for call in (slots.release, slots.retain):
        for bad in (slot, 7, -1):
            with pytest.raises(HandleError, match=f"state slot {bad} is"):
                call(bad)
    slots.allocate(), slots.allocate()
    with pytest.raises(CapacityError, match="all 2 states are in use"):
        slots.allocate()
    assert sorted(slots.rebuild([1, 1])) == [0]
    slots.check([1, 1])
    with pytest.raises(HandleError, match="state slot 1 counts 2 references"):
        slots.check([1])
