"""Sequences: immutable lists of segments over write-once pages, with the provenance of every run."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxkv.cache.contract import CacheContract
from jaxkv.model.config import ModelConfig
from jaxkv.typing import Int32

PAGE, LO, HI, FIRST = range(4)  # columns of a segments array
EMPTY_SEGMENTS: Int32 = np.zeros((0, 4), np.int32)
EMPTY_SEGMENTS.flags.writeable = False


def frozen(array: Int32) -> Int32:
    """Returns `array`, write-protected: segments and tokens are values."""
    array.flags.writeable = False
    return array


class Origin(enum.StrEnum):
    """How the KV of a run of tokens came to be. Anything but EXACT is approximate."""

    EXACT = "exact"  # computed from exactly this past
    RELOCATED = "relocated"  # computed under another past, kept
    ON_APPROXIMATE = "on_approximate"  # computed now, on top of approximate KV
    DROPPED = "dropped"  # no KV: later tokens do not see it


@dataclasses.dataclass(frozen=True)
class Removed:
    """A span that an edit deleted. It says which by a digest: the text itself is not kept."""

    start: int  # where it stood, in the sequence that was edited
    length: int  # tokens
    digest: str  # first 16 hex digits of the SHA-256 of its tokens as little-endian int32

    @classmethod
    def of(cls, tokens: Int32, start: int, end: int) -> Removed:
        """The removal of tokens[start:end]."""
        raw = np.ascontiguousarray(tokens[start:end], "<i4").tobytes()
        return cls(start, end - start, hashlib.sha256(raw).hexdigest()[:16])


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens start..end-1 share one origin; `delta` is how far their KV was moved, in positions.

    A run that was moved is exact only where all layers are local and what it depends on moved along.
    """

    start: int
    end: int
    origin: Origin
    delta: int = 0
    influences: tuple[Removed, ...] = ()  # deleted spans that the run's KV attended, directly or not


@dataclasses.dataclass(frozen=True)
class Sight:
    """How far back the KV of a token looks in a model of which every layer is local."""

    window: int  # positions that a layer's query sees, its own included
    reach: int  # positions before a token that its KV depends on, through all layers

    @classmethod
    def of(cls, config: ModelConfig) -> Sight | None:
        """That of a model; None where some layer sees everything."""
        if set(config.types) != {"local"}:
            return None
        return cls(config.window, (config.num_layers - 1) * (config.window - 1))


@dataclasses.dataclass(frozen=True)
class ExactPrefix:
    """What may enter the prefix index, and the only thing that may: see `Sequence.exact_prefix`."""

    tokens: Int32  # i32[n]
    segments: Int32  # i32[W, 4], positions start..n-1 in order, each slot at its birth
    start: int = 0  # tokens before it are in the index already


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sequence:
    """A token sequence and where its KV stands. Made by an `Engine`; an immutable value.

    Two sequences may share pages; one may be extended, forked or edited without changing the other.
    """

    id: int
    tokens: Int32  # i32[n]
    segments: Int32  # i32[W, 4], sorted by position; keys as born
    copies: Int32 | None = None  # i32[W', 4], the same with relocated runs materialized
    provenance: tuple[Run, ...]
    contract: CacheContract
    grid_length: int = 0  # leading tokens computed by whole chunks on the chunk grid
    priority: int = 0  # for an eviction policy of that name
    rotate: bool = True  # False: keys are used as born wherever they stand (the no_rotation control)
    sight: Sight | None = None  # None where some layer sees everything
    logits: Any = dataclasses.field(default=None, repr=False)  # f32[V] of the next token
    state: int | None = None  # slot of the recurrent layers' state behind the last token, if there are any

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def exact_length(self) -> int:
        """Tokens from the start whose KV is exact."""
        return next((run.start for run in self.provenance if run.origin is not Origin.EXACT), len(self))

    @property
    def exact(self) -> bool:
        """Whether every token's KV was computed from exactly this past."""
        return self.exact_length == len(self.tokens)

    @property
    def table_segments(self) -> Int32:
        """The segments that attention reads."""
        return self.segments if self.copies is None else self.copies

    @property
    def held_pages(self) -> Int32:
        """Page ids that the sequence holds a reference to, one per segment row, i32[...]."""
        if self.copies is None:
            return self.segments[:, PAGE]
        return np.concatenate([self.segments[:, PAGE], self.copies[:, PAGE]])

    @property
    def influences(self) -> tuple[Removed, ...]:
        """Deleted spans that any of this sequence's KV still reflects; none once it is exact."""
        return union(run.influences for run in self.provenance)

    def continued(self, end: int) -> tuple[Run, ...]:
        """Provenance once tokens computed on top of this sequence extend it to `end`."""
        added = Run(len(self), end, Origin.ON_APPROXIMATE, influences=self.influences)
        if computed_exact(self.provenance, len(self), self.sight):
            added = Run(len(self), end, Origin.EXACT)
        return merge_runs([*self.provenance, added])

    def exact_prefix(self, limit: int | None = None, since: int = 0) -> ExactPrefix:
        """The leading tokens (at most `limit`) that are exact and so may be shared.

        Their segments from position `since` on: those before it are in the index.
        """
        length = self.exact_length if limit is None else min(self.exact_length, limit)
        length = min([length, *(run.start for run in self.provenance if run.delta)])
        start = min(since, length)
        return ExactPrefix(self.tokens[:length], clip(self.segments, start, length), start)


