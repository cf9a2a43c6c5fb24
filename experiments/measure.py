"""One case, measured: the exact reference, the noise floor, and each policy against them."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.records import NOISE, Record
from jaxkv.cache.sequence import Sequence
from jaxkv.divergence import divergence, layer_divergence
from jaxkv.engine import Engine
from jaxkv.errors import JaxkvError
from jaxkv.io.models import Model
from jaxkv.results import KVState, StepResult
from jaxkv.reuse.policies import Policy, policy_from_name
from jaxkv.typing import Float32, Int32

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig
    from experiments.workloads.case import Case

_MAX_REPEATS = 3
_QUICK_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """A fresh exact prefill of the new tokens, with nothing reused."""

    logits: Float32  # f32[T, V] on the continuation
    state: KVState | None  # None when layer errors are not asked for
    attention: Float32 | None  # f32[L, T, N*H]
    greedy: Int32 | None


class Bench:
    """Measures cases on one model.

    The engine has no prefix index: what one measurement computed can't be found by another, so every
    policy pays for itself.
    """

    def __init__(self, model: Model, config: ExperimentConfig, longest: int) -> None:
        """`longest`: most tokens, continuation included, that a case holds at once."""
        # At most four sequences stand at once: the cached text, the reference, and an edit whose
        # copies take as much again.
        pages = 4 * (math.ceil(longest / config.page_size) + 2)
        self._config = config
        self._engine = Engine(
            model,
            num_pages=config.num_pages or pages,
            page_size=config.page_size,
            chunk_size=config.chunk_size,
            prefix_cache=False,
        )
        self._old: tuple[Int32, Sequence] | None = None

    def reference(self, case: Case, *, layers: bool) -> Reference:
        """The exact answer to `case`, computed afresh."""
        result = self._engine.prefill(case.new, reuse=False)
        try:
            sequence, text = result.sequence, case.continuation
            return Reference(
                logits=np.asarray(self._engine.score(sequence, text)),
                state=self._engine.read_kv(sequence) if layers else None,
                attention=self._engine.attention_outputs(sequence, text) if layers else None,
                greedy=self._greedy(sequence),
            )
        finally:
            self._engine.release(result.sequence)

    def noise(self, case: Case, reference: Reference) -> Record:
        """Exact against exact under another chunking: what rounding alone does.

        A few tokens are computed first, so every chunk behind them begins elsewhere.
        """
        split = min(self._config.noise_offset, len(case.new) - 1)
        first = self._engine.prefill(case.new[:split], reuse=False).sequence
        try:
            whole = self._engine.extend(first, case.new[split:]).sequence
        finally:
            self._engine.release(first)
        try:
            logits = np.asarray(self._engine.score(whole, case.continuation))
        finally:
            self._engine.release(whole)
        return {"status": "ok", **_describe(case, NOISE), **_compare(case, reference, logits)}

    def policy(self, case: Case, name: str, reference: Reference) -> Record:
        """Edits the cached text under one policy and compares the answer with the reference."""
        try:
            result, seconds = self._timed_edit(self._cached(case.old), case, policy_from_name(name))
        except JaxkvError:
            self._forget_old()
            raise
        try:
            sequence, text, reuse = result.sequence, case.continuation, result.reuse
            logits = np.asarray(self._engine.score(sequence, text))
            ledger = reuse.ledger.to_dict()
            return {
                "status": "ok",
                **_describe(case, name),
                "kind": reuse.kind,
                **_compare(case, reference, logits),
                "reuse": {
                    "prompt": reuse.prompt,
                    "matched": reuse.matched,
                    "relocated": reuse.relocated,
                    "forwarded": reuse.forwarded,
                    "dropped": reuse.dropped,
                    "match_end": str(reuse.match_end),
                    "seams": [int(seam) for seam in reuse.seams],
                },
                "flops": float(ledger["flops"]),
                "ledger": ledger,
                "timings_ms": {
                    "first_token": 1e3 * seconds,
                    **{part: 1e3 * float(value) for part, value in reuse.timings.items()},
                },
                "layers": self._layers(case, sequence, reference),
                "greedy": _greedy_match(reference.greedy, self._greedy(sequence)),
            }
        finally:
            self._engine.release(result.sequence)

    def _forget_old(self) -> None:
        # Not released by hand: a step that failed may have released it with everything else, and
        # the engine takes back what nobody refers to.
        self._old = None

    def _cached(self, tokens: Int32) -> Sequence:
        """The exact KV of `tokens`; kept from case to case while the text is the same."""
        if self._old is None or not np.array_equal(self._old[0], tokens):
            self._forget_old()
            self._old = tokens, self._engine.prefill(tokens).sequence
        return self._old[1]

    def _timed_edit(self, sequence: Sequence, case: Case, policy: Policy) -> tuple[StepResult, float]:
        """Seconds from the request to logits on the host, compilation excluded.

        An edit that met a new shape is timed again. So is one that copied KV, whose shapes are not
        counted, and every quick one, for which it costs little.
        """
        for repeat in range(_MAX_REPEATS):
            shapes = self._engine.stats()["shapes"]
            start = time.perf_counter()
            result = self._engine.edit(sequence, case.new, policy)
            np.asarray(result.logits)  # waits for the device
            seconds = time.perf_counter() - start
            compiled = self._engine.stats()["shapes"] != shapes
            again = seconds < _QUICK_SECONDS or result.reuse.ledger.kv_bytes_moved > 0
            warm = not compiled and (repeat > 0 or not again)
            if warm or repeat == _MAX_REPEATS - 1:
                break
            self._engine.release(result.sequence)
        return result, seconds

    def _greedy(self, sequence: Sequence) -> Int32 | None:
        count = self._config.greedy_tokens
        if not count:
            return None
        return self._engine.generate(sequence, max_tokens=count, stop=()).tokens

    def _layers(self, case: Case, sequence: Sequence, reference: Reference) -> Any:
        """Errors of K (un-rotated), V behind the first seam, and of the attention outputs."""
        if reference.state is None or reference.attention is None:
            return None
        attention = self._engine.attention_outputs(sequence, case.continuation)
        state = self._engine.read_kv(sequence)
        exact = reference.state
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
        return {
            "keys": keys,
            "values": values,
            "attention": layer_divergence(reference.attention, attention).to_dict(),
        }


def failure(case: Case, policy: str, error: Exception) -> Record:
    """The record of a measurement that failed."""
    text = " ".join(str(error).split()) or "no message"
    return {
        "status": "failed",
        **_describe(case, policy),
        "error": f"{type(error).__name__}: {text}",
    }


def _describe(case: Case, policy: str) -> Record:
    return {
        "case": case.id,
        "policy": policy,
        "edit": case.edit,
        "position": case.position,
        "size": case.size,
        "context": case.context,
        "document": case.document,
        "old_tokens": len(case.old),
        "new_tokens": len(case.new),
    }


def _compare(case: Case, reference: Reference, logits: Float32) -> Record:
    found = divergence(reference.logits, logits, case.continuation)
    last = int(case.distances(np.array([len(case.new)], np.int32))[0])
    return {
        "divergence": found.to_dict(),
        "kl_tokens": [float(f"{x:.6g}") for x in found.kl_tokens],
        "distance": last if last >= 0 else None,  # of the first continuation token, from the seam
    }


def _greedy_match(exact: Int32 | None, approx: Int32 | None) -> Any:
    """Greedy text against that of exact: same throughout, or where it first differs."""
    if exact is None or approx is None:
        return None
    shared = min(len(exact), len(approx))
    differ = np.flatnonzero(exact[:shared] != approx[:shared])
    first = int(differ[0]) if len(differ) else None
    return {
        "identical": first is None and len(exact) == len(approx),
        "first_divergence": first,
        "tokens": len(exact),
    }
