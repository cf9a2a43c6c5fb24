"""Page tables: what a step needs to know of a sequence's segments, and how the host builds them."""

from __future__ import annotations

import numpy as np
from flax import struct

from jaxkv.errors import CapacityError, HandleError
from jaxkv.typing import Array, Int32

BLOCK_SLOTS = 256  # keys that share one rotated query; also what one attention step folds in
MIN_ENTRIES = 256  # empty blocks are skipped, so a generous table costs nothing and saves shapes


@struct.dataclass(kw_only=True)
class PageTable:
    """Segments of a batch of sequences, grouped by delta in blocks of `M / delta_index.shape[1]`."""

    page: Array  # i32[B, M], num_pages where empty
    first: Array  # i32[B, M], slot s of the page stands at position first + s
    lo: Array  # i32[B, M], slots lo..hi-1 belong to the sequence
    hi: Array  # i32[B, M], 0 where empty
    delta_index: Array  # i32[B, M/block], row of `deltas` that a block of entries uses
    deltas: Array  # i32[B, R], deltas[:, 0] = 0


@struct.dataclass(kw_only=True)
class GroupInput:
    """Where one layer group writes and reads in a step."""

    slots: Array  # i32[B, T], page·P + offset; num_pages·P drops the write
    table: PageTable


@struct.dataclass(kw_only=True)
class StateInput:
    """Which state of the recurrent layers each row starts from, and where the one behind it goes.

    The number of slots, as a slot, reads zeros and drops a write. Rows write different slots; a row may
    write the slot that it reads.
    """

    read: Array  # i32[B]
    write: Array  # i32[B]
    fresh: Array | None = None  # bool[B], whether the operator begins behind the state that is read


@struct.dataclass(kw_only=True)
class StepInput:
    """One step of a batch. Row b has `lengths[b]` query tokens; the rest of the row is padding.

    Recurrent layers take a row's tokens in their order, as those that follow the state they read.
    """

    tokens: Array  # i32[B, T]
    positions: Array  # i32[B, T], any order, not necessarily contiguous
    lengths: Array  # i32[B]
    groups: tuple[GroupInput, ...]
    states: StateInput | None = None  # with recurrent layers


def block_entries(page_size: int) -> int:
    """Table entries in a block of one delta."""
    return max(BLOCK_SLOTS // page_size, 1)


def bucket(n: int, minimum: int = 1) -> int:
    """The smallest power of two times `minimum` that holds `n`: shapes repeat, compilations don't."""
    size = minimum
    while size < n:
        size *= 2
    return size


def _require_segments(segments: Int32, num_pages: int, page_size: int) -> None:
    # On the device an id outside the pool would be clamped to some other page, silently.
    if not len(segments):
        return
    page, lo, hi, first = segments.T
    if page.min() < 0 or page.max() >= num_pages:
        bad = int(page[(page < 0) | (page >= num_pages)][0])
        raise HandleError(f"a segment names page {bad}, expected 0 to {num_pages - 1}")
    if lo.min() < 0 or (lo >= hi).any() or hi.max() > page_size or (first + lo).min() < 0:
        raise HandleError(
            f"a segment has slots or positions outside its page, expected 0 <= lo < hi <= {page_size} "
            "and positions of 0 or more"
        )


def table_entries(blocks: int, page_size: int) -> int:
    """Entries of a table that holds `blocks` blocks of one delta."""
    block = block_entries(page_size)
    return bucket(max(blocks * block, 1), max(MIN_ENTRIES, block))


def empty_table(batch: int, entries: int, *, num_pages: int, page_size: int, deltas: int) -> PageTable:
    """A table in which no row has a segment, of NumPy arrays to be written to."""
    packed = np.zeros((4, batch, entries), np.int32)
    packed[0] = num_pages
    return PageTable(
        page=packed[0],
        first=packed[1],
        lo=packed[2],
        hi=packed[3],
        delta_index=np.zeros((batch, entries // block_entries(page_size)), np.int32),
        deltas=np.zeros((batch, deltas), np.int32),
    )


def build_table(
    rows: list[tuple[Int32, Int32]],
    *,
    num_pages: int,
    page_size: int,
    max_deltas: int,
) -> PageTable:
    """Lays out segments for the device, as NumPy arrays.

    Entries are grouped by delta, delta 0 first, and every group is padded to whole blocks: at most one
    block is lost per delta, and a kernel rotates the query once a block. Attention does not depend on
    the order of entries beyond rounding; for R = 1 the order is that of positions.

    Args:
      rows: per sequence, segments i32[W, 4] and the delta of each, i32[W].
      num_pages: marks empty entries.
      page_size: P.
      max_deltas: R of the table when any row has a nonzero delta, else R is 1.

    Raises:
      CapacityError: a row has more distinct deltas than `max_deltas`, zero included.
      HandleError: a segment names a page or slots that do not exist.
    """
    for segments, _ in rows:
        _require_segments(segments, num_pages, page_size)
    block = block_entries(page_size)
    placed: list[tuple[Int32, Int32, list[int], Int32]] = []
    for segments, delta in rows:
        if not delta.any():
            index = np.zeros(-(-len(segments) // block), np.int32)
            placed.append((segments, np.arange(len(segments), dtype=np.int32), [0], index))
            continue
        distinct = [0, *(int(d) for d in np.unique(delta) if d)]
        if len(distinct) > max_deltas:
            raise CapacityError(
                f"the sequence stands at {len(distinct)} distinct deltas, expected at most max_deltas "
                f"{max_deltas}"
            )
        where, parts, index_parts, start = [], [], [], 0
        for number, value in enumerate(distinct):
            part = np.flatnonzero(delta == value)
            blocks = -(-len(part) // block)
            parts.append(part)
            where.append(start + np.arange(len(part)))
            index_parts.append(np.full(blocks, number))
            start += blocks * block
        placed.append(
            (
                segments[np.concatenate(parts)],
                np.concatenate(where).astype(np.int32),
                distinct,
                np.concatenate(index_parts).astype(np.int32),
            )
        )
    blocks = max((len(p[3]) for p in placed), default=1)
    relocated = any(len(p[2]) > 1 for p in placed)
    table = empty_table(
        len(rows),
        table_entries(blocks, page_size),
        num_pages=num_pages,
        page_size=page_size,
        deltas=max_deltas if relocated else 1,
    )
    for b, (segments, at, distinct, index) in enumerate(placed):
        table.page[b, at] = segments[:, 0]
        table.first[b, at] = segments[:, 3]
        table.lo[b, at] = segments[:, 1]
        table.hi[b, at] = segments[:, 2]
        table.delta_index[b, : len(index)] = index
        table.deltas[b, : len(distinct)] = distinct
    return table
