"""Where the recurrent layers of a computation start, and where they leave states behind.

A computation resumes behind the deepest state that is known to be right, runs every token from there on
(those whose KV is cached too, without writing it again), and leaves a state behind at the end and at the
positions worth coming back to. Each of them is a slot that nobody writes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxkv.cache.contract import PUBLIC
from jaxkv.cache.domain import Domain
from jaxkv.cache.sequence import Origin, Run, Sequence, merge_runs
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.memory import Memory
from jaxkv.reuse.plan import ReusePlan
from jaxkv.schedule import step_sizes
from jaxkv.typing import Int32

REPLAYED = "replayed"  # computed for the recurrent layers alone: its KV is kept


@dataclasses.dataclass(frozen=True)
class Resume:
    """Where recurrent layers start: behind `position` tokens, from a slot, with one reference to it."""

    position: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Carry:
    """What recurrent layers of one computation read first, and positions behind which they leave a state."""

    start: int  # slot
    after: tuple[int, ...]  # ascending; the last is the end


class StateRun:
    """The states of a computation under way. Whoever made it releases `left`."""

    def __init__(self, memory: Memory, carry: Carry | None, positions: Int32) -> None:
        """Takes the slots: that of the end, or a CapacityError; others as far as there is room."""
        self._memory = memory
        self._count = len(positions)
        self.left: list[tuple[int, int]] = []  # position and slot of each state
        self._parts: list[tuple[int, int]] = []  # computed tokens and slot
        self._now: tuple[int, int] | None = None
        if carry is None or memory.states is None:
            return
        self._read = carry.start
        end = carry.after[-1], memory.new_state()
        for position in carry.after[:-1]:
            try:
                self.left.append((position, memory.new_state()))
            except CapacityError:
                break
        self.left.append(end)
        counts = np.searchsorted(positions, [position for position, _ in self.left])
        self._parts = [(int(n), slot) for n, (_, slot) in zip(counts, self.left, strict=True)]

    def step_sizes(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Valid tokens and padded shape of each step; no step goes beyond a state that is left."""
        done = 0
        for end, slot in self._parts or [(self._count, -1)]:
            if slot >= 0:
                self._now = self._read, slot
            for size in step_sizes(end - done, chunk):
                yield size
                if slot >= 0:
                    self._now = slot, slot
            self._read, done = slot, end

    def slots(self) -> tuple[int, int] | None:
        """What the step at hand reads and writes."""
        return self._now

    def release(self) -> None:
        """Gives back all slots."""
        self._memory.release_states(slot for _, slot in self.left)


def breaks(
    start: int, end: int, *, every: int, grid: int, most: int, points: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Where a computation of positions start..end-1 leaves a state behind, ascending; `end` is the last.

    On multiples of `every`, at the last multiple of the grid (what is off it is never found again), at
    `points`, and at the end. Where that is more than `most`, the distance doubles until it fits.
    """
    while -(-(end - start) // every) > max(most, 1):
        every *= 2
    found = {end, end // grid * grid}
    found |= set(range((start // every + 1) * every, end, every))
    found |= {point for point in points if point % grid == 0}
    return tuple(sorted(position for position in found if start < position <= end))


def carry_of(memory: Memory, resume: Resume | None, work: ReusePlan) -> Carry | None:
    """What `work` reads and leaves; None without recurrent layers.

    A replay that begins before the kept prefix ends leaves a state there: whoever comes a second time to a
    point where texts part, and finds no state, leaves one for the third.
    """
    store = memory.states
    if store is None:
        return None
    if resume is None:
        resume = Resume(0, store.none)
    end = len(work.tokens)
    if work.states == "fork":  # tokens from all over the text: no state on the way is that of a prefix
        return Carry(resume.slot, (end,))
    points = (work.prefix,) if resume.position < work.prefix < end else ()
    most = store.slots.num_slots // 4
    return Carry(
        resume.slot,
        breaks(resume.position, end, every=store.every, grid=memory.grid, most=most, points=points),
    )


def resume_edit(memory: Memory, sequence: Sequence, work: ReusePlan) -> Resume | None:
    """Where an edit of `sequence` resumes. Whoever gets it releases the slot.

    An edit that keeps nothing stale, or replays, starts from the deepest state of the unchanged prefix: that
    of the sequence itself, where the edit only appends, else the nearest snapshot before the edit. A fork
    takes the state behind the old text over as it is.
    """
    store = memory.states
    if store is None:
        if work.states == "replay":
            raise ConfigError(
                f"policy '{work.policy}' replays states, expected a model with recurrent layers, or SCR()"
            )
        return None
    if work.states == "fork":
        assert sequence.state is not None
        store.slots.retain(sequence.state)
        return Resume(len(sequence), sequence.state)
    limit = min(work.prefix, len(work.tokens) - 1)
    if sequence.state is not None and len(sequence) <= limit:
        store.slots.retain(sequence.state)
        return Resume(len(sequence), sequence.state)
    contract = sequence.contract
    found = memory.index.snapshot(
        contract.digest(),
        work.tokens,
        limit=min(limit, sequence.exact_length),
        public=contract.within(Domain(), scope=PUBLIC).digest(),
    )
    return None if found is None else Resume(*found)


def replayed(work: ReusePlan, resume: Resume | None) -> ReusePlan:
    """`work` for a model with recurrent layers: which tokens run, from where it resumes.

    Without a fork every token from there on does; those whose KV is kept write none.
    """
    if work.dropped:
        raise ConfigError(
            f"policy '{work.policy}' drops tokens, which a recurrent state cannot forget, expected Exact() "
            "or SCR()"
        )
    if work.states == "fork":
        return dataclasses.replace(work, provenance=_stale(work))
    start, end = 0 if resume is None else resume.position, len(work.tokens)
    forward = np.arange(start, end, dtype=np.int32)
    kept = ~np.isin(forward, work.forward) if work.write else np.ones(len(forward), np.bool_)
    if not kept.any():
        return dataclasses.replace(work, forward=forward)
    known = np.concatenate([np.zeros(0, np.int32), *work.causes.values()])
    again = forward[~np.isin(forward, known)]
    causes = {**work.causes, REPLAYED: again} if len(again) else work.causes
    return dataclasses.replace(work, forward=forward, kept=kept, causes=causes, matched=start, relocated=0)


def _stale(work: ReusePlan) -> tuple[Run, ...]:
    """Provenance under a state that saw another text: nothing behind the prefix is exact."""
    runs = []
    for run in work.provenance:
        if run.origin is Origin.EXACT and run.end > work.prefix:
            cut = max(run.start, work.prefix)
            runs += [
                dataclasses.replace(run, end=cut),
                dataclasses.replace(run, start=cut, origin=Origin.ON_APPROXIMATE),
            ]
        else:
            runs.append(run)
    return merge_runs(runs)
