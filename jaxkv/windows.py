"""What layer groups with a window are given in a step, and what an engine that bounds them refuses.

Part of the memory, in a file of its own. Without a bound every group holds every page, and a step's groups
get the same slots and the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.cache.dtypes import kv_token_bytes
from jaxkv.cache.match import Cause, Match, MatchEnd
from jaxkv.cache.residency import Residency
from jaxkv.cache.sequence import FIRST, HI, LO, PAGE, Sequence, clip
from jaxkv.cache.table import GroupInput, PageTable, build_table, empty_table, table_entries
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.model.config import ModelConfig
from jaxkv.schedule import delta_of, for_shape
from jaxkv.typing import Int32

if TYPE_CHECKING:
    from jaxkv.memory import Memory

Row = tuple[Int32, bool]  # segments i32[W, 4] that a row's queries attend, and whether these are rotated


def bytes_for_pages(
    config: ModelConfig, capacity_bytes: int | None, local_pages: int | None, page_size: int, kv_dtype: str
) -> int | None:
    """What of an engine's `capacity_bytes` is left for pages that all layers' groups but local ones hold."""
    if capacity_bytes is None or not isinstance(local_pages, int) or not isinstance(capacity_bytes, int):
        return capacity_bytes
    token = kv_token_bytes(config, kv_dtype) - kv_token_bytes(config, kv_dtype, windowed=False)
    taken = local_pages * page_size * token
    if capacity_bytes <= taken:
        raise ConfigError(
            f"capacity_bytes is {capacity_bytes}, expected more than the {taken} of {local_pages} local pages"
        )
    return capacity_bytes - taken


def check_local_pages(config: ModelConfig, local_pages: int | None, page_size: int, step: int) -> None:
    """Refuses a bound that a single sequence could not go on within; `step` tokens are computed at once.

    Raises:
      ConfigError: there are no local layers, it is no whole number, or too few.
    """
    if local_pages is None:
        return
    window = next((group.window for group in config.groups if group.window), 0)
    if not window:
        raise ConfigError(f"local_pages is {local_pages}, expected None: the model has no local layers")
    least = -(-(window + step) // page_size) + 1
    if isinstance(local_pages, bool) or not isinstance(local_pages, int | np.integer) or local_pages < least:
        raise ConfigError(
            f"local_pages is {local_pages!r}, expected a whole number of at least {least}: a window of "
            f"{window} and {step} tokens computed at once take so many"
        )


def make_residency(
    config: ModelConfig, num_pages: int, page_size: int, local_pages: int | None, grid: int
) -> Residency | None:
    """The map of local layers' pages, if `local_pages`, which was checked, bounds them."""
    if local_pages is None:
        return None
    window = next(group.window for group in config.groups if group.window)
    return Residency(
        num_pages, min(int(local_pages), num_pages), page_size=page_size, window=window, grid=grid
    )


