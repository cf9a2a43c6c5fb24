"""Policies, quotas, pins, expiry and what is remembered of entries that went. No clock but ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_cases import ROOT, P, covered, intact, ints, publish, write

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.eviction import LFU, LRU, TTL, CostPerByte, EvictionPolicy, Priority, Queue, check_policy
from jaxkv.cache.metrics import Distribution, Ghosts, Metrics
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import Cause, PrefixIndex
from jaxkv.cache.radix import below
from jaxkv.cache.sequence import PAGE
from jaxkv.errors import ConfigError

CONTRACT = CacheContract(weights_digest="w", architecture="{}", kv_dtype="float32", tenant="t")
PUBLIC = b"public"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(policy: EvictionPolicy | None = None, pages: int = 64, **more: Any) -> tuple[PagePool, PrefixIndex]:
    pool = PagePool(pages, P)
    return pool, PrefixIndex(pool, policy=policy, **more)


def use(pool: PagePool, index: PrefixIndex, text: str, times: int = 1, root: bytes = ROOT) -> int:
    for _ in range(times):
        match = index.match(root, ints(text))
        pool.release(match.pages)
    return match.length


def cached(index: PrefixIndex, *texts: str) -> list[bool]:
    """Which texts are whole in the tree, without touching it."""
    return [index._walk(ROOT, ints(t), ints(t).tobytes())[1].position == len(t) for t in texts]


def put(pool: PagePool, index: PrefixIndex, text: str, **options: Any) -> None:
    """Publishes under a contract, as an engine does."""
    tokens, root = ints(text), options.pop("root", ROOT)
    match = index.match(root, tokens, public=options.get("public"))
    own = write(pool, match.length, len(tokens))
    index.insert(root, tokens, np.concatenate([match.segments, own]), **options)
    index.enforce(root)
    pool.release(match.pages)
    pool.release(own[:, PAGE])
    intact(pool, index)


# ---- order -----------------------------------------------------------------------------------


def test_lfu_gives_up_what_was_used_least_and_of_equals_the_oldest() -> None:
    pool, index = make(LFU())
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        publish(pool, index, ints(text))
    use(pool, index, "aaaa", 3)
    use(pool, index, "cccc", 2)
    use(pool, index, "bbbb", 2)
    went = []
    while index.nodes:
        index.evict(1)
        went.append(cached(index, "aaaa", "bbbb", "cccc", "dddd"))
    assert went == [[True, True, True, False], [True, True, False, False], [True] + [False] * 3, [False] * 4]


def test_priority_goes_before_use() -> None:
    pool, index = make(Priority())
    put(pool, index, "aaaa", priority=2)
    put(pool, index, "bbbb", priority=1)
    put(pool, index, "cccc")
    use(pool, index, "cccc", 5)
    index.evict(1)
    assert cached(index, "aaaa", "bbbb", "cccc") == [True, True, False]
    put(pool, index, "bbbb", priority=3)  # used again for something more important
    index.evict(1)
    assert cached(index, "aaaa", "bbbb") == [False, True]


def test_ttl_forgets_what_was_not_used_and_says_so() -> None:
    clock = Clock()
    pool, index = make(TTL(seconds=10), clock=clock)
    publish(pool, index, ints("aaaa1111"))
    publish(pool, index, ints("bbbb"))
    clock.now += 9
    use(pool, index, "aaaa1111")
    assert index.expire().tolist() == []
    clock.now += 1
    assert len(index.expire()) == 1
    assert cached(index, "aaaa1111", "bbbb") == [True, False]
    assert index.match(ROOT, ints("bbbb")).end.cause is Cause.EXPIRED
    clock.now += 9
    assert len(index.expire()) == 2
    assert index.metrics.removed == {"expired": 2, "expired_tokens": 12}
    assert pool.free_count == pool.num_pages
    intact(pool, index)


@pytest.mark.parametrize("seconds", [0, -1, True, "1", None])
def test_ttl_is_a_positive_time(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"TTL.seconds is"):
        TTL(seconds=seconds)


def test_cost_per_byte_is_the_sum_over_tokens_of_what_each_would_take() -> None:
    """Eq. 9 against a sum token by token: it is the integral, ½ C_attn a token less than the sum."""
    policy = CostPerByte(token_flops=7.0, attention_flops=3.0)
    for start, end in ((0, 1), (0, 40), (17, 18), (100, 164)):
        total = sum(7.0 + 3.0 * (i + 1) for i in range(start, end))
        assert policy.cost(start, end) == pytest.approx(total - 3.0 * (end - start) / 2)


def test_cost_per_byte_keeps_what_is_dear_and_does_not_keep_it_for_ever() -> None:
    pool, index = make(CostPerByte(token_flops=1.0, attention_flops=10.0))
    publish(pool, index, ints("x" * 40))
    publish(pool, index, ints("x" * 40 + "deep"))  # dear: it attends 40 tokens
    publish(pool, index, ints("flat"))
    use(pool, index, "flat")
    index.evict(1)
    assert cached(index, "x" * 40 + "deep", "flat") == [True, False]
    # The worth of what goes is the floor of what comes: unused, the dear one goes in the end.
    deep = "x" * 40 + "deep"
    for turn in range(200):
        publish(pool, index, ints(f"{turn:04d}"))
        use(pool, index, f"{turn:04d}", 3)
        index.evict(1)
        if not cached(index, deep)[0]:
            break
    assert not cached(index, deep)[0]
    assert turn > 1
    intact(pool, index)


def test_a_page_of_few_tokens_is_worth_less_than_a_full_one() -> None:
    pool, index = make(CostPerByte(token_flops=1.0, attention_flops=0.0))
    publish(pool, index, ints("f" * P))
    publish(pool, index, ints("1"))
    index.evict(1)
    assert cached(index, "f" * P, "1") == [True, False]


@pytest.mark.parametrize("wrong", [None, "LRU", LRU, 3])
def test_a_policy_is_a_value(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"eviction is .*, expected a policy: LRU\(\), LFU\(\)"):
        check_policy(wrong)


@pytest.mark.parametrize("policy", [LRU(), LFU(), Priority(), TTL(seconds=5), CostPerByte(token_flops=1.0)])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2)), max_size=40))
def test_eviction_follows_the_policys_keys_whatever_was_used(
    policy: EvictionPolicy, events: list[tuple[int, int]]
) -> None:
    """Against the smallest key of all leaves, found by looking at every one of them."""
    pool, index = make(policy)
    for number, kind in events:
        text = chr(97 + number) * (1 + number)
        if kind == 2:
            use(pool, index, text, 1 + number % 3)
        else:
            put(pool, index, text, priority=number % 3 * kind)
        if number == 11 and index.nodes:
            tree = index.tree(ROOT)
            assert tree is not None
            leaves = [n for n in below(tree.top) if n.evictable]
            first = min(leaves, key=lambda n: policy.key(n, 1))
            index.evict(1)
            assert first.parent is None
            intact(pool, index)


def test_the_queue_forgets_entries_of_leaves_that_went_another_way() -> None:
    pool, index = make(pages=256)
    for turn in range(50):
        for i in range(20):
            publish(pool, index, ints(f"{i:04d}{turn:04d}"))
        index.drop(ROOT)
    assert len(index._queue._heap) <= 2 * 64 + 64
    intact(pool, index)


def test_eviction_looks_at_what_goes_not_at_the_whole_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    key = LRU.key

    def counted(self: LRU, entry: Any, page_bytes: int) -> Any:
        nonlocal looked
        looked += 1
        return key(self, entry, page_bytes)

    monkeypatch.setattr(LRU, "key", counted)
    pool, index = make(pages=3000)
    for i in range(2000):
        publish(pool, index, ints([i] * P))
    looked = 0
    for _ in range(100):
        index.evict(1)
    assert looked <= 200
    assert index.nodes == 1900


# ---- what is remembered ----------------------------------------------------------------------


def test_a_match_says_that_what_it_misses_was_evicted() -> None:
    pool, index = make()
    publish(pool, index, ints("aaaa1111"))
    publish(pool, index, ints("aaaa2222"))
    index.evict(1)
    ends = {t: index.match(ROOT, ints(t)).end for t in ("aaaa1111", "aaaa11", "aaaa1X", "aaaa2222", "aaaa3")}
    assert {t: (e.cause, e.position) for t, e in ends.items()} == {
        "aaaa1111": (Cause.EVICTED, 4),
        "aaaa11": (Cause.EVICTED, 4),
        "aaaa1X": (Cause.TOKENS, 4),
        "aaaa2222": (Cause.COMPLETE, 8),
        "aaaa3": (Cause.TOKENS, 4),
    }
    assert str(ends["aaaa1111"]) == "what was cached from position 4 on was evicted"
    publish(pool, index, ints("aaaa1111"))
    assert index.match(ROOT, ints("aaaa1111")).end.cause is Cause.COMPLETE


def test_it_is_known_also_when_the_whole_tree_went_and_only_under_its_own_root() -> None:
    pool, index = make()
    publish(pool, index, ints("aaaa"), b"A")
    index.evict(1)
    assert index.match(b"A", ints("aaaa")).end.cause is Cause.EVICTED
    assert index.match(b"A", ints("abcd")).end.cause is Cause.ABSENT
    assert index.match(b"B", ints("aaaa")).end.cause is Cause.ABSENT


def test_memory_of_what_went_is_bounded() -> None:
    ghosts = Ghosts()
    for i in range(Ghosts.MOST + 10):
        ghosts.add(i, b"k", bytes(400), "evicted")
    assert len(ghosts) == Ghosts.MOST
    assert ghosts.find(0, b"k", bytes(8), 0) is None
    assert ghosts.find(Ghosts.MOST, b"k", bytes(8), 0) == "evicted"
    assert max(len(run) for run, _ in ghosts._runs.values()) == 4 * Ghosts.TOKENS


def test_trees_of_domains_that_have_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.cache.retention.MAX_IDLE", 8)
    pool, index = make()
    for i in range(30):
        publish(pool, index, ints("aaaa"), b"%d" % i)
        index.evict(1)
    assert len(index._trees) <= 9
    intact(pool, index)


def test_distributions_count_and_bound() -> None:
    seen = Distribution()
    assert (seen.mean, seen.quantile(0.5)) == (0.0, 0.0)
    values = [0.0, 0.3, 1.0, 5.0, 700.0]
    for value in values:
        seen.add(value)
    assert seen.mean == pytest.approx(np.mean(values))
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        exact = float(np.quantile(values, share, method="inverted_cdf"))
        assert exact <= seen.quantile(share) <= max(2 * exact, 1e-15)


def test_lifetimes_and_gaps_are_on_the_clock() -> None:
    clock = Clock()
    pool, index = make(clock=clock, metrics=Metrics())
    publish(pool, index, ints("aaaa"))
    clock.now += 4
    use(pool, index, "aaaa")
    clock.now += 6
    index.evict(1)
    assert index.metrics.gaps.mean == 4
    assert index.metrics.lifetimes.mean == 10
    assert index.metrics.removed == {"evicted": 1, "evicted_tokens": 4}


# ---- pins ------------------------------------------------------------------------------------


def test_a_pin_keeps_its_prefix_until_it_expires() -> None:
    clock = Clock()
    pool, index = make(pages=8, clock=clock)
    publish(pool, index, ints("aaaabbbbcccc"))
    publish(pool, index, ints("xxxx"))
    pin = index.pin(ROOT, ints("aaaabb"), clock.now + 60)
    assert (pin.length, index.nodes) == (6, 3)
    assert index.pinned_pages == 2
    assert index.reclaimable == 2  # xxxx, and the last page; the page of the cut is pinned
    assert len(index.evict(3)) == 0
    assert len(index.evict(2)) == 2
    assert cached(index, "aaaabb", "aaaabbb", "xxxx") == [True, False, False]
    intact(pool, index)
    clock.now += 60
    index.expire()
    assert (index.reclaimable, index.pinned_pages) == (2, 0)
    assert len(index.evict(2)) == 2
    assert pool.free_count == 8
    intact(pool, index)


def test_pins_overlap_and_are_taken_off_one_by_one() -> None:
    pool, index = make()
    publish(pool, index, ints("aaaabbbb"))
    long, short = index.pin(ROOT, ints("aaaabbbb"), None), index.pin(ROOT, ints("aa"), None)
    nothing = index.pin(ROOT, ints("zz"), None)
    assert (long.length, short.length, nothing.length) == (8, 2, 0)
    publish(pool, index, ints("aabb"))  # a branch splits nothing of the pins away
    intact(pool, index)
    index.unpin(long.id)
    index.unpin(long.id)
    index.unpin(nothing.id)
    while index.reclaimable and len(index.evict(1)):
        pass
    assert cached(index, "aa", "aaa") == [True, False]
    index.unpin(short.id)
    assert len(index.evict(1)) == 1
    assert pool.free_count == pool.num_pages
    intact(pool, index)


def test_dropping_a_root_takes_its_pins_along() -> None:
    pool, index = make()
    publish(pool, index, ints("aaaabbbb"))
    pin = index.pin(ROOT, ints("aaaabbbb"), 2000.0)
    index.drop(ROOT)
    assert pool.free_count == pool.num_pages
    index.expire()
    index.unpin(pin.id)
    intact(pool, index)


# ---- quotas ----------------------------------------------------------------------------------


def test_a_domain_over_its_quota_gives_up_its_own_and_nobody_elses() -> None:
    pool, index = make(quota_of=lambda _: 3)
    publish(pool, index, ints("zzzz"), b"older")
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        put(pool, index, text, contract=CONTRACT)
    assert cached(index, "aaaa", "bbbb", "cccc", "dddd") == [False, True, True, True]
    assert index.match(ROOT, ints("aaaa")).end.cause is Cause.QUOTA
    assert index.match(b"older", ints("zzzz")).length == 4
    tree = index.tree(ROOT)
    assert tree is not None
    assert (tree.rows, tree.tokens, tree.nodes) == (3, 12, 3)


def test_a_text_longer_than_the_quota_is_kept_as_far_as_it_goes() -> None:
    pool, index = make(quota_of=lambda _: 2)
    put(pool, index, "aaaabbbbcccc", contract=CONTRACT)
    match = index.match(ROOT, ints("aaaabbbbcccc"))
    assert (match.length, match.end.cause) == (8, Cause.QUOTA)
    assert covered(match) == list(range(8))
    pool.release(match.pages)
    intact(pool, index)
    index.set_quota(ROOT, 1)
    assert len(index.enforce(ROOT)) == 1
    assert cached(index, "aaaa", "aaaab") == [True, False]
    index.set_quota(ROOT, None)
    put(pool, index, "aaaabbbbcccc", contract=CONTRACT)
    assert cached(index, "aaaabbbbcccc") == [True]


def test_a_quota_on_a_grid_keeps_whole_chunks() -> None:
    pool, index = make(grid=8, quota_of=lambda _: 3)
    put(pool, index, "aaaabbbbccccdddd", contract=CONTRACT)
    match = index.match(ROOT, ints("aaaabbbbccccdddd"))
    assert match.length == 8
    intact(pool, index, match)


def test_declared_prefixes_count_towards_no_quota() -> None:
    pool, index = make(quota_of=lambda _: 1)
    publish(pool, index, ints("systemprompt"), PUBLIC)
    put(pool, index, "systempromptmine", contract=CONTRACT, public=PUBLIC)
    tree = index.tree(ROOT)
    assert tree is not None
    assert (tree.rows, tree.tokens) == (1, 16)
    assert cached(index, "systempromptmine") == [True]
    put(pool, index, "systempromptelse", contract=CONTRACT, public=PUBLIC)
    assert cached(index, "systempromptmine", "systempromptelse") == [False, True]
    # A copy that the domain had computed itself is its own, whatever was declared since.
    pool, index = make(quota_of=lambda _: 9)
    put(pool, index, "systemprompt", contract=CONTRACT)
    publish(pool, index, ints("systemprompt"), PUBLIC)
    put(pool, index, "systempromptmine", contract=CONTRACT, public=PUBLIC)
    tree = index.tree(ROOT)
    assert tree is not None
    assert tree.rows == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=14), st.integers(0, 5)), min_size=1, max_size=20),
    st.sampled_from([1, 2, 4]),
)
def test_random_lives_with_quotas_and_pins_stay_whole(events: list[tuple[str, int]], quota: int) -> None:
    clock = Clock()
    pool, index = make(clock=clock, quota_of=lambda _: quota)
    for text, kind in events:
        clock.now += 1
        if kind <= 2:
            put(pool, index, text, contract=CONTRACT)
            tree = index.tree(ROOT)
            assert tree is not None
            if not index._pins:
                assert tree.rows <= quota
        elif kind == 3:
            index.pin(ROOT, ints(text), clock.now + 3)
        elif kind == 4:
            index.evict(1)
        else:
            index.expire()
        intact(pool, index)
    clock.now += 10
    index.expire()
    index.enforce(ROOT)
    tree = index.tree(ROOT)
    assert tree is None or tree.rows <= quota
    index.evict(index.reclaimable)
    assert pool.free_count == pool.num_pages


def test_a_queue_takes_a_leaf_once() -> None:
    pool, index = make()
    publish(pool, index, ints("aaaa"))
    tree = index.tree(ROOT)
    assert tree is not None
    leaf = next(below(tree.top))
    queue = Queue(LRU(), 1, 4)
    queue.push(leaf)
    queue.push(leaf)
    assert queue.peek() is leaf
    assert queue.pop() is leaf
    assert queue.pop() is None
