"""Who holds which page. Host only; an operation is a few array operations, none loops.

A page is free, or held by as many references as its `refcount` says. Holders (sequences, matches,
nodes of the prefix index) keep **one reference for each segment row** that names the page, so a
holder retains and releases with the page column of its own segments, repeats and all. What the
slots contain is not known here, only how many were written: slots are written once, in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from jaxkv.errors import CapacityError, ConfigError, HandleError
from jaxkv.typing import Int32

# An int32 scalar keeps ufunc.at on its fast path; a Python 1 makes it forty times slower.
_ONE = np.int32(1)


class PagePool:
    """Free list, reference counts, births and write watermarks of `num_pages` pages.

    Attributes (read them; only the methods change them):
      refcount: i32[num_pages], references held on each page; 0 = free.
      birth: i32[num_pages], the position at which slot 0 of the page is born.
      filled: i32[num_pages], slots written so far; slots are written once and in order.

    A method that raises leaves the pool as it was.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value <= 0:
                raise ConfigError(f"{name} is {value}, expected a positive number")
        self.num_pages = num_pages
        self.page_size = page_size
        self.refcount: Int32 = np.zeros(num_pages, np.int32)
        self.birth: Int32 = np.zeros(num_pages, np.int32)
        self.filled: Int32 = np.zeros(num_pages, np.int32)
        # A stack kept in descending order at first, so that its top gives ascending ids.
        self._free: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages

    @property
    def num_slots(self) -> int:
        """Slots of all pages; as a slot id, the one that drops a write."""
        return self.num_pages * self.page_size

    @property
    def free_count(self) -> int:
        """Pages that nobody holds."""
        return self._top

    @property
    def live_count(self) -> int:
        """Pages that somebody holds; free_count + live_count = num_pages."""
        return self.num_pages - self._top

    def allocate(self, births: npt.ArrayLike) -> Int32:
        """Takes n free pages, each with one reference and no slot written.

        Args:
          births: i32[n], the position of slot 0 of each page, not negative.
        Returns:
          i32[n] page ids, ascending and contiguous as long as the pool is fresh.
        Raises:
          CapacityError: fewer than n pages are free.
          HandleError: a birth is negative.
        """
        at = as_int32("births", births)
        n = len(at)
        if n > self._top:
            raise CapacityError(f"{n} pages are needed, {self._top} are free of {self.num_pages} in the pool")
        if n and at.min() < 0:
            raise HandleError(f"births holds {at.min()}, expected positions of 0 or more")
        taken = self._free[self._top - n : self._top][::-1].copy()
        self._top -= n
        self.refcount[taken] = 1
        self.birth[taken] = at
        self.filled[taken] = 0
        return taken

    def retain(self, pages: npt.ArrayLike) -> None:
        """Adds one reference for each entry of `pages`, i32[n]; repeats count.

        Raises HandleError when a page is free or outside the pool.
        """
        known = self._known(pages)
        if len(known) and self.refcount[known].min() == 0:
            page = known[self.refcount[known] == 0][0]
            raise HandleError(f"page {page} is free, expected a page that somebody holds")
        np.add.at(self.refcount, known, _ONE)

    def retain_held(self, pages: Int32) -> None:
        """`retain` without checks, for a holder of other references to the same i32[n] pages."""
        np.add.at(self.refcount, pages, _ONE)

    def release(self, pages: npt.ArrayLike) -> Int32:
        """Takes back one reference for each entry of `pages`, i32[n]; repeats count.

        Returns:
          i32[f], the pages that became free by this call, ascending, each once.
        Raises:
          HandleError: a page has fewer references than the call takes, or is outside the pool.
        """
        known = self._known(pages)
        if not len(known):
            return _EMPTY
        np.subtract.at(self.refcount, known, _ONE)
        left = self.refcount[known]
        if left.min() < 0:
            np.add.at(self.refcount, known, _ONE)
            page = known[left < 0][0]
            raise HandleError(
                f"page {page} is released {np.count_nonzero(known == page)} times, "
                f"expected at most its {self.refcount[page]} references"
            )
        freed = known[left == 0]
        if len(freed) > 1:
            freed = np.sort(freed)
            freed = freed[np.concatenate(([True], freed[1:] != freed[:-1]))]
        self._free[self._top : self._top + len(freed)] = freed[::-1]
        self._top += len(freed)
        return freed

    def fill(self, pages: npt.ArrayLike, upto: npt.ArrayLike) -> None:
        """Moves the write watermark of each page to `upto` slots.

        Args:
          pages: i32[n], held pages; a page may repeat, the highest `upto` counts.
          upto: i32[n], or one number for all; slots written from now on, at most the page size.
        Raises:
          HandleError: a watermark would go back or past the page size, or a page is not held.
        """
        known = self._known(pages)
        marks = np.broadcast_to(np.asarray(upto, np.int32), known.shape)
        wrong = (marks < self.filled[known]) | (marks > self.page_size)
        wrong |= self.refcount[known] == 0
        if wrong.any():
            at = int(wrong.argmax())
            page = known[at]
            state = "free" if self.refcount[page] == 0 else f"filled to {self.filled[page]}"
            raise HandleError(
                f"page {page} is {state} and would be filled to {marks[at]}, expected a held page "
                f"and a watermark that only rises, up to {self.page_size}"
            )
        np.maximum.at(self.filled, known, marks)

    def rebuild(self, references: Iterable[npt.ArrayLike]) -> Int32:
        """Makes `references` the only ones, whatever was counted before.

        Returns:
          i32[f], the pages that became free by this.
        """
        before = self.refcount > 0
        counts = np.zeros(self.num_pages, np.int32)
        for pages in references:
            np.add.at(counts, self._known(pages), _ONE)
        self.refcount = counts
        free = np.flatnonzero(counts == 0).astype(np.int32)
        self._top = len(free)
        self._free[: self._top] = free[::-1]
        return free[before[free]]

    def check(self, references: Iterable[npt.ArrayLike]) -> None:
        """Integrity: counts equal the given references, and the free list is exactly the rest.

        Args:
          references: page arrays i32[n], one entry for each reference that any holder has.
        Raises:
          HandleError: naming the first page that disagrees.
        """
        held = np.zeros(self.num_pages, np.int32)
        for pages in references:
            np.add.at(held, self._known(pages), _ONE)
        if (wrong := np.flatnonzero(held != self.refcount)).size:
            page = wrong[0]
            raise HandleError(
                f"page {page} counts {self.refcount[page]} references, "
                f"expected the {held[page]} that its holders have"
            )
        free = np.bincount(self._free[: self._top], minlength=self.num_pages)
        if (wrong := np.flatnonzero(free != (self.refcount == 0))).size:
            page = wrong[0]
            raise HandleError(
                f"page {page} is {free[page]} times in the free list and has {self.refcount[page]} references"
            )
        if (self.filled < 0).any() or (self.filled > self.page_size).any():
            raise HandleError(f"a page is filled outside 0 to {self.page_size} slots")

    def _known(self, pages: npt.ArrayLike) -> Int32:
        known = as_int32("pages", pages)
        # Seen as unsigned, a negative id is a huge one: one reduction checks both ends.
        if len(known) and known.view(np.uint32).max() >= self.num_pages:
            page = known[known.view(np.uint32) >= self.num_pages][0]
            raise HandleError(f"page {page} is not in the pool, expected 0 to {self.num_pages - 1}")
        return known


_EMPTY: Int32 = np.zeros(0, np.int32)
_EMPTY.flags.writeable = False


def as_int32(name: str, values: npt.ArrayLike, error: type[Exception] = HandleError) -> Int32:
    """One-dimensional contiguous int32 form of `values`, the same object where it already is one.

    Raises `error`, naming `name`, for another rank, for non-integers and for integers that int32
    cannot hold.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise error(f"{name} has shape {array.shape}, expected one dimension")
    if array.dtype != np.int32:
        if not array.size:
            return _EMPTY
        if array.dtype.kind not in "iu":
            raise error(f"{name} has dtype {array.dtype}, expected integers")
        if array.min() < -(2**31) or array.max() >= 2**31:
            raise error(f"{name} holds {array.min()} to {array.max()}, expected int32 values")
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)