def starts(segments: Int32) -> Int32:
    """Position at which each segment begins, i32[W]."""
    return segments[:, FIRST] + segments[:, LO]


def ends(segments: Int32) -> Int32:
    """Position behind each segment's last token, i32[W]."""
    return segments[:, FIRST] + segments[:, HI]


def clip(segments: Int32, start: int, end: int) -> Int32:
    """The parts of `segments` (sorted by position) that stand in start..end-1. A new array."""
    out = segments[slice(*rows_of(segments, start, end))].copy()
    if len(out):
        out[:, LO] = np.maximum(out[:, LO], start - out[:, FIRST])
        out[:, HI] = np.minimum(out[:, HI], end - out[:, FIRST])
    return frozen(out)


def rows_of(segments: Int32, start: int, end: int) -> tuple[int, int]:
    """The rows of `segments` (sorted by position) that reach into start..end-1: the first, and the end.

    The work grows with the logarithm of the rows: no array operation is as long as the sequence.
    """
    item, rows = segments.item, range(len(segments))
    first = bisect.bisect_right(rows, start, key=lambda i: item(i, FIRST) + item(i, HI))
    if end <= start:  # an empty stretch lies in no row, also where it lies within one
        return first, first
    return first, bisect.bisect_left(rows, end, first, key=lambda i: item(i, FIRST) + item(i, LO))


def shift(segments: Int32, distance: int) -> Int32:
    """`segments` standing `distance` positions later. Keys are untouched: only `first` changes."""
    out = segments.copy()
    out[:, FIRST] += distance
    return frozen(out)


def concatenate(parts: list[Int32]) -> Int32:
    """Joins segment arrays and sorts them by position."""
    parts = [p for p in parts if len(p)]
    if not parts:
        return EMPTY_SEGMENTS
    out = np.concatenate(parts)
    begin = starts(out)
    if (np.diff(begin) < 0).any():
        out = out[np.argsort(begin, kind="stable")]
    return frozen(out)


def slots_of(segments: Int32, page_size: int) -> tuple[Int32, Int32]:
    """Expands segments to one row a token: positions i32[n] and slots i32[n]."""
    counts = segments[:, HI] - segments[:, LO]
    row = np.repeat(np.arange(len(segments)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = segments[row, LO] + within
    positions = (segments[row, FIRST] + offset).astype(np.int32)
    return positions, (segments[row, PAGE] * page_size + offset).astype(np.int32)


def union(influences: Iterable[tuple[Removed, ...]]) -> tuple[Removed, ...]:
    """All removals named, each once, in order of first mention."""
    return tuple(dict.fromkeys(removed for each in influences for removed in each))


def merge_runs(runs: list[Run]) -> tuple[Run, ...]:
    """Joins neighbours that differ in place only; empty runs vanish."""
    merged: list[Run] = []
    for run in runs:
        if run.start >= run.end:
            continue
        last = merged[-1] if merged else None
        if last and run == dataclasses.replace(last, start=run.start, end=run.end) and last.end == run.start:
            merged[-1] = dataclasses.replace(last, end=run.end)
        else:
            merged.append(run)
    return tuple(merged)


def computed_exact(before: Iterable[Run], start: int, sight: Sight | None) -> bool:
    """Whether tokens computed from position `start` on are exact, given the runs before it.

    They are if all that they attend is: everything, or a window of it where every layer is local.
    """
    since = 0 if sight is None else start - sight.window + 1
    return all(run.origin is Origin.EXACT for run in before if run.start < start and run.end > since)


def clip_runs(runs: tuple[Run, ...], start: int, end: int) -> list[Run]:
    """The parts of `runs` in start..end-1."""
    return [
        dataclasses.replace(r, start=max(r.start, start), end=min(r.end, end))
        for r in runs
        if r.start < end and r.end > start
    ]
