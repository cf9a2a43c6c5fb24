"""From a cached sequence, new tokens and a policy to a plan: what stands where, what is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from jaxkv.cache.sequence import (
    EMPTY_SEGMENTS,
    Origin,
    Removed,
    Run,
    Sequence,
    clip,
    clip_runs,
    computed_exact,
    concatenate,
    frozen,
    merge_runs,
    shift,
    union,
)
from jaxkv.errors import ConfigError
from jaxkv.reuse.diff import Span, diff
from jaxkv.reuse.policies import Edit, Form, Policy, Selection
from jaxkv.reuse.probes import Probe
from jaxkv.typing import Bool, Int32

# Answers a probe on an edit: the evidence, and the FLOPs it cost.
Prober: TypeAlias = Callable[[Edit, Probe], tuple[Any, float]]

INSERTED = "inserted"
LAST = "last"  # computed only because its logits are wanted
HEALED = "healed"
RESUMED = "resumed"  # of the common prefix, computed again because some layer cannot go on behind it
_MATCHED, _COMPUTED, _DROPPED = -1, -2, -3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReusePlan:
    """What an edit keeps, moves and computes. Host data; applying it is the engine's work.

    `matched + relocated + forwarded + dropped` is the length of the new sequence.
    """

    policy: str
    tokens: Int32  # i32[n], the new sequence
    prefix: int  # leading positions kept in place
    segments: Int32  # i32[W, 4], kept, at new positions, keys as born
    attended: Int32  # i32[W', 4], the same for attention: the prefix may be materialized already
    forward: Int32  # i32[f], positions to compute, ascending
    causes: dict[str, Int32]  # cause to positions; together they are `forward`
    provenance: tuple[Run, ...]
    matched: int
    relocated: int = 0
    dropped: int = 0
    spans: tuple[Span, ...] = ()  # kept behind the prefix
    write: bool = True  # False when the only computed position is matched: its KV is there
    aligned: bool = False  # nothing approximate is kept, and computing starts on the chunk grid
    rotate: bool = True
    form: Form = "view"
    probe_flops: float = 0.0  # work that found out what to keep
    answers: bool = True  # False: `tokens` stand in for what was requested (`Erratum`)
    trial: Policy | None = None  # nothing is planned: that policy's trial is the answer
    kept: Bool | None = None  # bool[f], tokens of `forward` whose KV is there: they run for what keeps none
    states: str = "exact"  # of recurrent layers: "exact", or how stale ones are dealt with, see `SCR`

    @property
    def seams(self) -> tuple[int, ...]:
        """First position of each kept span."""
        return tuple(s.new for s in self.spans)


def plan_prompt(tokens: Int32, segments: Int32, matched: int) -> ReusePlan:
    """A prompt of which the first `matched` tokens are cached, exactly, in `segments`."""
    length = len(tokens)
    forward = np.arange(min(matched, length - 1), length, dtype=np.int32)
    return ReusePlan(
        policy="exact",
        tokens=tokens,
        prefix=matched,
        segments=segments,
        attended=segments,
        forward=forward,
        causes={LAST if matched == length else INSERTED: forward},
        provenance=(Run(0, length, Origin.EXACT),),
        matched=length - len(forward),
        write=matched < length,
        aligned=True,
    )


def plan_extension(sequence: Sequence, tokens: Int32) -> ReusePlan:
    """`tokens` begin with those of `sequence`; the rest is appended."""
    start, end = len(sequence), len(tokens)
    forward = np.arange(start, end, dtype=np.int32)
    dropped = sum(r.end - r.start for r in sequence.provenance if r.origin is Origin.DROPPED)
    return ReusePlan(
        policy="extend",
        tokens=tokens,
        prefix=start,
        segments=sequence.segments,
        attended=sequence.table_segments,
        forward=forward,
        causes={INSERTED: forward},
        provenance=sequence.continued(end),
        matched=start - dropped,
        dropped=dropped,
        rotate=sequence.rotate,
    )


def make_edit(sequence: Sequence, new_tokens: Int32, policy: Policy) -> Edit:
    """Finds what survives. An exact policy's prefix ends where the cached KV stops being exact."""
    found = diff(sequence.tokens, new_tokens, min_span=policy.min_span)
    prefix = 0
    if found and found[0].old == 0 and found[0].new == 0:
        prefix, found = found[0].length, found[1:]
    if policy.exact:
        prefix = min(prefix, sequence.exact_length)
    return Edit(
        old_length=len(sequence.tokens),
        exact_length=sequence.exact_length,
        new_length=len(new_tokens),
        prefix=prefix,
        survivors=found,
        old_tokens=sequence.tokens,
        tokens=new_tokens,
    )


