"""Making an approximate sequence exact, a few tokens at a time, and displacing an exact one on purpose."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxkv.cache.sequence import (
    EMPTY_SEGMENTS,
    PAGE,
    Origin,
    Run,
    Sequence,
    clip,
    concatenate,
    merge_runs,
    shift,
    slots_of,
)
from jaxkv.carry import Resume, carry_of
from jaxkv.execute import Computed, compute, extended, move_slots
from jaxkv.memory import Memory
from jaxkv.model.params import Params
from jaxkv.reuse.diff import Span
from jaxkv.reuse.plan import ReusePlan
from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Healed:
    """What `heal` made. Whoever called it adopts the sequence, and releases `fresh` and slots of `states`."""

    changes: dict[str, Any]  # fields of the sequence that differ
    fresh: Int32
    shapes: set[tuple[Any, ...]]
    states: tuple[tuple[int, int], ...] = ()  # exact ones of recurrent layers: positions and slots


def heal(
    memory: Memory,
    params: Params,
    sequence: Sequence,
    work: ReusePlan,
    *,
    grid: int,
    max_deltas: int,
    chunk_size: int,
    resume: Resume | None = None,
) -> Healed:
    """Executes `plan_heal`, or what `resume_heal` made of it.

    The healed tokens see what is before them and nothing else, in the shapes of a fresh prefill; the last
    token is then read again over all, so that the next token's logits know of the repair. Recurrent layers
    cannot read it again: the state in front of it is not there. Logits and state of such a model's sequence
    stay as they were until the last token is healed.

    Raises:
      CapacityError: not enough pages.
    """
    start, length = work.prefix, len(work.tokens)
    if not len(work.forward):
        return Healed(changes={"logits": sequence.logits}, fresh=EMPTY_SEGMENTS[:, PAGE], shapes=set())
    done: Computed = compute(
        memory,
        params,
        segments=clip(sequence.segments, 0, start),
        attended=clip(sequence.segments, 0, start),
        tokens=work.tokens[work.forward],
        positions=work.forward,
        rotate=True,
        max_deltas=max_deltas,
        chunk_size=chunk_size,
        kept=work.kept,
        carry=carry_of(memory, resume, work),
    )
    memory.commit(done.placement)
    end = int(work.forward[-1]) + 1
    shapes, logits = set(done.shapes), done.logits
    segments, attended = extended(work.segments, done.placement), extended(work.attended, done.placement)
    if end < length and memory.states is not None:
        logits = sequence.logits
    elif end < length:
        try:
            last = compute(
                memory,
                params,
                segments=segments,
                attended=attended,
                tokens=work.tokens[-1:],
                positions=np.array([length - 1], np.int32),
                rotate=work.rotate,
                max_deltas=max_deltas,
                chunk_size=chunk_size,
                write=False,
            )
        except BaseException:
            memory.release(done.placement.fresh)
            raise
        shapes |= last.shapes
        logits = last.logits
    changes = {
        "segments": segments,
        "copies": None if end == length or np.array_equal(attended, segments) else attended,
        "provenance": work.provenance,
        "grid_length": end // grid * grid if grid > 1 else sequence.grid_length,
        "rotate": work.rotate,
        "logits": logits,
        "state": done.state if end == length else sequence.state,
    }
    return Healed(changes=changes, fresh=done.placement.fresh, shapes=shapes, states=done.states)


def displace(memory: Memory, sequence: Sequence, spans: tuple[Span, ...]) -> tuple[dict[str, Any], Int32]:
    """Exact KV as if it had been relocated: what rotation alone costs.

    The tokens of each span are copied to where an edit would have found them, keys rotated by -delta,
    and made to stand where they stood: whatever differs then from the exact answer is rounding of
    rotations, none of it staleness.

    Returns the fields that differ, and fresh pages for the caller to release.

    Raises:
      CapacityError: not enough pages.
      RelocationError: the model's rotations do not compose.
    """
    rows, fresh, kept = [], [], 0
    runs: list[Run] = []
    try:
        for span in sorted(spans, key=lambda s: s.new):
            rows.append(clip(sequence.segments, kept, span.new))
            kept = span.new + span.length
            segments = clip(sequence.segments, span.new, kept)
            positions, source = slots_of(segments, memory.pool.page_size)
            births = np.repeat(memory.pool.birth[segments[:, PAGE]], segments[:, 2] - segments[:, 1])
            stood = births + source % memory.pool.page_size
            cached = positions - np.int32(span.delta)
            placement = memory.place(EMPTY_SEGMENTS, cached)
            fresh.append(placement.fresh)
            move_slots(memory, source, placement.slots, cached - stood)
            memory.commit(placement)
            rows.append(shift(placement.segments, span.delta))
            runs.append(Run(span.new, kept, Origin.RELOCATED, span.delta))
    except BaseException:
        for pages in fresh:
            memory.release(pages)
        raise
    rows.append(clip(sequence.segments, kept, len(sequence)))
    provenance: list[Run] = []
    at = 0
    for run in runs:
        origin = Origin.EXACT if not provenance else Origin.ON_APPROXIMATE
        provenance += [Run(at, run.start, origin), run]
        at = run.end
    provenance.append(Run(at, len(sequence), Origin.ON_APPROXIMATE if runs else Origin.EXACT))
    changes = {"segments": concatenate(rows), "copies": None, "provenance": merge_runs(provenance)}
    return changes, np.concatenate([np.zeros(0, np.int32), *fresh]).astype(np.int32)
