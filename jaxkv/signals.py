"""Reads the signals of an approximate answer: how far recomputed tokens drifted, who looks at what."""

from __future__ import annotations

import math

import numpy as np

from jaxkv.cache.sequence import Origin, Sequence
from jaxkv.memory import Memory
from jaxkv.model.params import Params
from jaxkv.probing import Places, attention_mass, layers_at, squared_changes
from jaxkv.results import StepResult
from jaxkv.reuse.diff import Span, diff
from jaxkv.reuse.estimate import Signals
from jaxkv.reuse.policies.base import MIN_SPAN
from jaxkv.typing import Bool, Int32

DEPTHS = (0.4, 0.8)  # shares of the model's layers at which state is compared
LAST = 16  # tokens at the end that stand for those who will read the context


def read_signals(
    memory: Memory, params: Params, source: Sequence, result: StepResult
) -> tuple[Signals, float]:
    """Signals of `result`, an approximate edit of `source`, and the FLOPs of reading them. Both are live.

    Reads K and V of at most 64 recomputed survivors, and attention of at most 32 tokens, at two layers.
    """
    made = result.sequence
    tokens = made.tokens
    found = diff(source.tokens, tokens, min_span=MIN_SPAN)
    kept = _ranges([(s.new, s.length) for s in found], len(tokens))
    gone = ~_ranges([(s.old, s.length) for s in found], len(source))
    stale = np.zeros(len(tokens), np.bool_)
    for run in made.provenance:
        stale[run.start : run.end] = run.origin is Origin.RELOCATED
    layers = layers_at(DEPTHS, memory.config)
    before, after = Places.of(memory, source), Places.of(memory, made)
    key_drift, value_drift = _drift(memory, layers[-1], found, stale, before, after)
    last = np.arange(max(len(tokens) - LAST, 0), len(tokens), dtype=np.int32)
    last = last[after.at(last).slots >= 0]
    stale_mass, flops = _mean_mass(memory, params, after, last, stale, layers)
    deleted_mass = 0.0
    if gone.any():
        survivors = np.flatnonzero(~gone)[-LAST:].astype(np.int32)
        survivors = survivors[before.at(survivors).slots >= 0]
        deleted_mass, more = _mean_mass(memory, params, before, survivors, gone, layers)
        flops += more
    seam = max(result.reuse.seams, default=0)
    signals = Signals(
        key_drift=key_drift,
        value_drift=value_drift,
        stale_mass=stale_mass,
        deleted_mass=deleted_mass,
        sink_stale=bool(stale[:4].any()),
        stale_share=float(stale.mean()),
        distance=len(tokens) - seam,
        deleted=int(gone.sum()),
        inserted=int((~kept).sum()),
        length=len(tokens),
    )
    return signals, flops


def _mean_mass(
    memory: Memory, params: Params, places: Places, queries: Int32, marked: Bool, layers: tuple[int, ...]
) -> tuple[float, float]:
    """Attention of `queries` on marked tokens, mean over heads and layers; 0 for none. Also its FLOPs."""
    if not len(queries):
        return 0.0, 0.0
    found = [
        attention_mass(memory, params, places, queries, marked, layer=layer, heads="mean") for layer in layers
    ]
    return float(np.mean([mass for mass, _ in found])), sum(flops for _, flops in found)


def _drift(
    memory: Memory,
    layer: int,
    spans: tuple[Span, ...],
    stale: Bool,
    before: Places,
    after: Places,
) -> tuple[float, float]:
    """Relative change of K and V of the last recomputed survivors; 1 where nothing was recomputed."""
    old: list[Int32] = []
    new: list[Int32] = []
    for span in spans:
        at = np.arange(span.new, span.new + span.length, dtype=np.int32)
        at = at[~stale[at]]
        old.append(at - np.int32(span.delta))
        new.append(at)
    a = before.at(np.concatenate([*old, np.zeros(0, np.int32)])[-4 * LAST :].astype(np.int32))
    b = after.at(np.concatenate([*new, np.zeros(0, np.int32)])[-4 * LAST :].astype(np.int32))
    # A token that kept its slot was not recomputed: an untouched prefix says nothing about the edit.
    both = (a.slots >= 0) & (b.slots >= 0) & (a.slots != b.slots)
    both &= np.cumsum(both[::-1])[::-1] <= LAST
    if not both.any():
        return 1.0, 1.0
    dk, k, dv, v = squared_changes(memory, layer, b.take(both), a.take(both))
    return math.sqrt(dk.sum() / max(k.sum(), 1e-30)), math.sqrt(dv.sum() / max(v.sum(), 1e-30))


def _ranges(parts: list[tuple[int, int]], length: int) -> Bool:
    flags = np.zeros(length, np.bool_)
    for start, count in parts:
        flags[start : start + count] = True
    return flags
