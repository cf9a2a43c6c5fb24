"""An engine's memory: its pages, its pool, its prefix index and the sequences it handed out.

Part of the engine, in a file of its own. References: every live sequence holds one for each segment
row; a step's fresh pages are held by the step until its sequence is handed out.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxkv.arrays import make_arrays
from jaxkv.cache.contract import PUBLIC, CacheContract
from jaxkv.cache.domain import Domain
from jaxkv.cache.dtypes import kv_token_bytes
from jaxkv.cache.eviction import LRU, CostPerByte, EvictionPolicy
from jaxkv.cache.match import Cause, Match, MatchEnd
from jaxkv.cache.metrics import Metrics
from jaxkv.cache.pages import poison_pages
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.radix import Place
from jaxkv.cache.residency import Residency, ResumePoint
from jaxkv.cache.sequence import EMPTY_SEGMENTS, PAGE, Sequence, clip
from jaxkv.cache.states import kv_groups, poison_states, spent
from jaxkv.cache.tiers import Tiers
from jaxkv.cache.tree import Pin
from jaxkv.errors import CapacityError, HandleError
from jaxkv.model.backend import AUTO, Backend
from jaxkv.model.config import ModelConfig
from jaxkv.recurrent import StateStore
from jaxkv.reuse.ledger import attention_flops, token_flops
from jaxkv.schedule import Placement, place
from jaxkv.steps import Pages
from jaxkv.tiering import complete, spill
from jaxkv.typing import Int32
from jaxkv.windows import make_residency, resume_point, shortened

T = TypeVar("T")
_ids = itertools.count(1)
_NO_PAGES = EMPTY_SEGMENTS[:, PAGE]
MOST_PAST = 8  # contracts of earlier weights that a miss is explained with


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
        backend: Backend = AUTO,
        eviction: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        quota: int | None = None,
        tiers: Tiers | None = None,
        states: StateStore | None = None,
        local_pages: int | None = None,
    ) -> None:
        self.config = config
        self.states = states  # with recurrent layers
        self.backend = backend
        self.kv_dtype = kv_dtype
        self.poison = poison
        self.grid = grid
        self.clock = clock
        self.eviction = eviction or LRU()
        if isinstance(self.eviction, CostPerByte):
            self.eviction = self.eviction.filled(token_flops(config), attention_flops(config))
        self._local_pages = local_pages
        self.residency = self._make_residency(num_pages, page_size)
        # What shortens a match to where every layer can go on: objects with a cause and a resume_point.
        self.resumes: list[ResumePoint] = [] if self.residency is None else [self.residency]
        every, unbounded = (kv_token_bytes(config, kv_dtype, windowed=each) for each in (True, False))
        self.page_bytes = max(page_size * (every if self.residency is None else unbounded), 1)
        self.local_page_bytes = page_size * (every - unbounded)
        self.metrics = Metrics()
        self.quota = quota  # bytes, of a domain that has no quota of its own
        self.quotas: dict[Domain, int | None] = {}
        self.tiers = tiers
        if tiers is not None:
            tiers.quota_of = self._quota_of
        self.past: collections.deque[CacheContract] = collections.deque(maxlen=MOST_PAST)
        self.pool = PagePool(num_pages, page_size)
        self.places: dict[int, Place] = {}  # where the index has what sequences begin with
        self.index = self._make_index()
        self.live: dict[int, Int32] = {}  # held pages of every sequence handed out, by id
        self._tails: dict[int, Int32] = {}  # those of them in its last window, where local pages are bounded
        self.interrupted = False  # a call ended by Ctrl-C or the like
        self.evicted = 0  # pages taken from the index to make room
        self._lost = False
        self._collected: collections.deque[int] = collections.deque()
        self.pages = make_arrays(self)

    def _make_index(self) -> PrefixIndex:
        self.places.clear()
        index = PrefixIndex(
            self.pool,
            grid=self.grid,
            policy=self.eviction,
            page_bytes=self.page_bytes,
            clock=self.clock,
            metrics=self.metrics,
            quota_of=self._quota_of,
            snapshots=None if self.states is None else self.states.snapshots,
        )
        index.gone = None if self.tiers is None else []
        return index

    def _quota_of(self, contract: CacheContract) -> int | None:
        if contract.scope == PUBLIC:
            return None
        return self.quotas.get(contract.domain, self.quota)

    def _make_residency(self, num_pages: int, page_size: int) -> Residency | None:
        return make_residency(self.config, num_pages, page_size, self._local_pages, self.grid)

    def begin(self) -> None:
        """Starts a call: lets go what was collected or expired, and mends what the last call broke."""
        if spent(self.pages):
            self._lose()
        if self.states is not None and (self._lost or self.interrupted):
            self.states.restart(() if self._lost else self.live)
        if self._lost:
            self.pool = PagePool(self.pool.num_pages, self.pool.page_size)
            self.index = self._make_index()
            if self.residency is not None:
                self.resumes.remove(self.residency)
                self.residency = self._make_residency(self.pool.num_pages, self.pool.page_size)
                assert self.residency is not None
                self.resumes.append(self.residency)
            self.pages = make_arrays(self)
        elif self.interrupted:
            # It may have struck between an array operation and its note: only the sequences that were
            # handed out are certain.
            self.index = self._make_index()
            self._freed(self.pool.rebuild(self.live.values()))
        self._lost = self.interrupted = False
        self.collect()
        self._freed(self.index.expire())

    def run(self, step: Callable[..., tuple[Pages, T]], *inputs: Any) -> T:
        """Gives a step the pages, then `inputs`, and keeps the pages it returns.

        If it fails after taking them, all is lost, and said so. An interrupt passes as it is; the next
        call finds out what it left.
        """
        try:
            self.pages, result = step(self.pages, *inputs)
        except Exception as error:
            if spent(self.pages):
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
            spill(self)
            self._freed(freed)

    def match(self, contract: CacheContract, tokens: Int32, *, limit: int) -> Match:
        """The longest cached prefix that `contract`'s domain may read, pinned: release its pages."""
        root, public = contract.roots
        match = self.index.match(root, tokens, limit=limit, public=public)
        match = complete(self, contract, tokens, limit, match)
        match = shortened(self, match)
        if match.end.limiting is Cause.ABSENT:
            match = dataclasses.replace(match, end=self._absence(contract, match.end))
        return match

    def peek(self, contract: CacheContract, tokens: Int32, *, limit: int) -> tuple[int, Int32]:
        """Tokens that `match` would find in the pool, and their pages. Pins, ages and restores nothing."""
        found = [self.index.peek(root, tokens, limit=limit) for root in contract.roots]
        length, segments = max(found, key=lambda each: each[0])
        length, cause = resume_point(self, segments, length)
        return length, (segments if cause is None else clip(segments, 0, length))[:, PAGE]

    def _absence(self, contract: CacheContract, end: MatchEnd) -> MatchEnd:
        """Why a domain has nothing: maybe it has, under earlier weights."""
        for past in reversed(self.past):
            theirs = past.within(contract.domain, scope=contract.scope)
            tree = self.index.tree(theirs.digest())
            if theirs != contract and tree is not None and not tree.empty:
                fields = tuple(name for name, *_ in contract.mismatch(theirs))
                return MatchEnd(Cause.CONTRACT, end.position, fields=fields)
        return end

    def publish(self, sequence: Sequence, limit: int, states: tuple[tuple[int, int], ...] = ()) -> None:
        """Offers the exact prefix of a sequence to its domain: after the step returned, never before.

        What the index has of it is known from the sequence that it grew from, so only what is new is read.
        `states`: positions and slots, of which those behind exact tokens alone are kept.
        """
        root = sequence.contract.digest()
        place = self.index.confirm(root, self.places.get(sequence.id), len(sequence))
        prefix = sequence.exact_prefix(limit, since=place.position if place else 0)
        place = self.insert(sequence.contract, prefix.tokens, prefix.segments, sequence.priority, place)
        if place is not None:
            self.places[sequence.id] = place
        exact = [state for state in states if state[0] <= len(prefix.tokens)]
        if exact:
            self.keep_states(root, prefix.tokens, exact, place)

    def keep_states(
        self, root: bytes, tokens: Int32, states: list[tuple[int, int]], since: Place | None = None
    ) -> None:
        """Keeps snapshots beside what is cached and the domain within its quota; see `PrefixIndex`."""
        self.index.keep_states(root, tokens, states, since)
        self._enforce(root)

    def let_match_go(self, match: Match) -> None:
        """Gives back the references that a match took for its caller."""
        self.release(match.pages)
        if match.state is not None:
            self.release_states([match.state])

    def insert(
        self,
        contract: CacheContract,
        tokens: Int32,
        segments: Int32,
        priority: int = 0,
        since: Place | None = None,
    ) -> Place | None:
        """Puts exact KV into the index and keeps the domain within its quota; see `PrefixIndex.publish`."""
        root, public = contract.roots
        place = self.index.publish(
            root,
            tokens,
            segments,
            since=since,
            contract=contract,
            priority=priority,
            public=public if public != root else None,
        )
        self._enforce(root)
        return place

    def _enforce(self, root: bytes) -> None:
        freed = self.index.enforce(root)
        spill(self)
        self._freed(freed)

    def set_quota(self, contract: CacheContract, quota: int | None) -> None:
        """Limits the bytes of a domain in the pool and in each tier; what is over goes at once."""
        self.quotas[contract.domain] = quota
        self.index.set_quota(contract.digest(), quota)
        self._enforce(contract.digest())
        if self.tiers is not None:
            self.tiers.enforce(contract)

    def pin(self, contract: CacheContract, tokens: Int32, seconds: float | None) -> Pin:
        """Keeps what is cached of `tokens`, for a while or until it is unpinned."""
        until = None if seconds is None else self.clock() + seconds
        return self.index.pin(contract.digest(), tokens, until)

    def forget(self, contract: CacheContract) -> None:
        """Drops all that is cached under a contract, in all tiers; sequences in use keep their pages."""
        self._freed(self.index.drop(contract.digest()))
        if self.tiers is not None:
            self.tiers.forget(contract.digest())

    def commit(self, placement: Placement) -> None:
        """Makes the slots that a returned step wrote count."""
        self.pool.fill(*placement.filled)

    def adopt(self, make: Callable[[int], Sequence], place: Place | None = None) -> Sequence:
        """Hands a sequence out under a new id, holding its pages until it is released or collected.

        `place`: where the index has tokens that it begins with, if that is known.
        """
        sequence = make(next(_ids))
        held = sequence.held_pages
        # A finalizer may run in the middle of anything: it only leaves a note for the next call.
        weakref.finalize(sequence, self._collected.append, sequence.id)
        self.pool.retain(held)
        self.live[sequence.id] = held
        if place is not None:
            self.places[sequence.id] = place
        if self.residency is not None:
            self._tails[sequence.id] = self.residency.tail(sequence.table_segments, len(sequence))
        if self.states is not None and sequence.state is not None:
            self.states.adopt(sequence.id, sequence.state)
        return sequence

    def let_go(self, sequence: int) -> None:
        """Releases what a sequence handed out holds, if it still does."""
        held = self.live.pop(sequence, None)
        self.places.pop(sequence, None)
        if self.states is not None:
            self.states.let_go(sequence)
        if held is not None:
            self.release(held)

    def new_state(self) -> int:
        """A state slot to write, with one reference, after giving up a snapshot if it must."""
        assert self.states is not None
        self.collect()
        slot = self.states.allocate(self.eviction)
        self._freed(_NO_PAGES)
        return slot

    def release_states(self, slots: Iterable[int]) -> None:
        """Gives back one reference for each slot."""
        if self.states is not None and not self._lost:
            for slot in slots:
                self.states.release(slot)
            self._freed(_NO_PAGES)

    def hold_local(self, pages: Int32, slots: Int32, keep: Int32) -> None:
        """Gives local layers pages for what a step writes; see `Residency.hold`."""
        assert self.residency is not None
        self.collect()
        self._tails = {id: tail for id, tail in self._tails.items() if id in self.live}
        self._poison(self.residency.hold(pages, slots, keep, self._tails.values()), local=True)

    def _poison(self, pages: Int32, *, local: bool | None = None) -> None:
        """Poisons pages of the local groups, of the others, or of all."""
        if self.poison and len(pages) and not spent(self.pages):
            kv = tuple(
                poison_pages(held, pages) if local is None or local == bool(group.window) else held
                for group, held in zip(self.config.groups, kv_groups(self.pages), strict=True)
            )
            self.pages = (*kv, *self.pages[len(kv) :])

    def collect(self) -> None:
        """Releases the sequences that were garbage-collected."""
        while self._collected:
            self.let_go(self._collected.popleft())

    def release(self, pages: Int32) -> None:
        """Gives back one reference for each entry."""
        if len(pages) and not self._lost:
            self._freed(self.pool.release(pages))

    def _freed(self, pages: Int32) -> None:
        if self.residency is not None and len(pages):
            self._poison(self.residency.drop(pages), local=True)
            self._poison(pages, local=False)
        else:
            self._poison(pages)
        slots = [] if self.states is None or not self.poison else self.states.take_freed()
        if slots and not spent(self.pages):
            pool = poison_states(self.pages[-1], np.array(slots, np.int32))
            self.pages = (*self.pages[:-1], pool)

    def check(self) -> None:
        """Integrity: live sequences and the index account for every reference, or a HandleError."""
        self.begin()
        self.index.check()
        self.pool.check([*self.live.values(), *self.index.references()])
        if self.states is not None:
            self.states.check()
        if self.residency is not None:
            self.residency.check(np.flatnonzero(self.pool.refcount > 0).astype(np.int32))
