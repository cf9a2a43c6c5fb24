"""Slots for new tokens: a run of its own way equals the general one, and both the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.pool import PagePool
from jaxkv.cache.sequence import EMPTY_SEGMENTS, slots_of
from jaxkv.errors import CapacityError
from jaxkv.schedule import Placement, place, step_shapes, step_sizes

P = 8


def positions(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 60), st.booleans(), st.booleans())
def test_one_run_is_placed_as_the_first_of_several(before: int, count: int, claim: bool, taken: bool) -> None:
    results: list[tuple[Placement, set[int] | None]] = []
    for beyond in ([], [before + count + 1]):
        pool = PagePool(40, P)
        base = EMPTY_SEGMENTS
        if before:
            first = place(pool, base, positions(0, before))
            pool.fill(*first.filled)
            base = first.segments
        claimed = {int(base[-1, 0])} if taken and before else set()
        wanted = np.concatenate([positions(before, count), beyond]).astype(np.int32)
        results.append((place(pool, base, wanted, claimed=claimed if claim else None), claimed))
    (run, mine), (several, theirs) = results
    np.testing.assert_array_equal(run.slots, several.slots[:count])
    np.testing.assert_array_equal(run.segments, several.segments[: len(run.segments)])
    np.testing.assert_array_equal(run.fresh, several.fresh[: len(run.fresh)])
    assert mine == theirs
    at, slots = slots_of(run.segments, P)
    np.testing.assert_array_equal(at, positions(before, count))
    np.testing.assert_array_equal(slots, run.slots)
    assert run.slots.dtype == run.segments.dtype == np.int32


def test_a_run_in_a_gap_goes_on_behind_the_row_before_it() -> None:
    pool = PagePool(8, P)
    first = place(pool, EMPTY_SEGMENTS, positions(0, 5))
    later = place(pool, EMPTY_SEGMENTS, positions(20, 4))
    for placed in (first, later):
        pool.fill(*placed.filled)
    base = np.concatenate([first.segments, later.segments])
    gap = place(pool, base, positions(5, 10))
    assert gap.segments.tolist() == [[0, 5, 8, 0], [2, 0, 7, 8]]


def test_a_run_without_pages_changes_nothing() -> None:
    pool = PagePool(2, P)
    first = place(pool, EMPTY_SEGMENTS, positions(0, 5))
    pool.fill(*first.filled)
    before = pool.refcount.tolist()
    claimed: set[int] = set()
    with pytest.raises(CapacityError, match="2 pages are needed, 1 are free of 2"):
        place(pool, first.segments, positions(5, 12), claimed=claimed)
    assert pool.refcount.tolist() == before
    assert claimed == set()


@pytest.mark.parametrize("chunk", [1, 8, 32, 100, 256, 512])
def test_steps_hold_every_token_and_less_than_half_of_one_is_padding(chunk: int) -> None:
    shapes = step_shapes(chunk)
    assert shapes == sorted(set(shapes))
    assert len(shapes) <= max(2, chunk).bit_length()
    for count in range(1, 2 * chunk + 70):
        sizes = step_sizes(count, chunk)
        assert sum(valid for valid, _ in sizes) == count
        assert all(0 < valid <= shape and shape in shapes for valid, shape in sizes)
        # Up to 16 tokens a step costs what reading the weights does, however much of it is padding.
        assert all(2 * valid >= shape for valid, shape in sizes if shape > 16), (count, sizes)