def decide(policy: Policy, edit: Edit, probe: Prober | None) -> tuple[Selection, float]:
    """Asks `policy` until it answers, running the probes that it wants. Returns also their FLOPs.

    Raises:
      ConfigError: it wants a probe and there is nobody to run one, or wants the same one twice.
    """
    spent = 0.0
    while (ask := (selection := policy.select(edit)).ask) is not None:
        if probe is None:
            raise ConfigError(
                f"policy '{policy}' asks for {ask}, expected a policy that needs no device: use Engine.edit"
            )
        if ask in edit.evidence:
            raise ConfigError(f"policy '{policy}' asks for {ask} again, expected it to use the answer")
        answer, flops = probe(edit, ask)
        spent += flops
        edit = dataclasses.replace(edit, evidence={**edit.evidence, ask: answer})
    return selection, spent


def plan(
    policy: Policy,
    sequence: Sequence,
    new_tokens: Int32,
    *,
    grid: int = 1,
    probe: Prober | None = None,
    resume: Callable[[int], int] | None = None,
) -> ReusePlan:
    """Applies `policy` to the edit that turns `sequence` into `new_tokens`.

    Every position of the new sequence is exactly one of matched (in the common prefix), relocated (in a
    kept span), forwarded (computed) or dropped. The last position is always forwarded: an answer needs
    its logits. If it was matched, its KV is reused all the same and not written twice.

    Moves are always planned from the segments as born, never from materialized copies: rounding does not
    add up over consecutive edits.

    Args:
      policy: what to keep.
      sequence: the cached sequence.
      new_tokens: i32[n], n >= 1, validated.
      grid: exact reuse ends on multiples of this (chunk granularity).
      probe: runs what the policy asks of the device; None for policies that ask nothing.
      resume: how much of the common prefix every layer can go on from; what it cuts is computed again.
    """
    length = len(new_tokens)
    edit = make_edit(sequence, new_tokens, policy)
    resumed = edit.prefix if resume is not None else 0
    if resume is not None:
        edit = dataclasses.replace(edit, prefix=resume(edit.prefix))
    selection, spent = decide(policy, edit, probe)
    if selection.take is not None:
        return ReusePlan(
            policy=str(policy),
            tokens=new_tokens,
            prefix=0,
            segments=EMPTY_SEGMENTS,
            attended=EMPTY_SEGMENTS,
            forward=EMPTY_SEGMENTS[:, 0],
            causes={},
            provenance=(),
            matched=0,
            probe_flops=spent,
            trial=selection.take,
        )
    if selection.append is not None and len(selection.append):
        tokens = frozen(np.concatenate([sequence.tokens, selection.append]).astype(np.int32))
        work = plan_extension(sequence, tokens)
        return dataclasses.replace(work, policy=str(policy), probe_flops=spent, answers=False)
    if selection.exact:
        edit = dataclasses.replace(edit, prefix=min(edit.prefix, sequence.exact_length))
    # Whatever is kept is exact: then the work is that of the exact policy, chunk grid included.
    exact = not (selection.keep or selection.drop) and edit.prefix <= sequence.exact_length
    if exact and grid > 1:
        prefix = min(edit.prefix, sequence.grid_length, length - 1) // grid * grid
        edit = dataclasses.replace(edit, prefix=prefix)
        selection = dataclasses.replace(selection, recompute=())

    rotate = selection.rotate and (sequence.rotate or policy.exact or selection.exact)
    # What becomes of each position; a number of 0 or more is that of the kept span.
    fate = np.full(length, _COMPUTED, np.int32)
    fate[: edit.prefix] = _MATCHED
    for number, span in enumerate(selection.keep):
        fate[span.new : span.new + span.length] = number
    for span in selection.drop:
        fate[span.new : span.new + span.length] = _DROPPED
    # What has no KV in the source has none here, wherever it is kept.
    for old, new, kept in _kept(edit.prefix, selection.keep):
        for run in clip_runs(sequence.provenance, old, old + kept):
            if run.origin is Origin.DROPPED:
                fate[run.start - old + new : run.end - old + new] = _DROPPED

    inserted = np.flatnonzero(fate == _COMPUTED).astype(np.int32)
    again = inserted < resumed
    named = {RESUMED: inserted[again], INSERTED: inserted[~again]}
    causes = {cause: positions for cause, positions in named.items() if len(positions)}
    for cause, positions in selection.recompute:
        positions = np.unique(positions[fate[positions] >= 0]).astype(np.int32)
        if len(positions):
            fate[positions] = _COMPUTED
            causes[cause] = positions
    last_matched = bool(fate[-1] == _MATCHED)
    if fate[-1] != _COMPUTED:
        causes[LAST] = np.array([length - 1], np.int32)
        if not last_matched:
            fate[-1] = _COMPUTED

    # To rounding, not bit for bit: nothing that moved is called exact on a grid, or where keys drift.
    sight = sequence.sight if grid == 1 and rotate and selection.form != "composed" else None
    moved: list[Int32] = []
    removed = [Removed.of(sequence.tokens, *gap) for gap in _intervals(edit.deleted, 0, edit.old_length)]
    runs = [r for r in clip_runs(sequence.provenance, 0, edit.prefix) if r.origin is not Origin.DROPPED]
    for number, span in enumerate(selection.keep):
        for start, end in _intervals(fate == number, span.new, span.new + span.length):
            source = start - span.delta, end - span.delta
            moved.append(shift(clip(sequence.segments, *source), span.delta))
            seen = tuple(gap for gap in removed if gap.start < source[0])
            # Behind this position nothing before the span is felt, in any layer.
            free = length if sight is None else span.new + sight.reach
            for r in clip_runs(sequence.provenance, *source):
                begin, stop, delta = r.start + span.delta, r.end + span.delta, r.delta + span.delta
                middle = min(max(free, begin), stop) if r.origin is Origin.EXACT else stop
                influences = union([r.influences, seen])
                runs.append(Run(begin, middle, Origin.RELOCATED, delta, influences))
                runs.append(Run(middle, stop, Origin.EXACT, delta))
    runs += [Run(a, b, Origin.DROPPED) for a, b in _intervals(fate == _DROPPED, 0, length)]
    runs = [run for run in runs if run.start < run.end]
    for start, end in _intervals(fate == _COMPUTED, 0, length):
        exactly = computed_exact(runs, start, sight)
        runs.append(Run(start, end, Origin.EXACT if exactly else Origin.ON_APPROXIMATE))
    forward = np.flatnonzero(fate == _COMPUTED).astype(np.int32)
    return ReusePlan(
        policy=str(policy),
        tokens=new_tokens,
        prefix=edit.prefix,
        segments=concatenate([clip(sequence.segments, 0, edit.prefix), *moved]),
        attended=concatenate([clip(sequence.table_segments, 0, edit.prefix), *moved]),
        spans=selection.keep,
        forward=forward if not last_matched else np.append(forward, np.int32(length - 1)),
        causes=causes,
        provenance=merge_runs(_influenced(sorted(runs, key=lambda r: r.start))),
        matched=int((fate == _MATCHED).sum()) - last_matched,
        relocated=int((fate >= 0).sum()),
        dropped=int((fate == _DROPPED).sum()),
        write=not last_matched,
        aligned=exact,
        rotate=rotate,
        form=selection.form,
        probe_flops=spent,
        states="exact" if exact else selection.states,
    )


