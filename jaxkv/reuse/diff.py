"""Which tokens of a cached sequence survive in a requested one, and where they now stand.

Greedy by length: the common prefix, the common suffix, then the longest run that both share, and so
on in what is left, in any order (blocks may have moved). Runs are found by seeds: k-grams are
hashed and sorted; those that occur once in both sequences pair up; for repeated text, the r-th
occurrence pairs with the r-th, counted from either end, and the deltas with most pairs are tried.
Tokens are compared in every case: a hash is only an index. Where little is left, all of it is
compared with all.

Every step is a few whole-array operations; loops run over rounds, of which there are few.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxkv.cache.pool import as_int32
from jaxkv.errors import ConfigError, TokenError
from jaxkv.reuse.seeds import Int64, Seeds, expand, sampled, windows
from jaxkv.typing import Bool

Runs: TypeAlias = tuple[Int64, Int64, Int64]  # starts in old, starts in new, lengths

_LONG_SEED, _SHORT_SEED = 32, 8  # k of the k-grams, powers of two
_ROUNDS = 6  # of seeding at one k
_PASSES = 16  # of resolving conflicts between the runs of a round
_PAYING = 5  # a round pays if it takes more than 2**-5 of what is left
_DELTAS = 8  # tried in a round on repeated text
_SAMPLE, _SAMPLE_FROM = 8, 4096  # one k-gram in 8, chosen by its hash, where there are so many
_CELLS = 1 << 15  # pairs of tokens compared when all is compared with all
# What stands where a token was taken: no token, and unequal, so that no run crosses such a place.
_TAKEN_OLD, _TAKEN_NEW = -(1 << 40), -(1 << 41)


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Tokens old..old+length-1 of the cached sequence stand at new..new+length-1 in the new one."""

    old: int
    new: int
    length: int

    @property
    def delta(self) -> int:
        """How far the span moved, in positions."""
        return self.new - self.old


def diff(
    old: npt.ArrayLike, new: npt.ArrayLike, *, min_span: int = 1, max_spans: int | None = None
) -> tuple[Span, ...]:
    """Finds surviving spans, sorted by `new`, disjoint in both sequences.

    The common prefix comes first, as Span(0, 0, n), whatever its length; it counts for neither
    `min_span` nor `max_spans`. Of equally long runs, one with a neighbour's delta wins, then the
    one that moved least. In long texts, survivors shorter than 8 tokens are looked for only where
    both sequences have something left between the same two spans.

    Args:
      old: i32[n], the tokens whose KV is cached.
      new: i32[m], the tokens requested.
      min_span: shorter spans are left out, tokens.
      max_spans: keep so many of the longest, or all.
    Raises:
      TokenError: the tokens are not one-dimensional int32 arrays.
      ConfigError: `min_span` below 1 or a negative `max_spans`.
    """
    a, b = as_int32("old", old, TokenError), as_int32("new", new, TokenError)
    if min_span < 1:
        raise ConfigError(f"min_span is {min_span}, expected at least 1 token")
    if max_spans is not None and max_spans < 0:
        raise ConfigError(f"max_spans is {max_spans}, expected 0 or more")
    prefix = _common(a, b)
    i, j, n = _Search(a[prefix:], b[prefix:], min_span).find()
    if max_spans is not None:
        longest = np.lexsort((j, -n))[:max_spans]
        i, j, n = i[longest], j[longest], n[longest]
    order = np.argsort(j)
    places = zip((i[order] + prefix).tolist(), (j[order] + prefix).tolist(), n[order].tolist(), strict=True)
    head = (Span(0, 0, prefix),) if prefix else ()
    return (*head, *(Span(*place) for place in places))


