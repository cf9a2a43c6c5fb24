"""Places at which two token sequences probably agree: hashed k-grams, brought together by one sort.

A hash is only an index: whoever uses these places compares the tokens.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64: TypeAlias = npt.NDArray[np.int64]
Uint64: TypeAlias = npt.NDArray[np.uint64]


class Seeds:
    """k-grams of both sequences, equal hashes together, old before new, each in order of place."""

    def __init__(self, at_a: Int64, hash_a: Uint64, at_b: Int64, hash_b: Uint64) -> None:
        # One sort of one number: hash, then which sequence, then place.
        bits = int(max(at_a.max(initial=0), at_b.max(initial=0))).bit_length()
        shift, tag = np.uint64(bits + 1), np.uint64(1 << bits)
        low = np.uint64((1 << bits) - 1)
        keys = np.concatenate(
            [
                (hash_a >> shift << shift) | at_a.astype(np.uint64),
                (hash_b >> shift << shift) | at_b.astype(np.uint64) | tag,
            ]
        )
        keys.sort()
        group = keys >> shift
        first = np.ones(len(keys), bool)
        np.not_equal(group[1:], group[:-1], out=first[1:])
        self.place = (keys & low).astype(np.int64)
        self.is_new = (keys & tag) != 0
        self.first = first

    def unique(self) -> tuple[Int64, Int64]:
        """Places in old and new of k-grams that occur once in each."""
        first, is_new = self.first, self.is_new
        pair = first[:-1] & ~first[1:] & ~is_new[:-1] & is_new[1:]
        pair[:-1] &= first[2:]
        at = np.flatnonzero(pair)
        return self.place[at], self.place[at + 1]

    def ranked(self) -> tuple[Int64, Int64]:
        """Places of the r-th occurrence in old and in new, counted from the start and the end."""
        begins = np.flatnonzero(self.first)
        if not len(begins):
            return begins, begins
        sizes = np.diff(np.append(begins, len(self.first)))
        in_b = np.add.reduceat(self.is_new, begins, dtype=np.int64)
        in_a = sizes - in_b
        of, rank = expand(np.minimum(in_a, in_b))
        begin, middle, end = begins[of], (begins + in_a)[of], (begins + sizes)[of]
        place = self.place
        i = np.concatenate([place[begin + rank], place[middle - 1 - rank]])
        j = np.concatenate([place[middle + rank], place[end - 1 - rank]])
        return i, j


def expand(counts: Int64) -> tuple[Int64, Int64]:
    """For rows with so many cells: the row of each cell, and its place in the row."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


def windows(tokens: Int64, taken: int, k: int) -> tuple[Int64, Uint64]:
    """Places at which k tokens follow that are not taken, and hashes of those k tokens."""
    at = np.flatnonzero(tokens != taken)
    if len(at) < k:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    h = tokens[at].astype(np.uint64) + np.uint64(1)
    width, factor = 1, 0x9E3779B97F4A7C15
    while width < k:
        h = h[:-width] * np.uint64(factor) + h[width:]
        width, factor = 2 * width, factor * factor % (1 << 64)
    h = (h ^ (h >> np.uint64(31))) * np.uint64(0xD6E8FEB86659FD93)
    places = at[: len(h)]
    whole = at[k - 1 :] - places == k - 1
    if whole.all():
        return places, h
    return places[whole], h[whole]


def sampled(at: Int64, h: Uint64, sample: int) -> tuple[Int64, Uint64]:
    """One k-gram in `sample`, by its hash: equal k-grams are all kept or all left out."""
    if sample == 1:
        return at, h
    kept = h < np.uint64((1 << 64) // sample)
    return at[kept], h[kept]