def plan_heal(
    sequence: Sequence, tokens: int, *, grid: int = 1, resume: Callable[[int], int] | None = None
) -> ReusePlan:
    """Recomputes the next `tokens` positions that are not exact, from left to right; none if all are.

    What is exact is always a prefix, so what is computed next is exact too, and everything behind it
    is kept as it stands. On a grid whole chunks are computed, from the last one that was: then a
    healed sequence has the very bits of a fresh one. The last position is not computed unless it is
    its turn: its logits are refreshed by whoever executes this.

    Args:
      sequence: the one to heal.
      tokens: positions to heal at most, at least 1; rounded up to the grid.
      grid, resume: as in `plan`.
    """
    length = len(sequence)
    start = sequence.exact_length
    if grid > 1 and not sequence.exact:
        start = min(start, sequence.grid_length) // grid * grid
    end = sequence.exact_length + tokens
    stale = max((run.end for run in sequence.provenance if run.origin is not Origin.EXACT), default=0)
    end = min(-(-end // grid) * grid, length) if grid > 1 else max(min(end, stale), start)
    if resume is not None and start < end:
        start = resume(start)
    forward = np.arange(start, end, dtype=np.int32)
    rest = clip_runs(sequence.provenance, end, length)
    dropped = sum(r.end - r.start for r in rest if r.origin is Origin.DROPPED)
    return ReusePlan(
        policy="heal",
        tokens=sequence.tokens,
        prefix=start,
        segments=concatenate([clip(sequence.segments, 0, start), clip(sequence.segments, end, length)]),
        attended=concatenate(
            [clip(sequence.table_segments, 0, start), clip(sequence.table_segments, end, length)]
        ),
        forward=forward,
        causes={HEALED: forward},
        provenance=merge_runs([Run(0, end, Origin.EXACT), *rest]),
        matched=start,
        relocated=length - end - dropped,
        dropped=dropped,
        aligned=True,
        rotate=sequence.rotate or end == length,
    )


def _influenced(runs: list[Run]) -> list[Run]:
    """Runs in order of position; what was computed reflects all that what it attended reflects."""
    seen: tuple[Removed, ...] = ()
    result = []
    for run in runs:
        if run.origin is Origin.ON_APPROXIMATE and run.start < run.end:
            run = dataclasses.replace(run, influences=union([run.influences, seen]))
        seen = union([seen, run.influences])
        result.append(run)
    return result


def _kept(prefix: int, spans: tuple[Span, ...]) -> list[tuple[int, int, int]]:
    """Old start, new start and length of everything kept."""
    return [(0, 0, prefix), *((span.old, span.new, span.length) for span in spans)]


def _intervals(flags: Bool, start: int, end: int) -> list[tuple[int, int]]:
    """Maximal runs of true flags within start..end-1."""
    window = np.concatenate([[False], flags[start:end], [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(window)) + start
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