class _Search:
    """One search. `a` and `b` are working copies in which taken tokens are struck out."""

    def __init__(self, a: Any, b: Any, min_span: int) -> None:
        self.a: Int64 = a.astype(np.int64)
        self.b: Int64 = b.astype(np.int64)
        self.min_span = min_span
        self.taken: list[Runs] = []

    def find(self) -> Runs:
        suffix = _common(self.a[::-1], self.b[::-1])
        # A short common suffix may belong to a longer run that moved; then it has to wait.
        if suffix and (suffix >= _LONG_SEED or suffix == min(len(self.a), len(self.b))):
            n = np.array([suffix])
            self._take(len(self.a) - n, len(self.b) - n, n)
        if min(len(self.a), len(self.b)) >= _SAMPLE_FROM:
            self._take_unique(self._groups(_LONG_SEED, _SAMPLE), _LONG_SEED)
        self._seeded(_LONG_SEED)
        if self.min_span < _LONG_SEED:
            self._seeded(_SHORT_SEED)
        self._compare_rest(everywhere=self.min_span < 2 * _SHORT_SEED)
        i, j, n = _joined(*self._all_taken())  # a run may have been taken in parts
        enough = n >= self.min_span
        return i[enough], j[enough], n[enough]

    def _all_taken(self) -> Runs:
        none = np.zeros(0, np.int64)
        i, j, n = zip(*self.taken, strict=True) if self.taken else ([none],) * 3
        return np.concatenate(i), np.concatenate(j), np.concatenate(n)

    def _take(self, i: Int64, j: Int64, n: Int64) -> None:
        row, within = expand(n)
        self.a[i[row] + within] = _TAKEN_OLD
        self.b[j[row] + within] = _TAKEN_NEW
        self.taken.append((i, j, n))

    def _groups(self, k: int, sample: int = 1) -> Seeds:
        old, new = windows(self.a, _TAKEN_OLD, k), windows(self.b, _TAKEN_NEW, k)
        return Seeds(*sampled(*old, sample), *sampled(*new, sample))

    def _seeded(self, k: int) -> None:
        """Takes runs around k-grams that agree, as long as it pays."""
        for _ in range(_ROUNDS):
            left = min(np.count_nonzero(self.a != _TAKEN_OLD), np.count_nonzero(self.b != _TAKEN_NEW))
            if left < k:
                return
            groups = self._groups(k)
            enough = left >> _PAYING
            if self._take_unique(groups, k) <= enough and self._take_repeated(groups, k) <= enough:
                return

    def _take_unique(self, groups: Seeds, k: int) -> int:
        i, j = groups.unique()
        return self._choose(*self._grown(i, j, k), max(k, self.min_span)) if len(i) else 0

    def _take_repeated(self, groups: Seeds, k: int) -> int:
        i, j = groups.ranked()
        return self._choose(*self._along(j - i, k), max(k, self.min_span)) if len(i) else 0

    def _grown(self, i: Int64, j: Int64, k: int) -> Runs:
        """The maximal runs around k-grams that occur once in each sequence.

        Linear, since such k-grams cannot contradict each other inside a common run: neighbours in
        new of equal delta are compared with all that stands between them, and the ends then grow as
        far as tokens agree, which is never across a k-gram of another delta.
        """
        order = np.argsort(j)
        i, j = i[order], j[order]
        first = np.ones(len(i), bool)
        np.not_equal((j - i)[1:], (j - i)[:-1], out=first[1:])
        begins = np.flatnonzero(first)
        lasts = np.append(begins[1:], len(i)) - 1
        row, within = expand(j[lasts] + k - j[begins])
        at_a, at_b = i[begins][row] + within, j[begins][row] + within
        begin, n = _true_runs(self.a[at_a] == self.b[at_b], within == 0)
        i, j = at_a[begin], at_b[begin]
        ahead = _agreement(self.a, self.b, i + n, j + n, 1)
        behind = _agreement(self.a, self.b, i - 1, j - 1, -1)
        return i - behind, j - behind, n + ahead + behind

    def _along(self, deltas: Int64, least: int) -> Runs:
        """All common runs at the most frequent deltas."""
        values, counts = np.unique(deltas, return_counts=True)
        found: list[Runs] = []
        for delta in values[np.lexsort((abs(values), -counts))[:_DELTAS]].tolist():
            i, j = max(-delta, 0), max(delta, 0)
            m = min(len(self.a) - i, len(self.b) - j)
            begin, length = _true_runs(self.a[i : i + m] == self.b[j : j + m])
            enough = length >= least
            found.append((begin[enough] + i, begin[enough] + j, length[enough]))
        i, j, n = (np.concatenate(part) for part in zip(*found, strict=True))
        return i, j, n

    def _choose(self, i: Int64, j: Int64, n: Int64, least: int) -> int:
        """Takes runs, longest first; what overlaps a taken one is cut to what is left of it.

        In each pass every run that no better one overlaps is taken at once, which is what taking
        them one by one would do. Returns how many tokens were taken.
        """
        owner_a, owner_b = np.empty(len(self.a), np.int64), np.empty(len(self.b), np.int64)
        i, j, n = i[n >= least], j[n >= least], n[n >= least]
        total = 0
        for step in range(_PASSES):
            if not len(i):
                break
            order = np.lexsort((j, abs(j - i), ~self._near(j, j - i), -n))
            affordable = max(int(np.searchsorted(np.cumsum(n[order]), 4 * len(self.b))), 1)
            i, j, n = (x[order[:affordable]] for x in (i, j, n))
            row, within = expand(n)
            at_a, at_b = i[row] + within, j[row] + within
            owner_a[at_a[::-1]] = row[::-1]  # painted from worst to best: the best remains
            owner_b[at_b[::-1]] = row[::-1]
            best = (owner_a[at_a] == row) & (owner_b[at_b] == row)
            intact = np.ones(len(n), bool)
            intact[row[~best]] = False
            if step == 0:  # the longest first: shorter ones look at their neighbours' deltas
                intact &= 2 * n > n[0]
            self._take(i[intact], j[intact], n[intact])
            total += int(n[intact].sum())
            if intact.all():
                break
            free = (self.a[at_a] != _TAKEN_OLD) & (self.b[at_b] != _TAKEN_NEW)
            begin, length = _true_runs(free, within == 0)
            begin, length = begin[length >= least], length[length >= least]
            i, j, n = at_a[begin], at_b[begin], length
        return total

    def _near(self, j: Int64, delta: Int64) -> Bool:
        """Whether the taken span before or behind each run has the run's delta."""
        old, new, _ = self._all_taken()
        order = np.argsort(new)
        # Before the first stands the prefix; behind the last stands nothing.
        deltas = np.concatenate([[0], (new - old)[order], [1 << 40]])
        at = np.searchsorted(new[order], j)
        return (deltas[at] == delta) | (deltas[at + 1] == delta)

    def _compare_rest(self, everywhere: bool) -> None:
        """Finds runs of any length where little is left: in all at once, else gap by gap.

        Gaps are compared only if `everywhere`: seeds have found what is long.
        """
        for _ in range(_ROUNDS):
            old, new = np.flatnonzero(self.a != _TAKEN_OLD), np.flatnonzero(self.b != _TAKEN_NEW)
            if not len(old) or not len(new):
                return
            if len(old) * len(new) <= _CELLS:
                i, j = np.repeat(old, len(new)), np.tile(new, len(old))
            elif everywhere:
                i, j = self._gap_cells()
            else:
                return
            equal = self.a[i] == self.b[j]
            i, j = i[equal], j[equal]
            if not len(i):
                return
            if not self._choose(*_joined(i, j, np.ones(len(i), np.int64)), self.min_span):
                return

    def _gap_cells(self) -> tuple[Int64, Int64]:
        """Places to compare: each gap in new with the gaps in old beside its neighbours."""
        old, new, n = self._all_taken()
        order = np.argsort(new)
        old, new, n = old[order], new[order], n[order]
        gap_new, size_new = _true_runs(self.b != _TAKEN_NEW)
        gap_old, size_old = _true_runs(self.a != _TAKEN_OLD)
        at = np.searchsorted(new, gap_new)  # the taken span behind each gap
        # Places in old at which the text before the gap ended, and the text behind it began.
        before = np.concatenate([[0], old + n])[at]
        behind = np.concatenate([old, [len(self.a)]])[at]
        left = np.searchsorted(gap_old, before).clip(max=len(gap_old) - 1)
        right = np.searchsorted(gap_old + size_old, behind).clip(max=len(gap_old) - 1)
        fits_left = gap_old[left] == before
        fits_right = (gap_old[right] + size_old[right] == behind) & ~(fits_left & (left == right))
        of_new = np.concatenate([np.flatnonzero(fits_left), np.flatnonzero(fits_right)])
        of_old = np.concatenate([left[fits_left], right[fits_right]])
        cells = size_new[of_new] * size_old[of_old]
        small = np.argsort(cells, kind="stable")
        small = small[np.cumsum(cells[small]) <= _CELLS]
        of_new, of_old, cells = of_new[small], of_old[small], cells[small]
        row, within = expand(cells)
        width = size_new[of_new][row]
        return gap_old[of_old][row] + within // width, gap_new[of_new][row] + within % width


