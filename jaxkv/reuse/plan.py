"""From a cached sequence, new tokens and a policy to a plan: what stands where, what is computed."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.cache.sequence import (
    Origin,
    Run,
    Sequence,
    clip,
    clip_runs,
    concatenate,
    merge_runs,
    shift,
)
from jaxkv.reuse.diff import Span, diff
from jaxkv.reuse.policies import Edit, Form, Policy
from jaxkv.typing import Bool, Int32

INSERTED = "inserted"
LAST = "last"  # computed only because its logits are wanted


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
    rotate: bool = True
    form: Form = "view"

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
    )


def plan_extension(sequence: Sequence, tokens: Int32) -> ReusePlan:
    """`tokens` begin with those of `sequence`; the rest is appended."""
    start, end = len(sequence), len(tokens)
    forward = np.arange(start, end, dtype=np.int32)
    return ReusePlan(
        policy="extend",
        tokens=tokens,
        prefix=start,
        segments=sequence.segments,
        attended=sequence.table_segments,
        forward=forward,
        causes={INSERTED: forward},
        provenance=sequence.continued(end),
        matched=start,
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
        new_length=len(new_tokens),
        prefix=prefix,
        survivors=found,
    )


def plan(policy: Policy, sequence: Sequence, new_tokens: Int32, *, grid: int = 1) -> ReusePlan:
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
    """
    length = len(new_tokens)
    edit = make_edit(sequence, new_tokens, policy)
    if policy.exact and grid > 1:
        prefix = min(edit.prefix, sequence.grid_length, length - 1) // grid * grid
        edit = dataclasses.replace(edit, prefix=prefix)
    selection = policy.select(edit)

    # What each position is: owner[i] = index of the kept span, -1 prefix, -2 computed, -3 dropped.
    owner = np.full(length, -2, np.int32)
    owner[: edit.prefix] = -1
    for number, span in enumerate(selection.keep):
        owner[span.new : span.new + span.length] = number
    for span in selection.drop:
        owner[span.new : span.new + span.length] = -3
    causes: dict[str, Int32] = {}
    inserted = np.flatnonzero(owner == -2).astype(np.int32)
    if len(inserted):
        causes[INSERTED] = inserted
    for cause, positions in selection.recompute:
        positions = np.unique(positions[owner[positions] >= 0]).astype(np.int32)
        if len(positions):
            owner[positions] = -2
            causes[cause] = positions
    if owner[-1] != -2:
        causes[LAST] = np.array([length - 1], np.int32)

    matched = owner == -1
    relocated = owner >= 0
    last_matched = bool(matched[-1])
    counted_matched = int(matched.sum()) - last_matched
    if not last_matched:
        owner[-1] = -2
        relocated[-1] = False

    moved_parts = []
    runs = clip_runs(sequence.provenance, 0, edit.prefix)
    for number, span in enumerate(selection.keep):
        for start, end in _intervals(owner == number, span.new, span.new + span.length):
            moved = clip(sequence.segments, start - span.delta, end - span.delta)
            moved_parts.append(shift(moved, span.delta))
            runs += [
                Run(r.start + span.delta, r.end + span.delta, _moved(r), r.delta + span.delta)
                for r in clip_runs(sequence.provenance, start - span.delta, end - span.delta)
            ]
    approximate = relocated | (owner == -3)
    first_approximate = min(
        sequence.exact_length if sequence.exact_length < edit.prefix else length,
        int(np.argmax(approximate)) if approximate.any() else length,
    )
    forward = np.flatnonzero(owner == -2).astype(np.int32)
    for start, end in _intervals(owner == -2, 0, length):
        middle = min(max(first_approximate, start), end)
        runs += [Run(start, middle, Origin.EXACT), Run(middle, end, Origin.ON_APPROXIMATE)]
    runs += [Run(a, b, Origin.DROPPED) for a, b in _intervals(owner == -3, 0, length)]
    return ReusePlan(
        policy=str(policy),
        tokens=new_tokens,
        prefix=edit.prefix,
        segments=concatenate([clip(sequence.segments, 0, edit.prefix), *moved_parts]),
        attended=concatenate([clip(sequence.table_segments, 0, edit.prefix), *moved_parts]),
        spans=selection.keep,
        forward=forward if not last_matched else np.array([length - 1], np.int32),
        causes=causes,
        provenance=merge_runs(sorted(runs, key=lambda r: r.start)),
        matched=counted_matched,
        relocated=int(relocated.sum()),
        dropped=int((owner == -3).sum()),
        write=not last_matched,
        rotate=selection.rotate and (sequence.rotate or policy.exact),
        form=selection.form,
    )


def _moved(run: Run) -> Origin:
    return Origin.DROPPED if run.origin is Origin.DROPPED else Origin.RELOCATED


def _intervals(flags: Bool, start: int, end: int) -> list[tuple[int, int]]:
    """Maximal runs of true flags within start..end-1."""
    window = np.concatenate([[False], flags[start:end], [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(window)) + start
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
