"""Entries leaving the pool and coming back: spill on eviction, restore on a match, load from a file.

Part of the memory, in a file of its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.cache.contract import PUBLIC, CacheContract
from jaxkv.cache.domain import Domain
from jaxkv.cache.entry import Entry, SavedState, make_entry
from jaxkv.cache.match import Cause, Match, MatchEnd
from jaxkv.cache.sequence import slots_of
from jaxkv.cache.tiers import DiskTier, HostTier, Tiers
from jaxkv.cache.tree import Gone
from jaxkv.checks import check_bytes
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.schedule import coalesce, place
from jaxkv.transfer import read, read_state, shapes, state_shapes, write, write_state
from jaxkv.typing import Int32

if TYPE_CHECKING:
    from jaxkv.memory import Memory

# Behind these ends there is nothing that a tier could add.
_DONE = (Cause.COMPLETE, Cause.LAST_TOKEN, Cause.LIMIT)


def entry_of(memory: Memory, gone: Gone) -> Entry:
    """Copies a run of the index, or one that just went, to the host."""
    _, slots = slots_of(gone.segments, memory.pool.page_size)
    store = memory.states
    states = []
    for position, slot in sorted(gone.states):
        assert store is not None
        begins = store.begins.get(slot, -1) if store.operators else -1
        states.append(SavedState(position, begins, read_state(memory.pages, slot)))
    return make_entry(gone.contract, gone.text, gone.start, read(memory.pages, slots), tuple(states))


def spill(memory: Memory) -> None:
    """Gives what was evicted to the tiers: its slots hold their contents until somebody writes."""
    if memory.tiers is None or not memory.index.gone:
        return
    gone, memory.index.gone = memory.index.gone, []
    for run in gone:
        memory.tiers.put(entry_of(memory, run))


def restore(memory: Memory, base: Match, entry: Entry, *, evict: bool) -> None:
    """Puts an entry behind the cached prefix `base` into the pool and into the index, its snapshots too.

    Raises:
      CapacityError: no pages for it; nothing changed.
    """
    positions = np.arange(entry.start, entry.end, dtype=np.int32)
    if evict:
        placement = memory.place(base.segments, positions)
    else:
        placement = place(memory.pool, base.segments, positions)
    try:
        memory.run(write, placement.slots, entry.kv)
        memory.wait(memory.pages)
        memory.commit(placement)
        segments = coalesce(np.concatenate([base.segments, placement.segments]))
        memory.insert(entry.contract, entry.tokens, segments)
    finally:
        memory.release(placement.fresh)
    restore_states(memory, entry, evict=evict)


def restore_states(memory: Memory, entry: Entry, *, evict: bool) -> None:
    """Puts the snapshots of an entry that is in the index beside it, as far as there are state slots.

    `evict`: others may go for it.
    """
    store = memory.states
    if store is None or not entry.states:
        return
    root = entry.contract.digest()
    there = memory.index.all_snapshots((root,), entry.tokens)
    for state in entry.states:
        if state.position in there or not (evict or store.slots.free_count):
            continue
        try:
            slot = memory.new_state()
        except CapacityError:  # all in use: the KV is there all the same
            return
        try:
            memory.run(write_state, slot, state.arrays)
            memory.wait(memory.pages)
            store.begins[slot] = state.begins if len(state.arrays) > 2 else -1
            memory.keep_states(root, entry.tokens, [(state.position, slot)])
        finally:
            memory.release_states([slot])


def complete(memory: Memory, contract: CacheContract, tokens: Int32, limit: int, match: Match) -> Match:
    """Goes on with a match from the tiers, entry by entry, for as long as they have what comes next.

    Both the domain's own and the declared prefixes' entries are looked for, whatever was found before.
    """
    tiers = memory.tiers
    if tiers is None:
        return match
    public = contract.within(Domain(), scope=PUBLIC)
    text = tokens[:limit].tobytes()
    while match.end.limiting not in _DONE:
        at = match.length
        found = [tiers.find(owner.digest(), text, at) for owner in (contract, public)]
        entry = next((e for e in found if e is not None and fits(memory, e)), None)
        if entry is None:
            break
        try:
            restore(memory, match, entry, evict=True)
        except CapacityError:
            return dataclasses.replace(match, end=MatchEnd(Cause.PINNED, at))
        more = memory.index.match(contract.digest(), tokens, limit=limit, public=public.digest())
        memory.let_match_go(match)
        match = more
        if match.length <= at:
            break
        tiers.counts["restored"] += 1
        tiers.counts["restored_tokens"] += match.length - at
    return match


def fits(memory: Memory, entry: Entry) -> bool:
    """Whether the entry's KV has the shapes of this pool's."""
    expected = shapes(memory.pages, entry.end - entry.start)
    if tuple(block.shape for block in entry.kv) != expected:
        return False
    if not entry.states:
        return True
    if memory.states is None:
        return False
    known = state_shapes(memory.pages)
    return all(tuple(a.shape for a in s.arrays) in (known, known[:2]) for s in entry.states)


def make_tiers(host_bytes: Any, disk: Any, disk_bytes: Any, grid: int) -> Tiers | None:
    """The tiers behind the pool, or None where there is to be none; refuses with a ConfigError."""
    host_bytes = check_bytes("host_tier_bytes", host_bytes, 0)
    disk_bytes = check_bytes("disk_tier_bytes", disk_bytes, 0)
    host = HostTier(host_bytes) if host_bytes else None
    try:
        directory = DiskTier(disk, disk_bytes) if disk is not None else None
    except (OSError, TypeError) as error:
        raise ConfigError(f"disk_tier is {disk!r}, expected a directory that can be written") from error
    return Tiers(host, directory, grid) if host is not None or directory is not None else None