def group_inputs(
    memory: Memory,
    slots: Int32,
    table: PageTable,
    rows: list[Row],
    queries: list[Int32],
    *,
    max_deltas: int,
) -> tuple[GroupInput, ...]:
    """Slots and table of each layer group in a step, after making room for what it writes.

    Args:
      memory: holds the pages.
      slots: i32[B, T], where the step writes; one that the pool does not have drops the write.
      table: of all that the rows hold, as every group has it without a bound.
      rows: what each row attends; fewer than B if the last ones are padding.
      queries: positions of each row's queries, ascending.
      max_deltas: as in `build_table`.

    Raises:
      CapacityError: too few local pages, or a query sees KV that local layers no longer have.
    """
    shared = GroupInput(slots=slots, table=table)
    held = memory.residency
    if held is None:
        return (shared,) * len(memory.config.groups)
    size = memory.pool.page_size
    visible = [_visible(held, segments, at) for (segments, _), at in zip(rows, queries, strict=True)]
    written = np.sort(slots[slots < memory.pool.num_slots])
    pages, first = np.unique(written // size, return_index=True)
    attended = np.unique(np.concatenate([part[:, PAGE] for part in visible]))
    # What is attended and not written by this step must be there, before anything changes.
    there = ~np.isin(attended, pages)
    if not held.held(attended[there]).all():
        raise _gone(held, visible, set(pages.tolist()))
    memory.hold_local(pages.astype(np.int32), (written[first] % size).astype(np.int32), attended)
    mapped = []
    for part, (_, rotate) in zip(visible, rows, strict=True):
        if not held.readable(part).all():
            raise _gone(held, visible, set())
        delta = delta_of(memory.pool, part, rotate=rotate)
        part = part.copy()
        part[:, PAGE] = held.where[part[:, PAGE]]
        mapped.append((part, delta))
    empty = mapped[0][0][:0]
    mapped += [(empty, empty[:, 0])] * (len(slots) - len(mapped))
    local = build_table(mapped, num_pages=held.capacity, page_size=size, max_deltas=max_deltas)
    inputs = GroupInput(slots=held.physical(slots), table=for_shape(local, slots.shape[1], max_deltas))
    return tuple(inputs if group.window else shared for group in memory.config.groups)


def empty_groups(memory: Memory, slots: Int32, table: PageTable) -> tuple[GroupInput, ...]:
    """`group_inputs` of a step that writes nothing and sees nothing: no page changes hands."""
    shared = GroupInput(slots=slots, table=table)
    held = memory.residency
    if held is None:
        return (shared,) * len(memory.config.groups)
    size = memory.pool.page_size
    local = empty_table(len(slots), table_entries(1, size), num_pages=held.capacity, page_size=size, deltas=1)
    inputs = GroupInput(
        slots=held.physical(slots), table=for_shape(local, slots.shape[1], table.deltas.shape[1])
    )
    return tuple(inputs if group.window else shared for group in memory.config.groups)


def _visible(held: Residency, segments: Int32, queries: Int32) -> Int32:
    """The segments that some query sees, without the slots before the first that any does."""
    seen, first = held.seen(segments, queries)
    part: Int32 = segments[seen].copy()
    part[:, LO] = np.maximum(part[:, LO], first[seen])
    return part


def _gone(held: Residency, visible: list[Int32], written: set[int]) -> CapacityError:
    for part in visible:
        for row in part[~held.readable(part)]:
            if int(row[PAGE]) not in written:
                start, end = int(row[FIRST] + row[LO]), int(row[FIRST] + row[HI])
                return CapacityError(
                    f"a computed token sees positions {start} to {end - 1}, which local layers no longer "
                    f"hold, expected local_pages of more than {held.capacity}, or None"
                )
    return CapacityError("a computed token sees what local layers no longer hold, expected more local_pages")


def refuse_bound(memory: Memory, what: str) -> None:
    """Raises ConfigError for what needs the KV of every layer, where local layers' pages are bounded."""
    if memory.residency is not None:
        raise ConfigError(
            f"{what} needs the KV of every layer and local_pages is {memory.residency.capacity}, "
            "expected local_pages=None"
        )


def resume_point(memory: Memory, segments: Int32, length: int) -> tuple[int, Cause | None]:
    """How much of a cached prefix every layer can go on from, and what limits it, if anything does.

    Args:
      memory: its `resumes` are asked in turn until none of them shortens.
      segments: i32[W, 4], positions 0..length-1 in order.
      length: cached positions.
    """
    cause: Cause | None = None
    while length:
        before = length
        for each in memory.resumes:
            if (at := each.resume_point(segments, length)) < length:
                length, cause = at, each.cause
                segments = clip(segments, 0, length)
        if length == before:
            break
    return length, cause


def resumer(memory: Memory, sequence: Sequence) -> Callable[[int], int] | None:
    """How much of a sequence's first n positions every layer can go on from; None if of all."""
    if not memory.resumes:
        return None
    return lambda length: resume_point(memory, clip(sequence.segments, 0, length), length)[0]


def shortened(memory: Memory, match: Match) -> Match:
    """The match cut back to where every layer can go on. Gives back the references behind that."""
    length, cause = resume_point(memory, match.segments, match.length)
    if cause is None:
        return match
    segments = clip(match.segments, 0, length)
    memory.release(match.segments[len(segments) :, PAGE])
    return dataclasses.replace(match, length=length, segments=segments, end=MatchEnd(cause, length))
