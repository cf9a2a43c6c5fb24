"""Where the recurrent layers of a computation start, and where they leave states behind.

A computation resumes behind the deepest state that is known to be right, runs every token from there on
(those whose KV is cached too, without writing it again), and leaves a state behind at the end and at the
positions worth coming back to. Each of them is a slot that nobody writes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxkv.cache.sequence import Origin, Run, Sequence, merge_runs
from jaxkv.cache.states import Pages
from jaxkv.cache.table import bucket
from jaxkv.errors import CapacityError, ConfigError
from jaxkv.memory import Memory
from jaxkv.reuse.plan import ReusePlan
from jaxkv.schedule import step_sizes
from jaxkv.steps import compose
from jaxkv.typing import Int32

REPLAYED = "replayed"  # computed for the recurrent layers alone: its KV is kept


@dataclasses.dataclass(frozen=True)
class Jump:
    """Tokens start..end-1 of a text that do not run: the state behind them is composed.

    When they ran, somewhere else, it was from the state in `source`, and they left the one in `behind`.
    """

    start: int
    end: int
    source: int  # slot
    chain: tuple[int, ...]  # slots with the operators in between, the last of them is `behind`

    @property
    def behind(self) -> int:
        """Slot of the state behind the tokens, when they ran."""
        return self.chain[-1]


@dataclasses.dataclass(frozen=True)
class Resume:
    """Where recurrent layers start: behind `position` tokens, from a slot; and what they pass over."""

    position: int
    slot: int
    jumps: tuple[Jump, ...] = ()

    @property
    def held(self) -> list[int]:
        """Slots to which it has a reference each."""
        return [self.slot, *(slot for jump in self.jumps for slot in (jump.source, *jump.chain))]


@dataclasses.dataclass(frozen=True)
class Carry:
    """What recurrent layers of one computation read first, and positions behind which they leave a state."""

    start: int  # slot
    position: int  # tokens before it
    after: tuple[int, ...]  # ascending; the last is the end
    jumps: tuple[Jump, ...] = ()  # ascending; none of their tokens is computed


class StateRun:
    """The states of a computation under way. Whoever made it releases `left`."""

    def __init__(self, memory: Memory, carry: Carry | None, positions: Int32) -> None:
        """Takes the slots: that of the end, or a CapacityError; others as far as there is room."""
        self._memory = memory
        self._count = len(positions)
        self.left: list[tuple[int, int]] = []  # position and slot of each state
        self._parts: list[tuple[int, int, Jump | None]] = []  # tokens computed until then, and a slot
        self._now: tuple[int, int, bool] | None = None
        self.shapes: set[tuple[Any, ...]] = set()  # static shapes of what was composed
        if carry is None or memory.states is None:
            return
        self._read = carry.start
        try:
            end = self._take(carry.after[-1], required=True)
            for position in carry.after[:-1]:
                self._take(position, required=False)
            before = 0
            for jump in carry.jumps:
                count = int(np.searchsorted(positions, jump.start))
                if count > before:
                    self._take(jump.start, required=True)
                before = count
            self._parts = [(int(np.searchsorted(positions, at)), slot, None) for at, slot in self.left]
            for jump in carry.jumps:
                slot = self._take(jump.end, required=True)
                self._parts.append((int(np.searchsorted(positions, jump.start)), slot, jump))
        except BaseException:
            self.release()
            raise
        # Where both end at one token, it runs first, then the jump behind it.
        self._parts.sort(key=lambda part: (part[0], part[2] is not None))
        self.left = [state for state in self.left if state[1] != end] + [(carry.after[-1], end)]
        self._note(carry)

    def _take(self, position: int, *, required: bool) -> int:
        try:
            slot = self._memory.new_state()
        except CapacityError:
            if required:
                raise
            return -1
        self.left.append((position, slot))
        return slot

    def _note(self, carry: Carry) -> None:
        """Writes down where each state's operator begins."""
        begin = carry.position
        for position, slot in sorted(self.left):
            assert self._memory.states is not None
            self._memory.states.begins[slot] = begin
            begin = position

    def step_sizes(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Valid tokens and padded shape of each step; no step goes beyond a state that is left."""
        done = 0
        for end, slot, jump in self._parts or [(self._count, -1, None)]:
            if jump is not None:
                self._compose(jump, slot)
            elif slot >= 0:
                self._now = self._read, slot, True
            for size in step_sizes(end - done, chunk):
                yield size
                if slot >= 0:
                    self._now = slot, slot, False
            self._read, done = slot, end

    def _compose(self, jump: Jump, slot: int) -> None:
        store = self._memory.states
        assert store is not None
        chain = np.full(bucket(len(jump.chain)), store.none, np.int32)
        chain[: len(jump.chain)] = jump.chain
        slots = [np.int32(each) for each in (self._read, jump.source, jump.behind, slot)]

        def step(pages: Pages, *inputs: Any) -> tuple[Pages, None]:
            return compose(pages, *inputs), None

        self.shapes.add(("compose", len(chain)))
        self._memory.run(step, slots[0], slots[1], chain, slots[2], slots[3])

    def slots(self) -> tuple[int, int, bool] | None:
        """What the step at hand reads and writes, and whether operators begin there."""
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
    end = int(work.forward[-1]) + 1
    if work.states in ("fork", "compose"):  # no state on the way is that of a prefix
        return Carry(resume.slot, resume.position, (end,), resume.jumps)
    points = (work.prefix,) if resume.position < work.prefix < end else ()
    most = store.slots.num_slots // 4
    return Carry(
        resume.slot,
        resume.position,
        breaks(resume.position, end, every=store.every, grid=memory.grid, most=most, points=points),
    )


def resume_edit(memory: Memory, sequence: Sequence, work: ReusePlan) -> Resume | None:
    """Where an edit of `sequence` resumes. Whoever gets it releases the slot.

    An edit that keeps nothing stale, replays or composes starts from the deepest state of the unchanged
    prefix: that of the sequence itself, where the edit only appends, else the nearest snapshot before the
    edit. A fork takes the state behind the old text over as it is.
    """
    store = memory.states
    if store is None:
        if work.states in ("replay", "compose"):
            raise ConfigError(
                f"policy '{work.policy}' is about states, expected a model with recurrent layers, or SCR()"
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
    roots = sequence.contract.roots
    jumps = _jumps(memory, sequence, work) if work.states == "compose" else ()
    found = memory.index.snapshot(
        roots[0], work.tokens, limit=min(limit, sequence.exact_length), public=roots[1]
    )
    if found is None:
        return Resume(0, store.none, jumps) if jumps else None
    return Resume(*found, jumps)


def resume_heal(memory: Memory, sequence: Sequence, work: ReusePlan) -> tuple[ReusePlan, Resume | None]:
    """`plan_heal`'s work for recurrent layers, and where they resume: whoever gets it releases the slot.

    The state behind its exact tokens is not kept by the sequence, but a snapshot of them may be in the index:
    the nearest before what is healed. Tokens in between run and write nothing.
    """
    store = memory.states
    if store is None or not len(work.forward):
        return work, None
    root, public = sequence.contract.roots
    found = memory.index.snapshot(root, sequence.tokens, limit=work.prefix, public=public)
    resume = Resume(0, store.none) if found is None else Resume(*found)
    return dataclasses.replace(replayed(work, resume), relocated=work.relocated), resume


def _jumps(memory: Memory, sequence: Sequence, work: ReusePlan) -> tuple[Jump, ...]:
    """What of the kept spans lies between two snapshots of the old text, with operators in between."""
    store = memory.states
    assert store is not None
    if not store.operators:
        raise ConfigError(
            f"policy '{work.policy}' composes states, expected an engine with keep_operators=True"
        )
    exact = sequence.tokens[: sequence.exact_length]
    known = memory.index.all_snapshots(sequence.contract.roots, exact)
    jumps = []
    for span in work.spans:
        inside = np.arange(span.new, span.new + span.length)
        runs = np.split(inside, np.flatnonzero(np.isin(inside, work.forward)))
        kept = max((run[~np.isin(run, work.forward)] for run in runs), key=len)
        if not len(kept):
            continue
        low, high = int(kept[0]) - span.delta, int(kept[-1]) + 1 - span.delta
        within = [position for position in sorted(known) if low <= position <= high]
        chains: list[list[int]] = [[]]
        for position in within:
            if chains[-1] and store.begins[known[position]] != chains[-1][-1]:
                chains.append([])
            chains[-1].append(position)
        chain = max(chains, key=len)
        if len(chain) > 1:
            slots = [known[position] for position in chain]
            for slot in slots:
                store.slots.retain(slot)
            jumps.append(Jump(chain[0] + span.delta, chain[-1] + span.delta, slots[0], tuple(slots[1:])))
    return tuple(jumps)


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
    start, end = 0 if resume is None else resume.position, int(work.forward[-1]) + 1
    passed = [np.arange(jump.start, jump.end) for jump in (resume.jumps if resume else ())]
    over = np.concatenate([np.zeros(0, np.int64), *passed])
    forward = np.setdiff1d(np.arange(start, end, dtype=np.int32), over)
    kept = ~np.isin(forward, work.forward) if work.write else np.ones(len(forward), np.bool_)
    if not kept.any():
        return dataclasses.replace(work, forward=forward)
    known = np.concatenate([np.zeros(0, np.int32), *work.causes.values()])
    again = forward[~np.isin(forward, known)]
    causes = {**work.causes, REPLAYED: again} if len(again) else work.causes
    return dataclasses.replace(
        work, forward=forward, kept=kept, causes=causes, matched=start, relocated=len(over)
    )


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
