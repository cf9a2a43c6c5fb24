"""Host arithmetic between a request and a step: chunk shapes, slots for new tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxkv.cache.pool import PagePool
from jaxkv.cache.sequence import EMPTY_SEGMENTS, FIRST, HI, LO, PAGE, ends, frozen
from jaxkv.cache.table import GroupInput, PageTable, StateInput, StepInput, build_table
from jaxkv.typing import Int32

EMPTY: Int32 = EMPTY_SEGMENTS[:, PAGE]
SMALL_STEP = 64  # tokens


def step_shapes(chunk: int) -> list[int]:
    """The padded shapes that steps have, ascending: 1, 16, 64, then each twice the last, and a chunk.

    Below 64 tokens a step costs mostly what its weights cost to read, above it what its products cost: there
    a shape four times as large is twice the time for many a prompt.
    """
    shapes = [1, 16]
    while (after := shapes[-1] * (4 if shapes[-1] < SMALL_STEP else 2)) < chunk:
        shapes.append(after)
    return [s for s in shapes if s < chunk] + [chunk]


def step_sizes(count: int, chunk: int) -> list[tuple[int, int]]:
    """Splits `count` tokens into steps: (valid tokens, padded shape) each.

    Whole chunks first. What is left goes into `step_shapes`, so that few shapes are ever compiled and
    less than half of a step is padding. Depends on `count` alone: cold and warm runs see equal shapes.
    """
    sizes = [(chunk, chunk)] * (count // chunk)
    rest = count % chunk
    shapes = step_shapes(chunk)
    while rest:
        fits = next(s for s in shapes if s >= rest)
        if rest > 16 and fits > 2 * rest:
            fits = max(s for s in shapes if s <= rest)
        sizes.append((min(rest, fits), fits))
        rest -= min(rest, fits)
    return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Slots for tokens that a step will compute."""

    slots: Int32  # i32[f]
    segments: Int32  # i32[w, 4]
    fresh: Int32  # page ids allocated, each with one reference held by whoever placed

    @classmethod
    def of(cls, segments: Int32, slots: Int32 = EMPTY, fresh: Int32 = EMPTY) -> Placement:
        """A placement whose watermarks follow from its segments."""
        return cls(slots=slots, segments=segments, fresh=fresh)

    @property
    def filled(self) -> tuple[Int32, Int32]:
        """Pages and the watermark each has once the step has returned."""
        return self.segments[:, PAGE], self.segments[:, HI]


def place(
    pool: PagePool,
    base: Int32,
    positions: Int32,
    *,
    claimed: set[int] | None = None,
    make_room: Callable[[int], None] | None = None,
) -> Placement:
    """Finds slots for `positions` (ascending): behind the page before them if it has room, else fresh.

    A page may be appended to by whoever's segment ends at its watermark: slots are written once, so of
    two siblings the first goes on in the page and the other starts a new one.

    Args:
      pool: allocates; the new pages carry one reference each.
      base: segments i32[W, 4] of the sequence, sorted by position.
      positions: i32[f] to compute, ascending, none of them in `base`.
      claimed: pages that another row of the same step already appends to; updated.
      make_room: called with the pages needed before they are allocated; may evict.

    Raises:
      CapacityError: not enough free pages; the pool is unchanged.
    """
    size = pool.page_size
    if int(positions[-1]) - int(positions[0]) == len(positions) - 1:
        return _place_run(pool, base, int(positions[0]), len(positions), claimed, make_room)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    run_starts = np.concatenate([[0], breaks])
    run_ends = np.concatenate([breaks, [len(positions)]])
    base_ends = ends(base)
    tails: list[tuple[int, int, int, int] | None] = []  # page, lo, hi, first
    needed: list[Int32] = []
    for a, b in zip(run_starts, run_ends, strict=True):
        start, count = int(positions[a]), int(b - a)
        tail = _open_tail(pool, base, base_ends, start, count, claimed)
        tails.append(tail)
        used = tail[2] - tail[1] if tail else 0
        needed.append(np.arange(start + used, start + count, size, dtype=np.int32))
    births = np.concatenate(needed)
    if make_room is not None:
        make_room(len(births))
    fresh = pool.allocate(births)
    rows: list[Int32] = []
    slots: list[Int32] = []
    taken = 0
    for b, tail, new in zip(run_ends, tails, needed, strict=True):
        end = int(positions[b - 1]) + 1
        if tail:
            rows.append(np.array([tail], np.int32))
            slots.append(np.arange(tail[1], tail[2], dtype=np.int32) + np.int32(tail[0] * size))
            if claimed is not None:
                claimed.add(tail[0])
        pages = fresh[taken : taken + len(new)]
        taken += len(new)
        if len(new):
            hi = np.minimum(end - new, size).astype(np.int32)
            rows.append(np.stack([pages, np.zeros_like(new), hi, new], axis=1))
            every = (pages[:, None] * size + np.arange(size)).astype(np.int32)
            slots.append(every.reshape(-1)[: end - int(new[0])])
    segments = np.concatenate(rows).astype(np.int32)
    return Placement(slots=np.concatenate(slots).astype(np.int32), segments=segments, fresh=fresh)


