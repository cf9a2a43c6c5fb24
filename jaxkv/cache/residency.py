"""Which pages a layer group with a window holds, where, and which go first. Host only.

Page ids are one logical space, the pool's. A group whose layers see a window needs a page only for as long as
some window may reach into it, so it has a smaller array of its own behind a map from logical to physical
pages. A page that is not held is *out*: attention of this group must not be asked for it.

What the last window of a live sequence reaches is never taken; everything else goes, least recently used
first, when room is needed: cached prefixes then keep their pages of the other groups and can be resumed
where the last window is still held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from jaxkv.cache.match import Cause
from jaxkv.cache.sequence import FIRST, LO, PAGE, ends, starts
from jaxkv.errors import CapacityError, HandleError
from jaxkv.typing import Bool, Int32

_NONE: Int32 = np.zeros(0, np.int32)


class ResumePoint(Protocol):
    """What layers need, beside the KV of a prefix, in order to go on behind it."""

    @property
    def cause(self) -> Cause:
        """Why a match is shortened."""
        ...

    def resume_point(self, segments: Int32, length: int) -> int:
        """The deepest position, at most `length`, behind which these layers can go on."""
        ...


class Residency:
    """Physical pages of one windowed group.

    Attributes (read them; only the methods change them):
      window: positions that a query of the group sees, its own included.
      capacity: physical pages; as a physical page, none.
      where: i32[num_pages], the physical page of each logical one, or `capacity`.
      since: i32[num_pages], the first slot that a held page holds.
    """

    cause = Cause.WINDOW

    def __init__(self, num_pages: int, capacity: int, *, page_size: int, window: int, grid: int = 1) -> None:
        self.window, self.capacity, self.page_size, self.grid = window, capacity, page_size, grid
        self.where: Int32 = np.full(num_pages, capacity, np.int32)
        self.since: Int32 = np.full(num_pages, page_size, np.int32)
        self._owner: Int32 = np.full(capacity, -1, np.int32)
        self._used = np.zeros(num_pages, np.int64)
        self._free = list(range(capacity - 1, -1, -1))
        self._now = 0
        self.evicted = 0  # pages that went to make room

    @property
    def free_count(self) -> int:
        """Physical pages that hold nothing."""
        return len(self._free)

    def held(self, pages: Int32) -> Bool:
        """Which logical pages are held, bool[n]."""
        return self.where[pages] < self.capacity

    def readable(self, segments: Int32) -> Bool:
        """Which segments, i32[W, 4], are held whole, bool[W]."""
        page = segments[:, PAGE]
        return self.held(page) & (self.since[page] <= segments[:, LO])

    def seen(self, segments: Int32, queries: Int32) -> tuple[Bool, Int32]:
        """Which segments some query sees, and the first slot of each that any does.

        Args:
          segments: i32[W, 4] at the positions where they stand.
          queries: i32[q], positions, ascending.
        """
        if not len(queries):
            return np.zeros(len(segments), np.bool_), segments[:, LO]
        begin = starts(segments)
        at = np.searchsorted(queries, begin)
        first = queries[np.minimum(at, len(queries) - 1)]  # the first query at or behind the segment's start
        earliest = np.maximum(begin, first - self.window + 1)
        found = (at < len(queries)) & (earliest < ends(segments))
        return found, (earliest - segments[:, FIRST]).astype(np.int32)

    def tail(self, segments: Int32, length: int) -> Int32:
        """Logical pages that the query behind position `length` - 1, or that one again, sees; each once."""
        return np.unique(segments[ends(segments) > length - self.window, PAGE])

    def hold(self, pages: Int32, slots: Int32, keep: Int32, pinned: Iterable[Int32]) -> Int32:
        """Gives physical pages to those logical ones that have none, taking others' if it must.

        Args:
          pages: i32[n], logical, each once, about to be written.
          slots: i32[n], the first slot of each that is.
          keep: logical pages that must stay.
          pinned: logical pages of live sequences, which must stay too.

        Returns:
          Physical pages that were taken from others, for whoever poisons them.

        Raises:
          CapacityError: what must stay leaves too few; nothing changed.
        """
        out = ~self.held(pages)
        new, first = pages[out], slots[out]
        taken = self._victims(len(new) - len(self._free), [keep, pages, *pinned])
        self._release(taken)
        self.evicted += len(taken)
        for page, slot in zip(new.tolist(), first.tolist(), strict=True):
            physical = self._free.pop()
            self.where[page], self.since[page], self._owner[physical] = physical, slot, page
        self._now += 1
        self._used[keep] = self._used[pages] = self._now
        return taken

    def _victims(self, count: int, keep: list[Int32]) -> Int32:
        if count <= 0:
            return _NONE
        owners = self._owner[self._owner >= 0]
        loose = owners[~np.isin(owners, np.concatenate(keep))]
        if len(loose) < count:
            raise CapacityError(
                f"{count} pages of local layers are needed, {len(loose)} can be freed: expected local_pages "
                f"of more than {self.capacity}, or fewer live sequences: each keeps its last window"
            )
        order = np.argsort(self._used[loose], kind="stable")
        physical: Int32 = self.where[loose[order[:count]]]
        return physical

    def drop(self, pages: Int32) -> Int32:
        """Lets go logical pages that are free in the pool; returns their physical ones."""
        physical: Int32 = self.where[pages[self.held(pages)]]
        self._release(physical)
        return physical

    def _release(self, physical: Int32) -> None:
        owners = self._owner[physical]
        self.where[owners], self.since[owners] = self.capacity, self.page_size
        self._owner[physical] = -1
        self._free.extend(physical.tolist())

    def resume_point(self, segments: Int32, length: int) -> int:
        """The deepest position, at most `length`, whose window before it is held; 0 always is one.

        Args:
          segments: i32[W, 4], positions 0..length-1 in order.
          length: positions that are cached; on the grid, and so is the result.
        """
        out = ~self.readable(segments)
        begin, end = starts(segments)[out], ends(segments)[out]
        at = length
        for a, b in zip(begin[::-1].tolist(), end[::-1].tolist(), strict=True):
            # The query at `at` sees at - window + 1 on; computed again, the token at - 1 sees one more.
            while at > a and at - self.window < b:
                at = a // self.grid * self.grid
        return at

    def physical(self, slots: Int32) -> Int32:
        """Logical slots as the group's own; one whose page is out, or that drops a write, drops it."""
        page = slots // self.page_size
        known = page < len(self.where)
        found = np.where(known, self.where[np.minimum(page, len(self.where) - 1)], self.capacity)
        dropped = self.capacity * self.page_size
        moved = found * self.page_size + slots % self.page_size
        return np.where(found < self.capacity, moved, dropped).astype(np.int32)

    def check(self, live: Int32) -> None:
        """Integrity: the maps agree, and no page is held that the pool has free. HandleError otherwise.

        Args:
          live: logical pages that somebody holds.
        """
        owned = np.flatnonzero(self._owner >= 0)
        if not np.array_equal(self.where[self._owner[owned]], owned):
            raise HandleError("a local page is not where its owner says, expected maps that agree")
        if int((self.where < self.capacity).sum()) != len(owned):
            raise HandleError("a page says it is held and no local page has it, expected maps that agree")
        if sorted([*self._free, *owned.tolist()]) != list(range(self.capacity)):
            raise HandleError("local pages are lost or free twice, expected free + held = all")
        if not np.isin(self._owner[owned], live).all():
            raise HandleError("a local page is held for a page that is free, expected it to be let go")
