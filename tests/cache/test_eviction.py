"""What the prefix index forgets, in which order, and what it never takes away."""

from __future__ import annotations

from index_cases import ROOT, intact, ints, make, publish

from jaxkv.cache.prefix import Cause


def test_eviction_takes_the_leaf_not_used_for_longest() -> None:
    pool, index = make()
    for text in ("aaaa1111", "aaaa2222", "bbbb3333"):
        publish(pool, index, ints(text))
    pool.release(index.match(ROOT, ints("aaaa1111")).pages)
    assert len(index.evict(1)) == 1
    assert index.match(ROOT, ints("aaaa2222")).length == 4
    assert index.match(ROOT, ints("aaaa1111")).length == 8
    assert index.match(ROOT, ints("bbbb3333")).length == 8


def test_eviction_climbs_from_leaves_to_their_parents() -> None:
    pool, index = make()
    for text in ("aaaa1111", "aaaa2222"):
        publish(pool, index, ints(text))
    assert len(index.evict(3)) == 3
    assert (index.nodes, index.tokens, index.pages) == (0, 0, 0)
    assert pool.free_count == pool.num_pages
    intact(pool, index)


def test_a_hit_is_pinned_from_match_to_use() -> None:
    """CASE 31."""
    pool, index = make(4)
    publish(pool, index, ints("aaaabbbb"))
    publish(pool, index, ints("xxxx"))
    match = index.match(ROOT, ints("aaaabb"))
    freed = index.evict(1)
    assert len(freed) == 1
    assert not set(freed) & set(match.pages)
    assert index.reclaimable == 0
    assert len(index.evict(1)) == 0
    assert (pool.refcount[match.pages] > 0).all()
    intact(pool, index, match)
    pool.release(match.pages)
    assert index.reclaimable == 2
    intact(pool, index)


def test_a_demand_that_cannot_be_met_costs_nobody_the_cache() -> None:
    pool, index = make(8)
    publish(pool, index, ints("aaaabbbb"))
    pin = index.match(ROOT, ints("aaaa"))
    assert index.reclaimable == 1
    assert len(index.evict(2)) == 0
    assert index.tokens == 8
    assert len(index.evict(1)) == 1
    assert index.tokens == 0 or index.tokens == 4
    intact(pool, index, pin)


def test_leaves_that_free_nothing_go_only_when_something_lies_behind_them() -> None:
    pool, index = make(16)
    for text in ("aaaa", "aaaabbbb", "zzzz"):
        publish(pool, index, ints(text))
    used = index.match(ROOT, ints("aaaabbbb"))
    pool.release(used.pages[:1])
    pool.release(index.match(ROOT, ints("zzzz")).pages)
    assert index.evict(1).tolist() == [2]  # zzzz, although it is younger than the leaf in use
    assert index.tokens == 8
    assert index.evict(1).tolist() == [0]  # to get at aaaa, the leaf in use has to be forgotten
    assert index.tokens == 0
    pool.check([used.pages[1:]])


def test_touched_leaves_move_once_and_dead_entries_vanish() -> None:
    pool, index = make(64)
    for i in range(16):
        publish(pool, index, ints([i] * 4))
    for i in reversed(range(16)):
        pool.release(index.match(ROOT, ints([i] * 4)).pages)
    for i in reversed(range(16)):
        assert len(index.evict(1)) == 1
        assert index.match(ROOT, ints([i] * 4)).length == 0
    assert index.nodes == 0


def test_drop_forgets_one_root_only() -> None:
    pool, index = make()
    publish(pool, index, ints("aaaabbbb"), b"old weights")
    publish(pool, index, ints("aaaacccc"), b"old weights")
    publish(pool, index, ints("aaaabbbb"), b"new weights")
    assert len(index.drop(b"old weights")) == 3
    assert len(index.drop(b"old weights")) == 0
    old, new = (index.match(r, ints("aaaabbbb")) for r in (b"old weights", b"new weights"))
    assert old.end.cause is Cause.ABSENT
    assert new.length == 8
    assert index.nodes == 1
    intact(pool, index, new)
    pool.release(new.pages)
    assert len(index.evict(2)) == 2
    intact(pool, index)
