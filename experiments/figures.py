"""From answers to the fields of a record. Pure: nothing is run here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.records import Record
from jaxkv.cache.sequence import Origin
from jaxkv.divergence import divergence, layer_divergence
from jaxkv.results import KVState, StepResult
from jaxkv.typing import Float32, Int32

if TYPE_CHECKING:
    from experiments.workloads.case import Case, Task


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """Fresh exact prefills of what a case asks for, with nothing reused."""

    logits: tuple[Float32, ...]  # f32[T, V] on the continuation of each measured turn
    state: KVState | None  # of the last turn; None when layer errors are not asked for
    attention: Float32 | None  # f32[L, T, N*H], of the last turn
    greedy: Int32 | None
    bare: Float32 | None  # f32[V], the answer to a task's question without its context
    # As `logits`, over float32 pages; None where a case does not choose its pages' dtype.
    wide: tuple[Float32, ...] | None = None
    rotation: bool = False  # whether what rotation alone costs is asked for


def describe(case: Case, policy: str) -> Record:
    """What was measured, of what."""
    return {
        "case": case.id,
        "policy": policy,
        "edit": case.edit,
        "position": case.position,
        "size": case.size,
        "context": case.context,
        "document": case.document,
        "kv_dtype": case.kv_dtype,
        "turns": len(case.turns),
        "old_tokens": len(case.old),
        "new_tokens": len(case.new),
        "tokens_digest": case.digest,
    }


def compare(case: Case, reference: Reference, logits: list[Float32]) -> Record:
    """Divergence over all tokens of all measured turns."""
    texts = [t.continuation for t in case.turns if len(t.continuation)]
    text = np.concatenate(texts)
    found = divergence(np.concatenate(reference.logits), np.concatenate(logits), text)
    last = -1
    if not case.before:
        last = int(case.distances(np.array([len(case.new)], np.int32))[0])
    return {
        "divergence": found.to_dict(),
        "kl_tokens": [float(f"{x:.6g}") for x in found.kl_tokens],
        "distance": last if last >= 0 else None,  # of the first continuation token, from the seam
        "pages": _pages(reference, logits, text),
    }


def _pages(reference: Reference, logits: list[Float32], text: Int32) -> Any:
    """What storing KV in the pages' dtype does by itself, and what it does together with reuse."""
    if reference.wide is None:
        return None
    wide = np.concatenate(reference.wide)
    alone = divergence(wide, np.concatenate(reference.logits), text)
    both = divergence(wide, np.concatenate(logits), text)
    return {
        "kl": alone.kl.mean,  # KL(exact over float32 pages ‖ exact over these pages), nats a token
        "top1": alone.top1_agreement,
        "delta_nll": alone.delta_nll,
        "with_reuse_kl": both.kl.mean,  # KL(exact over float32 pages ‖ this answer)
        "with_reuse_top1": both.top1_agreement,
    }


def greedy_match(exact: Int32 | None, approx: Int32 | None) -> Any:
    """Greedy text against that of exact: same throughout, or where it first differs."""
    if exact is None or approx is None:
        return None
    shared = min(len(exact), len(approx))
    differ = np.flatnonzero(exact[:shared] != approx[:shared])
    first = int(differ[0]) if len(differ) else None
    return {
        "identical": first is None and len(exact) == len(approx),
        "first_divergence": first,
        "match": shared if first is None else first,  # tokens before the first that differs
        "tokens": len(exact),
    }


def task_figures(task: Task | None, reference: Reference, logits: Float32) -> Any:
    """What an answer to a task says, beside what exact says; `logits` f32[T, V], its last row answers."""
    if task is None:
        return None
    exact, mine = reference.logits[-1][-1].astype(np.float64), logits[-1].astype(np.float64)
    figures: dict[str, Any] = {"kind": task.kind, "distance": task.distance}
    if task.kind == "residue":
        others = np.array(task.candidates)
        for name, row in (("", mine), ("exact_", exact)):
            figures[f"{name}rank"] = 1 + int((row[others] > row[task.answer]).sum())
            figures[f"{name}logprob"] = float(row[task.answer] - _logsumexp(row))
        figures["said"] = bool(mine.argmax() == task.answer)
        return figures
    bare = reference.bare
    figures["counts"] = bool(
        exact.argmax() == task.answer and (bare is None or int(bare.argmax()) != task.answer)
    )
    for name, row in (("", mine), ("exact_", exact)):
        figures[f"{name}right"] = bool(row.argmax() == task.answer)
        if task.stale is not None:
            figures[f"{name}margin"] = float(row[task.answer] - row[task.stale])
    figures["says_stale"] = task.stale is not None and int(mine.argmax()) == task.stale
    figures["flipped"] = bool(mine.argmax() != exact.argmax())
    return figures


def state_errors(case: Case, reference: Reference, state: KVState, attention: Float32) -> Any:
    """Errors of K (un-rotated) and V behind the first seam, and of the attention outputs."""
    exact = reference.state
    assert exact is not None
    assert reference.attention is not None
    # A dropped token has no state to compare; in front of the first seam nothing is stale.
    both, mine, theirs = np.intersect1d(
        state.positions, exact.positions, assume_unique=True, return_indices=True
    )
    distances = case.distances(both.astype(np.int32))
    behind = distances >= 0
    keys = values = None
    if behind.any():
        mine, theirs, distances = mine[behind], theirs[behind], distances[behind]
        keys, values = (
            layer_divergence(a[:, theirs], b[:, mine], distances).to_dict()
            for a, b in ((exact.keys, state.keys), (exact.values, state.values))
        )
    ahead = case.distances(len(case.new) + np.arange(attention.shape[1], dtype=np.int32))
    return {
        "keys": keys,
        "values": values,
        "attention": layer_divergence(
            reference.attention, attention, ahead if (ahead >= 0).all() else None
        ).to_dict(),
    }


def homes(before: Int32, result: StepResult) -> Int32:
    """Where each token of an edit's result was first computed, i32[n]; -1 for those computed since.

    Args:
      before: the same for the sequence that was edited.
      result: the edit.
    """
    sequence, reuse = result.sequence, result.reuse
    found = np.full(len(sequence), -1, np.int32)
    prefix = reuse.match_end.position
    found[:prefix] = before[:prefix]
    for span in reuse.spans:
        found[span.new : span.new + span.length] = before[span.old : span.old + span.length]
    for run in sequence.provenance:
        if run.origin is not Origin.RELOCATED:
            found[max(run.start, prefix) : max(run.end, prefix)] = -1
    return found


def key_change(born: KVState, now: KVState, home: Int32) -> float | None:
    """‖K − K at birth‖/‖K at birth‖, un-rotated, over tokens that were moved and never recomputed.

    Args:
      born: the state before any edit, all positions present.
      now: the state after some.
      home: i32[n], where each token stood at birth, -1 if it was computed since.
    """
    mine = np.flatnonzero((home[now.positions] >= 0) & (home[now.positions] != now.positions))
    if not len(mine):
        return None
    a = born.keys[:, home[now.positions[mine]]].astype(np.float64)
    error = float(((now.keys[:, mine] - a) ** 2).sum())
    return float(np.sqrt(error / (a**2).sum()))


def _logsumexp(row: Any) -> float:
    peak = float(row.max())
    return peak + float(np.log(np.exp(row - peak).sum()))
