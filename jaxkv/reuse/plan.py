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
    selection = policy.select(edit)
    # Whatever is kept is exact: then the work is that of the exact policy, chunk grid included.
    exact = not (selection.keep or selection.drop) and edit.prefix <= sequence.exact_length
    if exact and grid > 1:
        prefix = min(edit.prefix, sequence.grid_length, length - 1) // grid * grid
        edit = dataclasses.replace(edit, prefix=prefix)
        selection = dataclasses.replace(selection, recompute=())

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

    causes: dict[str, Int32] = {}
    inserted = np.flatnonzero(fate == _COMPUTED).astype(np.int32)
    if len(inserted):
        causes[INSERTED] = inserted
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

    moved: list[Int32] = []
    runs = [r for r in clip_runs(sequence.provenance, 0, edit.prefix) if r.origin is not Origin.DROPPED]
    for number, span in enumerate(selection.keep):
        for start, end in _intervals(fate == number, span.new, span.new + span.length):
            source = start - span.delta, end - span.delta
            moved.append(shift(clip(sequence.segments, *source), span.delta))
            runs += [
                Run(r.start + span.delta, r.end + span.delta, Origin.RELOCATED, r.delta + span.delta)
                for r in clip_runs(sequence.provenance, *source)
            ]
    approximate = (fate >= 0) | (fate == _DROPPED)
    approximate[min(sequence.exact_length, edit.prefix) : edit.prefix] = True
    first_approximate = int(np.argmax(approximate)) if approximate.any() else length
    for start, end in _intervals(fate == _COMPUTED, 0, length):
        middle = min(max(first_approximate, start), end)
        runs += [Run(start, middle, Origin.EXACT), Run(middle, end, Origin.ON_APPROXIMATE)]
    runs += [Run(a, b, Origin.DROPPED) for a, b in _intervals(fate == _DROPPED, 0, length)]
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
        provenance=merge_runs(sorted(runs, key=lambda r: r.start)),
        matched=int((fate == _MATCHED).sum()) - last_matched,
        relocated=int((fate >= 0).sum()),
        dropped=int((fate == _DROPPED).sum()),
        write=not last_matched,
        aligned=exact,
        rotate=selection.rotate and (sequence.rotate or policy.exact),
        form=selection.form,
    )


def _kept(prefix: int, spans: tuple[Span, ...]) -> list[tuple[int, int, int]]:
    """Old start, new start and length of everything kept."""
    return [(0, 0, prefix), *((span.old, span.new, span.length) for span in spans)]


def _intervals(flags: Bool, start: int, end: int) -> list[tuple[int, int]]:
    """Maximal runs of true flags within start..end-1."""
    window = np.concatenate([[False], flags[start:end], [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(window)) + start
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
