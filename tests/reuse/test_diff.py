"""What survives an edit: every span holds equal tokens, none is used twice, little is missed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxkv.reuse.diff as module
from jaxkv.errors import ConfigError, TokenError
from jaxkv.reuse.diff import Span, diff


def ints(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int32)


def texts(old: str, new: str, **options: int) -> list[tuple[int, str]]:
    """The spans as (delta, text)."""
    spans = checked(ints(old), ints(new), **options)
    return [(s.delta, new[s.new : s.new + s.length]) for s in spans]


def checked(old: np.ndarray, new: np.ndarray, **options: int) -> tuple[Span, ...]:
    """`diff`, with everything that a plan relies on."""
    spans = diff(old, new, **options)
    used_old, used_new = np.zeros(len(old), bool), np.zeros(len(new), bool)
    end = 0
    for s in spans:
        assert s.length > 0
        assert s.new >= end
        end = s.new + s.length
        assert 0 <= s.old <= s.old + s.length <= len(old)
        assert end <= len(new)
        assert (old[s.old : s.old + s.length] == new[s.new : end]).all()
        assert not used_old[s.old : s.old + s.length].any()
        used_old[s.old : s.old + s.length] = True
        used_new[s.new : end] = True
    for s in spans:  # maximal: what follows differs or belongs to another span
        i, j = s.old + s.length, s.new + s.length
        if i < len(old) and j < len(new) and not used_old[i] and not used_new[j]:
            assert old[i] != new[j] or options
    prefix = next(
        (k for k, (x, y) in enumerate(zip(old, new, strict=False)) if x != y),
        min(len(old), len(new)),
    )
    assert not prefix or spans[0] == Span(0, 0, prefix)
    return spans


def survivors(spans: tuple[Span, ...]) -> int:
    return sum(s.length for s in spans)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("abcdefghj", "abefhj", [(0, "ab"), (-2, "ef"), (-3, "hj")]),
        ("abcdefghj", "abefhX", [(0, "ab"), (-2, "ef"), (-3, "h")]),
        ("AAAABBBB", "AAAACBBBB", [(0, "AAAA"), (1, "BBBB")]),
        ("user: hi.", "user: hi!", [(0, "user: hi")]),
        ("user: hi. bye", "user: hi! bye", [(0, "user: hi"), (0, " bye")]),
        ("abcdef", "Xbcdef", [(0, "bcdef")]),
        ("abcdef", "cdef", [(-2, "cdef")]),
        ("abcdef", "XYabcdef", [(2, "abcdef")]),
        ("abcdef", "", []),
        ("", "abc", []),
        ("", "", []),
        ("abcdef", "ghi", []),
        ("abcdef", "abcdef", [(0, "abcdef")]),
        ("abcdef", "abc", [(0, "abc")]),
        ("abc", "abcdef", [(0, "abc")]),
        ("onetwothree", "threeonetwo", [(-6, "three"), (5, "onetwo")]),
        ("abababab", "abab", [(0, "abab")]),
        ("abcabc", "Xabcabc", [(1, "abcabc")]),
        ("aaaa", "aaaaaa", [(0, "aaaa")]),
    ],
)
def test_small_edits(old: str, new: str, expected: list[tuple[int, str]]) -> None:
    assert texts(old, new) == expected


def test_last_token_of_an_edited_message_does_not_survive() -> None:
    old, new = ints("<user>hello there<end><bot>"), ints("<user>hello therX<end><bot>")
    spans = checked(old, new)
    edited = int(np.flatnonzero(old != new)[0])
    assert not any(s.new <= edited < s.new + s.length for s in spans)
    assert survivors(spans) == len(new) - 1


def test_of_equal_runs_the_least_moved_one_is_taken() -> None:
    assert texts("XabcYabcZabc", "QRSTUabcVW") == [(0, "abc")]


def test_of_equal_runs_one_with_a_neighbours_delta_is_taken() -> None:
    # "12345" moved by 3; "ab" stands at distance 1 and at distance 3.
    assert (3, "ab") in texts("_12345_ab_ab_", "QQQ=12345-ab-")


def test_min_span_and_max_spans_keep_the_longest_and_always_the_prefix() -> None:
    old, new = "p.1234567.abcd.XYZ", "p?abcd!XYZ#1234567"
    assert texts(old, new) == [(0, "p"), (-8, "abcd"), (-8, "XYZ"), (9, "1234567")]
    assert texts(old, new, min_span=4) == [(0, "p"), (-8, "abcd"), (9, "1234567")]
    assert texts(old, new, max_spans=1) == [(0, "p"), (9, "1234567")]
    assert texts(old, new, max_spans=0) == [(0, "p")]
    assert texts(old, new, min_span=100) == [(0, "p")]


def test_options_and_tokens_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_span is 0"):
        diff(ints("a"), ints("a"), min_span=0)
    with pytest.raises(ConfigError, match="max_spans is -1"):
        diff(ints("a"), ints("a"), max_spans=-1)
    with pytest.raises(TokenError, match="new has dtype float64"):
        diff(ints("a"), np.array([0.5]))


def vocabulary_text(rng: np.random.Generator, n: int) -> np.ndarray:
    """Tokens as frequent as words are: many common ones, rare ones in between."""
    return (rng.zipf(1.3, n) % 5000).astype(np.int32)


def test_documents_in_another_order_survive_whole() -> None:
    rng = np.random.default_rng(1)
    parts = [vocabulary_text(rng, int(n)) for n in rng.integers(40, 400, 9)]
    old = np.concatenate(parts)
    new = np.concatenate([parts[k] for k in (8, 2, 7, 1, 0, 4, 3, 6, 5)])
    spans = checked(old, new)
    assert survivors(spans) >= len(new) - 9
    assert len(checked(old, new, min_span=32)) <= 9


def test_many_small_deletions_lose_nothing() -> None:
    rng = np.random.default_rng(2)
    old = vocabulary_text(rng, 6000)
    kept = np.ones(6000, bool)
    for at in range(100, 6000, 60):
        kept[at : at + int(rng.integers(1, 20))] = False
    spans = checked(old, old[kept])
    assert survivors(spans) >= 0.995 * kept.sum()


def test_short_survivors_inside_replaced_passages_are_found() -> None:
    """In long texts they are looked for in the gap they belong to, not everywhere."""
    rng = np.random.default_rng(4)
    old = rng.integers(0, 5000, 8000).astype(np.int32)
    new = old.copy()
    kept = np.ones(len(old), bool)
    for at in range(500, 8000, 500):
        for hole in range(at, at + 90, 9):
            kept[hole : hole + 5] = False  # four tokens survive between every five replaced
    new[~kept] += 10_000
    new = np.delete(new, slice(1000, 1020))
    spans = checked(old, new)
    assert survivors(spans) == kept.sum() - kept[1000:1020].sum()
    assert {s.delta for s in spans} == {0, -20}


@pytest.mark.parametrize("period", [1, 2, 3, 64])
@pytest.mark.parametrize("edit", ["shorter", "longer", "marks", "head", "both ends"])
def test_repeated_text_gives_a_plan_that_keeps_most(period: int, edit: str) -> None:
    n = 3000
    old = (np.arange(n) % period).astype(np.int32)
    new = old.copy()
    if edit == "shorter":
        new = np.delete(new, slice(1000, 1100))
    elif edit == "longer":
        new = np.insert(new, 1500, [7000, 7001])
    elif edit == "marks":
        new[::500] = 9000
    elif edit == "head":
        new = np.concatenate([[9000], new[5:]]).astype(np.int32)
    else:
        new[0], new[-1] = 9000, 9001
    assert survivors(checked(old, new)) >= min(len(old), len(new)) - 3 * period - 8


def test_hash_is_only_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that is always the same, spans are still true; prefix and suffix are found."""
    windows = module.windows

    def collide(tokens: np.ndarray, taken: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        at, h = windows(tokens, taken, k)
        return at, np.zeros_like(h)

    rng = np.random.default_rng(3)
    old = rng.integers(0, 1000, 400).astype(np.int32)
    new = np.delete(old, slice(100, 150))
    new[200] = -1
    expected = survivors(checked(old, new))
    monkeypatch.setattr(module, "windows", collide)
    assert 0 < survivors(checked(old, new)) <= expected


small = st.lists(st.integers(0, 3), max_size=40).map(lambda x: np.array(x, np.int32))


@settings(max_examples=150, deadline=None)
@given(small, small, st.integers(1, 5))
@example(np.zeros(0, np.int32), np.zeros(3, np.int32), 1)
def test_spans_are_valid_for_any_two_texts(old: np.ndarray, new: np.ndarray, least: int) -> None:
    spans = checked(old, new)
    shared = set(old.tolist()) & set(new.tolist())
    assert bool(spans) == bool(shared)
    long = checked(old, new, min_span=least)
    assert all(s.length >= least or s == spans[0] for s in long)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([200, 2000, 9000]))
def test_random_edit_scripts_keep_nearly_all_that_survives(seed: int, edits: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 5000, n).astype(np.int32)
    pieces = np.split(old, np.sort(rng.integers(0, n, edits)))
    if rng.random() < 0.3:
        rng.shuffle(pieces)
    out, kept = [], 0
    for piece in pieces:
        cut = int(rng.integers(0, 9)) if rng.random() < 0.5 else 0
        fresh = int(rng.integers(0, 30)) if rng.random() < 0.5 else 0
        out += [piece[cut:], rng.integers(5000, 9000, fresh).astype(np.int32)]
        kept += len(piece[cut:])
    new = np.concatenate(out)
    found = survivors(checked(old, new))
    assert found >= kept - 8 * edits  # pieces of a few tokens may be missed when they moved
    assert found <= len(new)
