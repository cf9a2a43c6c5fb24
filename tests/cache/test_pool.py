"""Pages: who holds them, what is free, how far they are written."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxkv.cache.pool import PagePool
from jaxkv.errors import CapacityError, ConfigError, HandleError


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def state(pool: PagePool) -> list[list[int]]:
    return [pool.refcount.tolist(), pool.birth.tolist(), pool.filled.tolist(), [pool.free_count]]


def test_a_fresh_pool_hands_out_ascending_contiguous_pages() -> None:
    pool = PagePool(8, 4)
    assert pool.allocate(ids(0, 4, 8)).tolist() == [0, 1, 2]
    assert pool.allocate(ids(12)).tolist() == [3]
    assert (pool.free_count, pool.live_count) == (4, 4)
    assert pool.birth[:4].tolist() == [0, 4, 8, 12]
    assert pool.refcount[:4].tolist() == [1, 1, 1, 1]


def test_freed_pages_come_back_together_and_forget_what_was_written() -> None:
    pool = PagePool(6, 4)
    pages = pool.allocate(ids(0, 4, 8))
    pool.fill(pages, 4)
    assert pool.release(pages[::-1]).tolist() == [0, 1, 2]
    assert pool.allocate(ids(5, 6, 7)).tolist() == [0, 1, 2]
    assert pool.filled[:3].tolist() == [0, 0, 0]


def test_a_page_is_freed_by_its_last_reference_only() -> None:
    pool = PagePool(4, 4)
    page = pool.allocate(ids(0))
    pool.retain(page)
    assert pool.release(page).tolist() == []
    assert pool.release(page).tolist() == [0]


def test_repeats_in_one_array_count() -> None:
    pool = PagePool(4, 4)
    pool.allocate(ids(0, 4))
    pool.retain(ids(1, 0, 1))
    assert pool.refcount[:2].tolist() == [2, 3]
    assert pool.release(ids(1, 1, 0, 1)).tolist() == [1]
    assert pool.refcount[:2].tolist() == [1, 0]
    pool.check([ids(0)])


def test_too_many_pages_are_refused_with_the_numbers_and_nothing_changes() -> None:
    pool = PagePool(4, 4)
    pool.allocate(ids(0))
    before = state(pool)
    with pytest.raises(CapacityError, match="4 pages are needed, 3 are free of 4"):
        pool.allocate(np.zeros(4, np.int32))
    assert state(pool) == before


@pytest.mark.parametrize("pages", [[0, 0], [1], [0, 4], [-1], [0, 2**31 - 1]])
def test_double_free_and_unknown_pages_are_refused_and_nothing_changes(pages: list[int]) -> None:
    """CASES 27, 29."""
    pool = PagePool(4, 4)
    pool.allocate(ids(0))
    before = state(pool)
    with pytest.raises(HandleError, match=r"page -?\d+ is"):
        pool.release(ids(*pages))
    assert state(pool) == before


@pytest.mark.parametrize("page", [1, 4, -1])
def test_a_free_or_unknown_page_cannot_be_retained(page: int) -> None:
    pool = PagePool(4, 4)
    pool.allocate(ids(0))
    before = state(pool)
    with pytest.raises(HandleError, match=f"page {page} is"):
        pool.retain(ids(0, page))
    assert state(pool) == before


def test_the_watermark_only_rises_and_stays_within_the_page() -> None:
    pool = PagePool(4, 8)
    pages = pool.allocate(ids(0, 8))
    pool.fill(pages, ids(8, 3))
    pool.fill(ids(1, 1), ids(5, 4))
    assert pool.filled[:2].tolist() == [8, 5]
    before = state(pool)
    for page, upto in ((1, 4), (1, 9), (0, 7), (2, 1)):
        with pytest.raises(HandleError, match=f"page {page} is .* would be filled to {upto}"):
            pool.fill(ids(page), ids(upto))
    assert state(pool) == before


def test_nothing_asked_nothing_done() -> None:
    pool = PagePool(2, 4)
    before = state(pool)
    assert pool.allocate([]).tolist() == []
    assert pool.release([]).tolist() == []
    pool.retain([])
    pool.fill([], [])
    assert state(pool) == before


def test_births_are_positions_and_sizes_are_positive() -> None:
    with pytest.raises(HandleError, match="births holds -1"):
        PagePool(2, 4).allocate(ids(-1))
    with pytest.raises(ConfigError, match="num_pages is 0"):
        PagePool(0, 4)
    with pytest.raises(ConfigError, match="page_size is -2"):
        PagePool(4, -2)


@pytest.mark.parametrize("pages", [[0.5], [[0]], [2**31]])
def test_pages_must_be_a_row_of_int32(pages: list) -> None:
    with pytest.raises(HandleError, match=r"pages (has|holds)"):
        PagePool(2, 4).retain(np.array(pages))


def test_integrity_check_sees_a_leak_and_a_broken_free_list() -> None:
    pool = PagePool(4, 4)
    pages = pool.allocate(ids(0, 4))
    pool.check([pages])
    with pytest.raises(HandleError, match="page 1 counts 1 references, expected the 0"):
        pool.check([pages[:1]])
    with pytest.raises(HandleError, match="page 0 counts 1 references, expected the 2"):
        pool.check([pages, pages[:1]])
    pool.refcount[1] = 0
    with pytest.raises(HandleError, match="page 1 is 0 times in the free list"):
        pool.check([pages[:1]])


def test_ten_thousand_random_operations_leak_nothing() -> None:
    """CASE 29."""
    rng = np.random.default_rng(0)
    pool = PagePool(48, 4)
    holders: list[list[int]] = []
    for step in range(10_000):
        counted = Counter(page for holder in holders for page in holder)
        match rng.integers(4):
            case 0:
                n = int(rng.integers(1, 12))
                if n > pool.free_count:
                    with pytest.raises(CapacityError):
                        pool.allocate(np.zeros(n, np.int32))
                else:
                    holders.append(pool.allocate(rng.integers(0, 99, n, np.int32)).tolist())
                    assert not counted.keys() & set(holders[-1])
            case 1 if holders:
                pages = list(holders[rng.integers(len(holders))])
                pages = [p for p in pages if rng.random() < 0.7] * int(rng.integers(1, 3))
                pool.retain(np.array(pages, np.int32))
                holders.append(pages)
            case 2 | 3 if holders:
                pages = holders.pop(rng.integers(len(holders)))
                gone = {p for p in pages if counted[p] == pages.count(p)}
                assert pool.release(np.array(pages, np.int32)).tolist() == sorted(gone)
        assert pool.free_count + pool.live_count == 48
        if step % 20 == 0:
            pool.check(holders)
    for pages in holders:
        pool.release(np.array(pages, np.int32))
    pool.check([])
    assert pool.free_count == 48
