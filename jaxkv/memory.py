"""An engine's memory: its pages, its pool, its prefix index and the sequences it handed out.

Part of the engine, in a file of its own. References: every live sequence holds one for each segment
row; a step's fresh pages are held by the step until its sequence is handed out.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxkv.cache.pages import make_pages, poison_pages
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.sequence import Sequence
from jaxkv.errors import CapacityError, HandleError
from jaxkv.model.config import ModelConfig
from jaxkv.schedule import Placement, place
from jaxkv.steps import Pages
from jaxkv.typing import Int32

T = TypeVar("T")
_ids = itertools.count(1)


class Memory:
    """Pages on the device and who holds them."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        kv_dtype: str,
        grid: int,
        poison: bool,
    ) -> None:
        self.config = config
        self.kv_dtype = kv_dtype
        self.poison = poison
        self.pool = PagePool(num_pages, page_size)
        self.index = PrefixIndex(self.pool, grid=grid)
        self.live: dict[int, Int32] = {}  # held pages of every sequence handed out, by id
        self.interrupted = False  # a call ended by Ctrl-C or the like
        self.evicted = 0  # pages taken from the index to make room
        self._lost = False
        self._collected: collections.deque[int] = collections.deque()
        self.pages = self._make_pages()

    def _make_pages(self) -> Pages:
        try:
            pages = tuple(
                make_pages(
                    self.config,
                    group,
                    num_pages=self.pool.num_pages,
                    page_size=self.pool.page_size,
                    dtype=self.kv_dtype,
                )
                for group in self.config.groups
            )
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            per_token = self.config.kv_bytes_per_token(np.dtype(np.float32).itemsize)
            size = self.pool.num_pages * self.pool.page_size * per_token / 2**30
            raise CapacityError(
                f"num_pages is {self.pool.num_pages}, about {size:,.1f} GiB in float32, expected a pool "
                "that fits the device's memory"
            ) from error
        if self.poison:
            everything = np.arange(self.pool.num_pages, dtype=np.int32)
            pages = tuple(poison_pages(group, everything) for group in pages)
        return pages

    def begin(self) -> None:
        """Starts a call: releases what was garbage-collected, and mends what the last call broke."""
        if any(group.kv.is_deleted() for group in self.pages):
            self._lose()
        if self._lost:
            self.pool = PagePool(self.pool.num_pages, self.pool.page_size)
            self.index = PrefixIndex(self.pool, grid=self.index.grid)
            self.pages = self._make_pages()
        elif self.interrupted:
            # It may have struck between an array operation and its note: only the sequences that were
            # handed out are certain.
            self.index = PrefixIndex(self.pool, grid=self.index.grid)
            self._freed(self.pool.rebuild(self.live.values()))
        self._lost = self.interrupted = False
        self.collect()

    def run(self, step: Callable[..., tuple[Pages, T]], *inputs: Any) -> T:
        """Gives a step the pages, then `inputs`, and keeps the pages it returns.

        If it fails after taking them, all is lost, and said so. An interrupt passes as it is; the next
        call finds out what it left.
        """
        try:
            self.pages, result = step(self.pages, *inputs)
        except Exception as error:
            if any(group.kv.is_deleted() for group in self.pages):
                raise self._lose() from error
            raise
        return result

    def wait(self, values: Any) -> None:
        """Waits for a step's results: only now is it known that it succeeded."""
        try:
            jax.block_until_ready(values)
        except Exception as error:
            raise self._lose() from error

    def _lose(self) -> HandleError:
        # The pool is rebuilt by the next call: whoever is still unwinding gives back pages of this one.
        self.live.clear()
        self._lost = True
        return HandleError(
            "a step failed after its pages were donated, so all sequences of this engine are "
            "released and its cache is empty"
        )

    def place(self, base: Int32, positions: Int32, claimed: set[int] | None = None) -> Placement:
        """Slots for `positions`, after evicting as many cached pages as they need."""
        self.collect()
        try:
            return place(self.pool, base, positions, claimed=claimed, make_room=self._make_room)
        except CapacityError as error:
            raise CapacityError(f"{len(positions)} tokens do not fit: {error}") from None

    def _make_room(self, need: int) -> None:
        missing = need - self.pool.free_count
        if missing > 0:
            freed = self.index.evict(missing)
            self.evicted += len(freed)
            self._freed(freed)

    def commit(self, placement: Placement) -> None:
        """Makes the slots that a returned step wrote count."""
        self.pool.fill(*placement.filled)

    def adopt(self, make: Callable[[int], Sequence]) -> Sequence:
        """Hands a sequence out under a new id, holding its pages until it is released or collected."""
        sequence = make(next(_ids))
        held = sequence.held_pages
        # A finalizer may run in the middle of anything: it only leaves a note for the next call.
        weakref.finalize(sequence, self._collected.append, sequence.id)
        self.pool.retain(held)
        self.live[sequence.id] = held
        return sequence

    def collect(self) -> None:
        """Releases the sequences that were garbage-collected."""
        while self._collected:
            held = self.live.pop(self._collected.popleft(), None)
            if held is not None:
                self.release(held)

    def release(self, pages: Int32) -> None:
        """Gives back one reference for each entry."""
        if len(pages) and not self._lost:
            self._freed(self.pool.release(pages))

    def _freed(self, pages: Int32) -> None:
        if self.poison and len(pages) and not any(group.kv.is_deleted() for group in self.pages):
            self.pages = tuple(poison_pages(group, pages) for group in self.pages)

    def check(self) -> None:
        """Integrity: live sequences and the index account for every reference, or a HandleError."""
        self.begin()
        self.index.check()
        self.pool.check([*self.live.values(), *self.index.references()])