def _common(a: Any, b: Any) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _true_runs(flags: Bool, breaks: Bool | None = None) -> tuple[Int64, Int64]:
    """Starts and lengths of the runs of true flags; a run ends before a place that `breaks`."""
    if not len(flags):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    opens, closes = flags.copy(), flags.copy()
    if breaks is None:
        opens[1:] &= ~flags[:-1]
        closes[:-1] &= ~flags[1:]
    else:
        opens[1:] &= ~flags[:-1] | breaks[1:]
        closes[:-1] &= ~flags[1:] | breaks[1:]
    begin = np.flatnonzero(opens)
    return begin, np.flatnonzero(closes) + 1 - begin


def _joined(i: Int64, j: Int64, n: Int64) -> Runs:
    """Joins runs of one delta that touch or overlap; none may lie inside another."""
    if not len(i):
        return i, j, n
    order = np.lexsort((j, j - i))
    i, j, n = i[order], j[order], n[order]
    first = np.ones(len(i), bool)
    first[1:] = ((j - i)[1:] != (j - i)[:-1]) | (j[1:] > (j + n)[:-1])
    begins = np.flatnonzero(first)
    lasts = np.append(begins[1:], len(i)) - 1
    return i[begins], j[begins], j[lasts] + n[lasts] - j[begins]


def _agreement(a: Int64, b: Int64, i: Int64, j: Int64, step: int) -> Int64:
    """For each pair of places, how many tokens agree from there on, in steps of +1 or -1."""
    count = np.zeros(len(i), np.int64)
    going = np.arange(len(i))
    width = 8
    while len(going):
        reach = np.arange(width) * step
        at_a = (i[going] + step * count[going])[:, None] + reach
        at_b = (j[going] + step * count[going])[:, None] + reach
        inside = (at_a >= 0) & (at_a < len(a)) & (at_b >= 0) & (at_b < len(b))
        equal = inside & (a[at_a.clip(0, len(a) - 1)] == b[at_b.clip(0, len(b) - 1)])
        stops = ~equal.all(axis=1)
        count[going] += np.where(stops, equal.argmin(axis=1), width)
        going = going[~stops]
        width = min(4 * width, 4096)
    return count
