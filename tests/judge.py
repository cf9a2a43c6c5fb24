"""Follows an engine's edits in float64: keeps, moves and computes what a result says it did.

What was kept, moved and dropped is read from the result's report and provenance; every number is the
reference decoder's own. So a wrong rotation, mask, slot or table shows as a difference.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from reference import Cached, Decoder
from tolerances import tolerance

import jaxkv

ATOL = tolerance("logits")


@dataclasses.dataclass
class State:
    tokens: np.ndarray
    cached: Cached
    logits: np.ndarray  # f64[V]
    rotate: bool = True


class Judge:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def prefill(self, tokens: np.ndarray) -> State:
        logits, cached = self.decoder.run(tokens, np.arange(len(tokens)), self.decoder.empty())
        return State(np.asarray(tokens), cached, logits[-1])

    def edit(self, old: State, result: jaxkv.StepResult, *, rotate: bool = True) -> State:
        tokens, reuse = result.sequence.tokens, result.reuse
        prefix, rows, stands, forward = reuse.match_end.position, [], [], []
        row_of = {int(p): i for i, p in enumerate(old.cached.stands)}
        moved = {p for run in result.sequence.provenance if run.delta for p in range(run.start, run.end)}
        for p, origin in enumerate(origins(result.sequence)):
            if p < prefix:
                source = p
            elif origin == "relocated" or p in moved:  # moved KV of a local model may be exact
                (span,) = (s for s in reuse.spans if s.new <= p < s.new + s.length)
                source = p - span.delta
            elif origin == "dropped":
                continue
            else:
                forward.append(p)
                continue
            if source in row_of:
                rows.append(row_of[source])
                stands.append(p)
        kept = old.cached.take(np.array(rows, int), np.array(stands, int))
        rotate = rotate and old.rotate
        if forward:
            assert reuse.forwarded == len(forward)
            logits, cached = self.decoder.run(tokens[forward], forward, kept, rotate=rotate)
        else:  # all is cached: only the last token's logits are computed, over its own cached key
            assert reuse.forwarded == 1
            before = kept.take(np.arange(len(rows) - 1), kept.stands[:-1])
            logits, _ = self.decoder.run(tokens[-1:], [len(tokens) - 1], before, rotate=rotate)
            cached = kept
        return State(tokens, cached, logits[-1], rotate)

    def extend(self, old: State, tokens: np.ndarray) -> State:
        n = len(old.tokens)
        logits, cached = self.decoder.run(
            tokens, np.arange(n, n + len(tokens)), old.cached, rotate=old.rotate
        )
        return State(np.concatenate([old.tokens, tokens]), cached, logits[-1], old.rotate)

    def score(self, old: State, continuation: np.ndarray) -> np.ndarray:
        n = len(old.tokens)
        logits, _ = self.decoder.run(
            continuation, np.arange(n, n + len(continuation)), old.cached, rotate=old.rotate
        )
        return np.concatenate([old.logits[None], logits[:-1]])

    def greedy(self, state: State, steps: int) -> list[int]:
        out: list[int] = []
        for _ in range(steps):
            out.append(int(state.logits.argmax()))
            state = self.extend(state, np.array(out[-1:]))
        return out


def origins(sequence: jaxkv.Sequence) -> list[str]:
    """One origin a token, from provenance, which must cover 0..n without a gap."""
    out: list[str] = []
    for run in sequence.provenance:
        assert run.start == len(out), "provenance has a gap or an overlap"
        assert run.end > run.start
        out += [str(run.origin)] * (run.end - run.start)
    assert len(out) == len(sequence)
    return out
