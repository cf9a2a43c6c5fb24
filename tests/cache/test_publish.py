"""Publishing reads what is new and nothing else, and still refuses whatever is not exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_cases import ROOT, P, covered, intact, ints, make, write

from jaxkv.cache import prefix
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.radix import Place
from jaxkv.cache.sequence import HI, LO, PAGE, clip, ends, rows_of, starts
from jaxkv.errors import ContractError, HandleError

OTHER = b"another contract"


def on(pool: PagePool, segments: np.ndarray, count: int) -> np.ndarray:
    """Segments with `count` more tokens in fresh pages."""
    end = int(ends(segments)[-1])
    return np.concatenate([segments, write(pool, end, end + count)])


def moved(pool: PagePool, rows: np.ndarray, at: int) -> np.ndarray:
    """The same positions, but row `at` is a page that was born elsewhere, as after a relocation."""
    changed = rows.copy()
    start, end = int(starts(rows)[at]), int(ends(rows)[at])
    elsewhere = write(pool, start + 3, end + 3)[0]
    changed[at] = [elsewhere[PAGE], 0, end - start, start]
    return changed


@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("hinted", [True, False])
def test_an_approximate_row_is_refused_wherever_it_would_be_taken(row: int, hinted: bool) -> None:
    """Rows 0 and 1 are cached. One of the others is stale: nothing is taken. A stale copy of a cached one is
    not taken either, whether it is looked at or not."""
    pool, index = make()
    tokens = ints(range(6 * P))
    cached = write(pool, 0, 2 * P)
    place = index.publish(ROOT, tokens[: 2 * P], cached)
    bad = moved(pool, on(pool, cached, 4 * P), row)
    since = place if hinted else None
    rows = clip(bad, 2 * P, 6 * P) if hinted else bad
    if row < 2:
        index.publish(ROOT, tokens, rows, since=since)
        assert index.tokens == 6 * P
        match = index.match(ROOT, tokens)
        assert match.pages.tolist() == [*cached[:, PAGE].tolist(), *bad[2:, PAGE].tolist()]
    else:
        with pytest.raises(ContractError, match="relocated KV is private"):
            index.publish(ROOT, tokens, rows, since=since)
        assert (index.tokens, index.nodes) == (2 * P, 1)
        assert index.match(ROOT, tokens).length == 2 * P
    index.check()


@pytest.mark.parametrize("row", range(4))
def test_where_nothing_is_cached_every_row_is_checked(row: int) -> None:
    pool, index = make()
    tokens = ints(range(4 * P))
    elsewhere = index.publish(OTHER, tokens, write(pool, 0, 4 * P))
    good = write(pool, 0, 4 * P)
    for since in (None, elsewhere):  # of another root: no place under this one
        with pytest.raises(ContractError, match="relocated KV is private"):
            index.publish(ROOT, tokens, moved(pool, good, row), since=since)
        unwritten = good.copy()
        unwritten[row, PAGE] = pool.allocate(good[row : row + 1, 3])[0]
        with pytest.raises(HandleError, match="0 slots written"):
            index.publish(ROOT, tokens, unwritten, since=since)
    assert index.tree(ROOT) is None


def test_a_row_that_begins_in_a_cached_page_is_taken_from_its_cut_on() -> None:
    pool, index = make()
    tokens = ints(range(2 * P))
    rows = write(pool, 0, 2 * P)
    first = rows[:1].copy()
    first[0, HI] = 3
    place = index.publish(ROOT, tokens[:3], first)
    assert place is not None
    place = index.publish(ROOT, tokens, clip(rows, 3, 2 * P), since=place)
    match = index.match(ROOT, tokens)
    assert covered(match) == list(range(2 * P))
    assert match.segments.tolist() == rows.tolist()
    assert place == Place(match.place.node, 2 * P)  # type: ignore[union-attr]
    with pytest.raises(HandleError, match="expected positions 3 to 7"):
        index.publish(ROOT, tokens, rows, since=Place(place.node.parent, 3))  # not from there on
    pool.release(rows[:, PAGE])
    intact(pool, index, match)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_place_changes_nothing_but_the_work(data: Any) -> None:
    """Random texts grow, branch, are evicted and split: with the hint that each kept, or without, the index
    is the same, and the hint never claims more than is there."""
    grid = data.draw(st.sampled_from([1, 2]))
    both = []
    for _ in range(2):
        pool = PagePool(64, P)
        both.append((pool, PrefixIndex(pool, grid=grid)))
    texts: list[tuple[list[int], Place | None]] = [([], None)]
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 4)) == 0:
            count = data.draw(st.integers(1, 3))
            assert [len(index.evict(count)) for _, index in both].count(0) in (0, 2)
            continue
        old, place = texts[data.draw(st.integers(0, len(texts) - 1))]
        keep = data.draw(st.integers(0, len(old)))
        new = old[:keep] + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        new = new[: len(new) // grid * grid]
        tokens, hint = np.array(new, np.int32), None if place is None else place.within(keep)
        for number, (pool, index) in enumerate(both):
            known = index.confirm(ROOT, hint, len(new)) if number else None
            if known is not None:
                assert b"".join(n.key for n in prefix.path_to(known.node))[: 4 * known.position] == (
                    tokens[: known.position].tobytes()
                )
            match = index.match(ROOT, tokens)
            if not len(new):
                continue
            if pool.free_count < len(new):
                pool.release(match.pages)
                return
            own = write(pool, match.length, len(new))
            segments = np.concatenate([match.segments, own])
            since = known.position if known else 0
            place = index.publish(ROOT, tokens, clip(segments, since, len(new)), since=known)
            pool.release(match.pages)
            pool.release(own[:, PAGE])
            index.check()
            pool.check(index.references())
        if len(new):
            texts.append((new, place))
        one, two = (index for _, index in both)
        assert (one.nodes, one.tokens) == (two.nodes, two.tokens)
        assert one.peek(ROOT, tokens, limit=99)[0] == two.peek(ROOT, tokens, limit=99)[0]


def test_work_is_that_of_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one token or row in front of the place is read, however long the text is."""
    seen: list[int] = []
    walk, exact = PrefixIndex._walk, prefix.exact_rows

    def walked(self: PrefixIndex, root: bytes, tokens: Any, text: bytes, since: Any = None) -> Any:
        seen.append(len(text) // 4)
        return walk(self, root, tokens, text, since)

    def checked(segments: Any, *rest: Any) -> Any:
        seen.append(len(segments))
        return exact(segments, *rest)

    monkeypatch.setattr(PrefixIndex, "_walk", walked)
    monkeypatch.setattr(prefix, "exact_rows", checked)
    pool, index = make(1024)
    place, end = None, 0
    for length in (1000, 1010, 3000, 3001):
        tokens = np.arange(length, dtype=np.int32)
        seen.clear()
        place = index.publish(ROOT, tokens, write(pool, end, length), since=place)
        assert seen == [length - end, -(-(length - end) // P)]
        end = length
    assert index.match(ROOT, tokens).length == 3001


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=8), st.data())
def test_rows_are_found_as_by_looking_at_all(runs: list[tuple[int, int]], data: Any) -> None:
    rows, at = [], 0
    for gap, count in runs:  # gaps: where a policy dropped tokens
        at += gap
        rows.append([0, 1, 1 + count, at - 1])
        at += count
    segments = np.array(rows, np.int32).reshape(-1, 4)
    start = data.draw(st.integers(0, at + 1))
    end = data.draw(st.integers(start, at + 2))
    at_all = range(len(rows)) if start < end else ()  # an empty stretch within a row reaches into none
    inside = [i for i in at_all if ends(segments)[i] > start and starts(segments)[i] < end]
    first, last = rows_of(segments, start, end)
    assert list(range(first, last)) == inside
    assert clip(segments, start, end)[:, LO].tolist() == [
        max(segments[i, LO], start - segments[i, 3]) for i in inside
    ]