def _place_run(
    pool: PagePool,
    base: Int32,
    start: int,
    count: int,
    claimed: set[int] | None,
    make_room: Callable[[int], None] | None,
) -> Placement:
    """`place` for one run, the common case: no array operation here is as long as the sequence."""
    size, end = pool.page_size, start + count
    # Behind the last row is where a run mostly goes; only elsewhere are the rows searched.
    last = base[-1].tolist() if len(base) else None
    if last is not None and last[FIRST] + last[HI] == start:
        tail = _room(pool, last, count, claimed)
    else:
        tail = _open_tail(pool, base, ends(base), start, count, claimed)
    used = tail[2] - tail[1] if tail else 0
    births = np.arange(start + used, end, size, dtype=np.int32)
    if make_room is not None:
        make_room(len(births))
    fresh = pool.allocate(births)
    first = 1 if tail else 0
    segments = np.empty((len(fresh) + first, 4), np.int32)
    slots = np.empty(used + len(fresh) * size, np.int32)
    if tail:
        segments[0] = tail
        slots[:used] = np.arange(tail[0] * size + tail[1], tail[0] * size + tail[2])
        if claimed is not None:
            claimed.add(tail[0])
    if len(fresh):
        segments[first:, PAGE] = fresh
        segments[first:, LO] = 0
        segments[first:, HI] = size
        segments[first:, FIRST] = births
        segments[-1, HI] = end - int(births[-1])
        np.add(fresh[:, None] * np.int32(size), np.arange(size, dtype=np.int32),
               out=slots[used:].reshape(-1, size))  # fmt: skip
    return Placement(slots=slots[:count], segments=segments, fresh=fresh)


def _open_tail(
    pool: PagePool,
    base: Int32,
    base_ends: Int32,
    start: int,
    count: int,
    claimed: set[int] | None,
) -> tuple[int, int, int, int] | None:
    at = int(np.searchsorted(base_ends, np.int32(start)))  # not a Python int: see `clip`
    if at >= len(base) or base_ends[at] != start:
        return None
    return _room(pool, base[at].tolist(), count, claimed)


def _room(
    pool: PagePool, row: list[int], count: int, claimed: set[int] | None
) -> tuple[int, int, int, int] | None:
    """Where `count` tokens go on in the page of a segment, if it is written no further and has room."""
    page, _, hi, first = row
    room = hi < pool.page_size and hi == pool.filled[page] and first == pool.birth[page]
    if not room or (claimed is not None and page in claimed):
        return None
    return page, hi, min(hi + count, pool.page_size), first


def coalesce(segments: Int32) -> Int32:
    """Joins neighbouring rows that are one run of one page: appending must not grow the list."""
    if len(segments) < 2:
        return segments
    a, b = segments[:-1], segments[1:]
    same = (a[:, PAGE] == b[:, PAGE]) & (a[:, FIRST] == b[:, FIRST]) & (a[:, HI] == b[:, LO])
    if not same.any():
        return segments
    head = np.flatnonzero(np.concatenate([[True], ~same]))
    tail = np.concatenate([head[1:] - 1, [len(segments) - 1]])
    out = segments[head].copy()
    out[:, HI] = segments[tail, HI]
    return frozen(out)


def step_input(
    tokens: Int32,
    positions: Int32,
    slots: Int32,
    shape: int,
    table: PageTable,
    *,
    drop: int,
    states: tuple[int, int, bool] | None = None,
) -> StepInput:
    """One row's step, padded to `shape` tokens, of one layer group; slot id `drop` drops a write.

    `states`: the slots that recurrent layers read and write, and whether operators begin between them.
    """
    count = len(positions)
    padded = np.zeros((3, 1, shape), np.int32)
    padded[0, 0, :count] = tokens
    padded[1, 0, :count] = positions
    padded[2] = drop
    padded[2, 0, :count] = slots
    return StepInput(
        tokens=padded[0],
        positions=padded[1],
        lengths=np.array([count], np.int32),
        groups=(GroupInput(slots=padded[2], table=table),),
        states=None if states is None else _state_input(states),
    )


def _state_input(slots: tuple[int, int, bool]) -> StateInput:
    read, write, fresh = slots
    return StateInput(
        read=np.array([read], np.int32), write=np.array([write], np.int32), fresh=np.array([fresh])
    )


def delta_of(pool: PagePool, segments: Int32, *, rotate: bool) -> Int32:
    """How far each segment stands from its birth, i32[W]; zeros when keys are not to be rotated."""
    if not rotate:
        return np.zeros(len(segments), np.int32)
    delta: Int32 = segments[:, FIRST] - pool.birth[segments[:, PAGE]]
    return delta


def for_shape(table: PageTable, shape: int, max_deltas: int) -> PageTable:
    """`table` as a step of `shape` tokens takes it: small steps always have room for all deltas.

    Rotating a few queries for deltas that are not there costs nothing, and ordinary and relocated
    sequences then share their small compiled steps. Large ones have R = 1 where that is enough.
    """
    missing = max_deltas - table.deltas.shape[1]
    if shape > SMALL_STEP or missing <= 0:
        return table
    deltas = np.pad(table.deltas, ((0, 0), (0, missing)))
    return table.replace(deltas=deltas)  # type: ignore[attr-defined]


def make_table(pool: PagePool, rows: list[tuple[Int32, bool]], max_deltas: int) -> PageTable:
    """A `PageTable` for (segments, rotate) rows."""
    return build_table(
        [(segments, delta_of(pool, segments, rotate=rotate)) for segments, rotate in rows],
        num_pages=pool.num_pages,
        page_size=pool.page_size,
        max_deltas=max_deltas,
    )
