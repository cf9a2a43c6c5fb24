"""The prefix index: what matches, why it ends, who holds the pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_cases import ROOT, P, covered, intact, ints, make, publish, write

from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import Cause, PrefixIndex
from jaxkv.cache.sequence import FIRST, HI, PAGE
from jaxkv.errors import ConfigError, ContractError, HandleError, TokenError


@pytest.mark.parametrize("n", [1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1])
def test_whole_prompt_hits_at_every_length_around_the_page_size(n: int) -> None:
    """CASES 9, 10."""
    pool, index = make()
    tokens = ints(range(100, 100 + n))
    assert publish(pool, index, tokens) == n
    match = index.match(ROOT, tokens)
    assert match.length == n
    assert covered(match) == list(range(n))
    assert (match.end.cause, match.end.position) == (Cause.COMPLETE, n)
    assert publish(pool, index, tokens) == 0
    intact(pool, index, match)


def test_full_hit_leaves_one_token_to_compute() -> None:
    pool, index = make()
    publish(pool, index, ints("abcdefgh"))
    match = index.match(ROOT, ints("abcdefgh"), limit=7)
    assert match.length == 7
    assert covered(match) == list(range(7))
    assert match.end.cause is Cause.LAST_TOKEN
    assert str(match.end) == ("all but the last token is cached; that one, at position 7, is computed")


def test_match_says_why_it_ended() -> None:
    pool, index = make()
    assert index.match(ROOT, ints("ab")).end.cause is Cause.ABSENT
    publish(pool, index, ints("abcdefgh"))

    def end(text: str, **options: int) -> tuple[str, int]:
        match = index.match(ROOT, ints(text), **options)
        assert match.length == match.end.position
        return match.end.cause.value, match.length

    assert end("abcdeX") == ("tokens", 5)
    assert end("X") == ("tokens", 0)
    assert end("abcdefghij") == ("exhausted", 8)
    assert end("abc") == ("complete", 3)
    assert end("abcdefgh", limit=3) == ("limit", 3)
    assert end("abcdefgh", limit=99) == ("complete", 8)
    assert end("abcdefgh", granularity=3) == ("granularity", 6)
    assert end("abcdefgh", granularity=4) == ("complete", 8)
    assert end("abcdefgh", limit=7, granularity=4) == ("granularity", 4)
    assert end("abcdefgh", limit=0) == ("limit", 0)
    assert end("") == ("complete", 0)


def test_the_end_before_a_cut_to_the_grid_is_kept() -> None:
    pool, index = make()
    publish(pool, index, ints("abcdefgh"))
    end = index.match(ROOT, ints("abcdefX"), granularity=4).end
    assert end.before is not None
    assert (end.before.cause, end.before.position) == (Cause.TOKENS, 6)
    assert str(end) == ("cut back to the chunk grid at position 4; before that, tokens differ at position 6")


def test_same_block_behind_other_ancestors_does_not_hit() -> None:
    """CASE 2."""
    pool, index = make()
    publish(pool, index, ints("aaaaXXXX"))
    publish(pool, index, ints("bbbbYYYY"))
    assert index.match(ROOT, ints("XXXX")).length == 0
    assert index.match(ROOT, ints("bbbbXXXX")).length == 4


def test_roots_share_nothing_while_one_root_shares_everything() -> None:
    """CASE 5."""
    pool, index = make()
    publish(pool, index, ints("abcdefgh"), b"tenant A")
    same, other = (index.match(r, ints("abcdefgh")) for r in (b"tenant A", b"tenant B"))
    never = index.match(b"tenant C", ints("something else"))
    assert same.length == 8
    assert (other.length, other.end) == (never.length, never.end)
    assert publish(pool, index, ints("abcdefgh"), b"tenant B") == 8
    assert not set(same.pages) & set(index.match(b"tenant B", ints("abcdefgh")).pages)


def test_tokens_are_compared_beyond_the_first() -> None:
    """CASE 1: a child is found by its first token; everything behind that is compared, to the last bit."""
    pool, index = make()
    publish(pool, index, ints([5, 1, 2, 3]))
    for at in range(1, 4):
        tokens = ints([5, 1, 2, 3])
        tokens[at] += 1 << 16
        assert index.match(ROOT, tokens).length == at


def test_a_match_ends_in_the_middle_of_a_page_and_splits_nothing() -> None:
    pool, index = make()
    publish(pool, index, ints("abcdefgh"))
    match = index.match(ROOT, ints("abcdeX"))
    assert match.segments[-1].tolist()[1:] == [0, 1, 4]
    assert index.nodes == 1


def test_branches_in_the_middle_of_a_page_share_it() -> None:
    pool, index = make()
    publish(pool, index, ints("abcdefgh"))
    assert publish(pool, index, ints("abcdeXYZ")) == 3
    assert index.nodes == 3
    assert index.tokens == 11
    both = [index.match(ROOT, ints(t)) for t in ("abcdefgh", "abcdeXYZ")]
    for match in both:
        assert covered(match) == list(range(8))
    # The first branch is whole again, the second goes on in a page of its own.
    assert both[0].segments[:, HI].tolist() == [4, 4]
    assert both[1].segments[:, HI].tolist() == [4, 1, 3]
    assert both[0].pages[1] == both[1].pages[1]
    intact(pool, index, *both)


def test_rows_of_one_page_are_joined_along_a_path_of_many_nodes() -> None:
    pool, index = make()
    tokens = ints(range(4 * P))
    rows = write(pool, 0, len(tokens))
    for n in (1, 2, 3, 6, 7, 12, 15, 16):
        part = rows[: -(-n // P)].copy()
        part[-1, HI] = n - part[-1, FIRST]
        index.insert(ROOT, tokens[:n], part)
    assert index.nodes == 8
    for n in range(1, 17):
        match = index.match(ROOT, tokens[:n])
        assert covered(match) == list(range(n))
        assert len(match.segments) == -(-n // P)
        pool.release(match.pages)
    index.check()
    pool.check([*index.references(), rows[:, PAGE]])


def test_first_copy_stays_and_the_second_leaks_nothing() -> None:
    """CASE 32."""
    pool, index = make(8)
    tokens = ints("abcdefgh")
    one, two = write(pool, 0, 8), write(pool, 0, 8)
    assert index.insert(ROOT, tokens, one) == 8
    assert index.insert(ROOT, tokens, two) == 0
    match = index.match(ROOT, tokens)
    assert match.pages.tolist() == one[:, PAGE].tolist()
    assert pool.release(two[:, PAGE]).tolist() == sorted(two[:, PAGE].tolist())
    assert pool.release(one[:, PAGE]).tolist() == []
    intact(pool, index, match)


def test_copies_committed_in_turns_interleave_and_still_count_right() -> None:
    """Two sequences compute the same text; each publishes as it goes: A, then B, then A again."""
    pool, index = make()
    tokens = ints("abcdefgh")
    a, b = write(pool, 0, 2 * P), write(pool, 0, 2 * P)
    for rows, n in ((a, 2), (b, 3), (a, 4), (b, 7), (a, 8)):
        part = rows[: -(-n // P)].copy()
        part[-1, HI] = n - part[-1, FIRST]
        index.insert(ROOT, tokens[:n], part)
    match = index.match(ROOT, tokens)
    assert covered(match) == list(range(2 * P))
    assert match.pages.tolist() == [a[0, PAGE], b[0, PAGE], a[0, PAGE], b[1, PAGE], a[1, PAGE]]
    pool.release(a[:, PAGE])
    pool.release(b[:, PAGE])
    intact(pool, index, match)
    pool.release(match.pages)
    assert len(index.evict(4)) == 4
    pool.check([])


def test_relocated_kv_cannot_enter() -> None:
    pool, index = make()
    rows = write(pool, 0, 8)
    moved = rows.copy()
    moved[1] = [rows[0, PAGE], 0, 4, 4]  # slots born at 0..3, standing at 4..7
    with pytest.raises(ContractError, match="page 0 stands at 4 and was born at 0"):
        index.insert(ROOT, ints("abcdefgh"), moved)
    assert (index.nodes, index.tokens, index.pages) == (0, 0, 0)


def test_slots_that_were_not_written_cannot_enter() -> None:
    """CASE 30."""
    pool, index = make()
    pages = pool.allocate(ints([0]))
    pool.fill(pages, 2)
    rows = np.array([[pages[0], 0, 3, 0]], np.int32)
    with pytest.raises(HandleError, match=r"page 0 has 2 slots written .* written up to 3"):
        index.insert(ROOT, ints("abc"), rows)
    pool.release(pages)
    with pytest.raises(HandleError, match="0 references"):
        index.insert(ROOT, ints("ab"), np.array([[pages[0], 0, 2, 0]], np.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:1], "end at position 4, expected the token count 8"),
        (lambda r: r[::-1], "end at position 4"),
        (lambda r: r[1:], "gaps"),
        (lambda r: np.concatenate([r[:1], r]), "overlap"),
        (lambda r: r + ints([0, 1, 0, 0]), "gaps"),
        (lambda r: r + ints([64, 0, 0, 0]), "outside 0 to 63"),
        (lambda r: r - ints([64, 0, 0, 0]), "outside 0 to 63"),
        (lambda r: r.astype(np.int64), "int64"),
        (lambda r: r[:, :3], "int32\\[2, 3\\]"),
        (lambda r: r[:0], "0 segments are given for 8 tokens"),
    ],
)
def test_segments_that_do_not_hold_the_tokens_are_refused(
    change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    pool, index = make()
    rows = change(write(pool, 0, 8))
    with pytest.raises(HandleError, match=message):
        index.insert(ROOT, ints("abcdefgh"), rows)
    assert (index.nodes, index.pages) == (0, 0)


def test_tokens_and_options_are_checked() -> None:
    _, index = make()
    with pytest.raises(TokenError, match="float64"):
        index.match(ROOT, np.array([0.5]))
    with pytest.raises(TokenError, match="shape"):
        index.match(ROOT, np.zeros((1, 2), np.int32))
    with pytest.raises(ConfigError, match="limit is -1"):
        index.match(ROOT, ints("a"), limit=-1)
    with pytest.raises(ConfigError, match="granularity is 0"):
        index.match(ROOT, ints("a"), granularity=0)
    assert index.match(ROOT, [1, 2]).length == 0
    assert index.insert(ROOT, [], np.zeros((0, 4), np.int32)) == 0


def test_results_are_values() -> None:
    pool, index = make()
    publish(pool, index, ints("abcdefgh"))
    for text in ("abcdefgh", "abcde", "X"):
        match = index.match(ROOT, ints(text))
        with pytest.raises(ValueError, match="read-only"):
            match.segments[:] = 0


def test_a_node_keeps_no_buffer_larger_than_its_run() -> None:
    pool, index = make()
    tokens = ints(range(4 * P))
    publish(pool, index, tokens)
    publish(pool, index, np.concatenate([tokens[:6], ints([99])]))
    for pages in index.references():
        rows = pages.base
        while rows.base is not None:
            rows = rows.base
        assert rows.nbytes == len(pages) * 16


def test_integrity_check_sees_faults() -> None:
    pool, index = make()
    publish(pool, index, ints("abcdefgh"))
    index.tokens += 1
    with pytest.raises(HandleError, match="counts 1 nodes and 9 tokens"):
        index.check()
    index.tokens -= 1
    pool.filled[0] = 3
    with pytest.raises(HandleError, match="not written"):
        index.check()
    pool.filled[0] = 4
    pool.birth[1] = 7
    with pytest.raises(HandleError, match="where they were born"):
        index.check()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=8),
    st.lists(st.integers(0, 1), max_size=22),
    st.integers(0, 22),
    st.integers(1, 5),
)
def test_match_is_the_longest_common_prefix(
    stored: list[list[int]], prompt: list[int], limit: int, granularity: int
) -> None:
    pool, index = make(128)
    distinct: set[tuple[int, ...]] = set()
    for tokens in stored:
        known = len(distinct)
        distinct |= {tuple(tokens[: n + 1]) for n in range(len(tokens))}
        assert publish(pool, index, ints(tokens)) == len(distinct) - known
        intact(pool, index)
    assert index.tokens == len(distinct)
    longest = max(n for n in range(len(prompt) + 1) if not n or tuple(prompt[:n]) in distinct)
    match = index.match(ROOT, ints(prompt), limit=limit, granularity=granularity)
    assert match.length == min(longest, limit) // granularity * granularity
    assert covered(match) == list(range(match.length))
    intact(pool, index, match)


def test_peeking_finds_what_match_finds_and_changes_nothing() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    pages = pool.allocate(np.array([0, 4, 8], np.int32))
    pool.fill(pages, 4)
    tokens = np.arange(12, dtype=np.int32)
    segments = np.array([[page, 0, 4, first] for page, first in zip(pages, (0, 4, 8), strict=True)], np.int32)
    index.insert(b"a", tokens, segments)
    pool.release(pages)
    none = np.zeros(0, np.int32)
    assert index.obtainable((), none) == 8
    for root, prompt, limit, expected in (
        (b"a", tokens, 12, 12),
        (b"a", tokens, 11, 11),
        (b"a", np.append(tokens[:6], np.int32(99)), 7, 6),
        (b"b", tokens, 12, 0),
    ):
        before = pool.refcount.copy()
        length, found = index.peek(root, prompt, limit=limit)
        np.testing.assert_array_equal(pool.refcount, before)
        match = index.match(root, prompt, limit=limit)
        assert length == match.length == expected
        np.testing.assert_array_equal(found, match.segments)
        found = found[:, 0]
        assert index.obtainable((), found) == 8 - len(set(found.tolist()))
        assert index.obtainable((), none) == 8 - len(set(match.pages.tolist())), "they are pinned"
        assert index.obtainable([match.pages], none) == 8, "and would not be, if given back"
        pool.release(match.pages)
