"""One case, measured: the exact reference, the noise floor, and each policy against them."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.figures import (
    Reference,
    compare,
    describe,
    greedy_match,
    homes,
    key_change,
    state_errors,
    task_figures,
)
from experiments.records import NOISE, Record
from experiments.subject import mesh_of
from jaxkv.cache.dtypes import kv_token_bytes
from jaxkv.cache.sequence import Sequence
from jaxkv.divergence import divergence
from jaxkv.engine import Engine
from jaxkv.errors import JaxkvError
from jaxkv.io.models import Model
from jaxkv.results import StepResult
from jaxkv.reuse.diff import Span
from jaxkv.reuse.policies import SCR, Policy, policy_from_name
from jaxkv.typing import Float32, Int32

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig
    from experiments.workloads.case import Case

_MAX_REPEATS = 3
_QUICK_SECONDS = 2.0


class Bench:
    """Measures cases on one model.

    The engine has no prefix index: what one measurement computed can't be found by another, so every
    policy pays for itself. A model with recurrent layers needs one, because snapshots are kept there; then
    a policy may resume at a snapshot that one before it left, a little deeper than its own.
    """

    def __init__(self, model: Model, config: ExperimentConfig, longest: int) -> None:
        """`longest`: most tokens, continuation included, that a case holds at once."""
        # Sequences that may stand at once: the cached text, the exact answer and its displaced copy, an
        # edit whose copies take as much again, and what a probe computes for a while.
        pages = 6 * (math.ceil(longest / config.page_size) + 2)
        self._model, self._config, self._pages = model, config, config.num_pages or pages
        self._engines: dict[str, Engine] = {}
        self._wide: Engine | None = None  # float32 pages for one sequence, to judge the other dtypes by
        self._wide_pages = config.num_pages or math.ceil(longest / config.page_size) + 2
        self._old: tuple[str, Int32, Sequence] | None = None
        self._exact: Sequence | None = None  # the answer of the case at hand
        self._rotation: dict[tuple[str, tuple[Span, ...]], float] = {}

    def _engine(self, case: Case) -> Engine:
        """The engine of a case's dtype. Only one holds pages at a time."""
        if case.kv_dtype not in self._engines:
            self._forget_old()
            self._exact = None
            self._engines = {
                case.kv_dtype: Engine(
                    self._model,
                    num_pages=self._pages,
                    page_size=self._config.page_size,
                    chunk_size=self._config.chunk_size,
                    kv_dtype=case.kv_dtype or None,
                    prefix_cache=self._model.config.recurrent is not None,
                    keep_operators=any("states=compose" in name for name in self._config.policies),
                    mesh=mesh_of(self._config.mesh, replicas=False),
                    implementation=self._config.implementation,
                    interpret=self._config.interpret,
                )
            }
        return self._engines[case.kv_dtype]

    def reference(self, case: Case, *, layers: bool, rotation: bool = False) -> Reference:
        """The exact answers to `case`, computed afresh."""
        engine = self._engine(case)
        self._exact = None
        self._rotation.clear()
        logits, sequence = _exact_answers(engine, case)
        self._exact, text = sequence, case.continuation
        bare = None
        if case.task is not None and case.task.kind == "recall":
            asked = engine.prefill(text[:-1], reuse=False)
            bare = np.asarray(asked.logits)
            engine.release(asked.sequence)
        return Reference(
            logits=logits,
            wide=self._float32(case),
            state=engine.read_kv(sequence) if layers else None,
            attention=engine.attention_outputs(sequence, text) if layers else None,
            greedy=self._greedy(engine, sequence),
            bare=bare,
            rotation=rotation,
        )

    def _float32(self, case: Case) -> tuple[Float32, ...] | None:
        """The exact answers over float32 pages, where a case chooses others."""
        if case.kv_dtype in ("", "float32"):
            return None
        if self._wide is None:
            self._wide = Engine(
                self._model,
                num_pages=self._wide_pages,
                page_size=self._config.page_size,
                chunk_size=self._config.chunk_size,
                kv_dtype="float32",
                prefix_cache=False,
            )
        logits, sequence = _exact_answers(self._wide, case)
        self._wide.release(sequence)
        return logits

    def noise(self, case: Case, reference: Reference) -> Record:
        """Exact against exact under another chunking: what rounding alone does.

        A few tokens are computed first, so every chunk behind them begins elsewhere. Of several turns
        only the last is measured.
        """
        engine = self._engine(case)
        split = min(self._config.noise_offset, len(case.new) - 1)
        first = engine.prefill(case.new[:split], reuse=False).sequence
        try:
            whole = engine.extend(first, case.new[split:]).sequence
        finally:
            engine.release(first)
        try:
            logits = np.asarray(engine.score(whole, case.continuation))
        finally:
            engine.release(whole)
        case = dataclasses.replace(case, before=())
        wide = None if reference.wide is None else reference.wide[-1:]
        reference = dataclasses.replace(reference, logits=reference.logits[-1:], wide=wide)
        return {"status": "ok", **describe(case, NOISE), **compare(case, reference, [logits])}

    def policy(self, case: Case, name: str, reference: Reference) -> Record:
        """Edits the cached text under one policy and compares the answer with the reference."""
        engine, policy = self._engine(case), policy_from_name(name)
        logits: list[Float32] = []
        turns: list[Record] = []
        try:
            source = engine.fork(self._cached(engine, case))
            born = engine.read_kv(source) if case.before else None
            home = np.arange(len(source), dtype=np.int32)
            for number, turn in enumerate(case.turns, 1):
                timed = not case.before or len(turn.continuation) > 0
                result, seconds = self._timed_edit(engine, source, turn.new, policy, timed=timed)
                entry = {**_turn_figures(result, seconds), "timed": timed}
                home = homes(home, result)
                if len(turn.continuation):
                    logits.append(np.asarray(engine.score(result.sequence, turn.continuation)))
                    found = divergence(reference.logits[len(logits) - 1], logits[-1], turn.continuation)
                    entry |= {"kl": found.kl.mean, "top1": found.top1_agreement}
                    if born is not None:
                        now = engine.read_kv(result.sequence)
                        entry["key_change"] = key_change(born, now, home)
                turns.append(entry)
                if number < len(case.turns):
                    engine.release(source)
                    source = result.sequence
            return {
                "status": "ok",
                **describe(case, name),
                "kind": result.reuse.kind,
                "kv_token_bytes": kv_token_bytes(engine.config, engine.contract.kv_dtype),
                **compare(case, reference, logits),
                **_totals(turns, result),
                "layers": self._layers(engine, case, result.sequence, reference),
                "greedy": greedy_match(reference.greedy, self._greedy(engine, result.sequence)),
                "task": task_figures(case.task, reference, logits[-1]),
                "twin_kl": self._twin(engine, case, policy, logits[-1]),
                "rotation_kl": self._rotation_kl(engine, case, policy, result, reference),
                "healing": self._healing(engine, case, result.sequence, reference),
                "signals": self._signals(engine, source, result),
                "steps": turns if case.before else None,
            }
        except JaxkvError:
            self._forget_old()
            raise

    def _forget_old(self) -> None:
        # Not released by hand: a step that failed may have released it with everything else, and
        # the engine takes back what nobody refers to.
        self._old = None

    def _cached(self, engine: Engine, case: Case) -> Sequence:
        """The exact KV of the old text; kept from case to case while that is the same."""
        old = self._old
        if old is None or old[0] != case.kv_dtype or not np.array_equal(old[1], case.old):
            self._forget_old()
            self._old = case.kv_dtype, case.old, engine.prefill(case.old).sequence
        assert self._old is not None
        return self._old[2]

    def _timed_edit(
        self, engine: Engine, sequence: Sequence, tokens: Int32, policy: Policy, *, timed: bool
    ) -> tuple[StepResult, float]:
        """Seconds from the request to logits on the host, compilation excluded if `timed`.

        An edit that met a new shape is timed again. So is one that copied KV, whose shapes are not
        counted, and every quick one, for which it costs little.
        """
        for repeat in range(_MAX_REPEATS):
            shapes = engine.stats()["shapes"]
            start = time.perf_counter()
            result = engine.edit(sequence, tokens, policy)
            np.asarray(result.logits)  # waits for the device
            seconds = time.perf_counter() - start
            compiled = engine.stats()["shapes"] != shapes
            again = seconds < _QUICK_SECONDS or result.reuse.ledger.kv_bytes_moved > 0
            warm = not timed or (not compiled and (repeat > 0 or not again))
            if warm or repeat == _MAX_REPEATS - 1:
                break
            engine.release(result.sequence)
        return result, seconds

    def _greedy(self, engine: Engine, sequence: Sequence) -> Int32 | None:
        count = self._config.greedy_tokens
        if not count:
            return None
        return engine.generate(sequence, max_tokens=count, stop=()).tokens

    def _layers(self, engine: Engine, case: Case, sequence: Sequence, reference: Reference) -> Any:
        """None where the sequence stands in for the requested one: its positions are others."""
        if reference.state is None or not np.array_equal(sequence.tokens, case.new):
            return None
        attention = engine.attention_outputs(sequence, case.continuation)
        return state_errors(case, reference, engine.read_kv(sequence), attention)

    def _twin(self, engine: Engine, case: Case, policy: Policy, logits: Float32) -> float | None:
        """KL at the answer between two pasts of the same text: 0 if nothing of the past is left."""
        if case.twin is None:
            return None
        source = engine.prefill(case.twin, reuse=False).sequence
        other = engine.edit(source, case.new, policy).sequence
        rows = np.asarray(engine.score(other, case.continuation))[-1:]
        return divergence(logits[-1:], rows).kl.mean

    def _rotation_kl(
        self, engine: Engine, case: Case, policy: Policy, result: StepResult, reference: Reference
    ) -> float | None:
        """KL of exact KV that was rotated as this policy's spans are: the part that is not staleness."""
        if not reference.rotation or case.before or self._exact is None:
            return None
        spans = tuple(span for span in result.reuse.spans if span.delta)
        if not spans or (isinstance(policy, SCR) and not policy.rotate):
            return None
        key = case.id, spans
        if key not in self._rotation:
            displaced = engine.displace(self._exact, spans)
            logits = np.asarray(engine.score(displaced, case.continuation))
            engine.release(displaced)
            self._rotation[key] = divergence(reference.logits[-1], logits).kl.mean
        return self._rotation[key]

    def _healing(
        self, engine: Engine, case: Case, sequence: Sequence, reference: Reference
    ) -> list[list[float]] | None:
        """(share of stale tokens healed, KL) while they are healed; where layer errors are measured."""
        steps, stale = self._config.heal_steps, len(sequence) - sequence.exact_length
        if not steps or reference.state is None or not stale:
            return None
        if not np.array_equal(sequence.tokens, case.new):
            return None
        points = []
        for step in range(steps + 1):
            logits = np.asarray(engine.score(sequence, case.continuation))
            points.append([step / steps, divergence(reference.logits[-1], logits).kl.mean])
            left = len(sequence) - sequence.exact_length
            if left:
                due = left - round(stale * (1 - (step + 1) / steps))
                sequence = engine.heal(sequence, tokens=max(due, 1)).sequence
        return points

    def _signals(self, engine: Engine, source: Sequence, result: StepResult) -> Any:
        if not self._config.signals or result.reuse.kind == "exact":
            return None
        if not result.reuse.relocated:
            return None  # nothing is kept that could be stale: controls, and corrections by message
        return dataclasses.asdict(engine.signals(source, result))


def _exact_answers(engine: Engine, case: Case) -> tuple[tuple[Float32, ...], Sequence]:
    """Logits f32[T, V] of each measured turn from a fresh prefill, and the last turn's sequence, held."""
    logits = []
    for turn in case.before:
        if len(turn.continuation):
            sequence = engine.prefill(turn.new, reuse=False).sequence
            logits.append(np.asarray(engine.score(sequence, turn.continuation)))
            engine.release(sequence)
    sequence = engine.prefill(case.new, reuse=False).sequence
    logits.append(np.asarray(engine.score(sequence, case.continuation)))
    return tuple(logits), sequence


def failure(case: Case, policy: str, error: Exception) -> Record:
    """The record of a measurement that failed."""
    text = " ".join(str(error).split()) or "no message"
    return {
        "status": "failed",
        **describe(case, policy),
        "error": f"{type(error).__name__}: {text}",
    }


def _turn_figures(result: StepResult, seconds: float) -> Record:
    reuse, ledger = result.reuse, result.reuse.ledger
    return {
        "prompt": reuse.prompt,
        "matched": reuse.matched,
        "relocated": reuse.relocated,
        "forwarded": reuse.forwarded,
        "dropped": reuse.dropped,
        "flops": float(ledger.flops),
        "flops_by_cause": dict(ledger.flops_by_cause),
        "kv_bytes_moved": ledger.kv_bytes_moved,
        "ms": 1e3 * seconds,
        "parts_ms": {part: 1e3 * float(value) for part, value in reuse.timings.items()},
        "deltas": len({run.delta for run in result.sequence.provenance} - {0}),
        "entries": len(result.sequence.table_segments),
        "materialized": result.sequence.copies is not None,
    }


def _totals(turns: list[Record], last: StepResult) -> Record:
    """Sums over turns, those of wall clock over turns that were timed; a case of one turn is its own sum."""
    counts = ("prompt", "matched", "relocated", "forwarded", "dropped")
    causes: dict[str, float] = {}
    parts: dict[str, float] = {}
    for turn in turns:
        for cause, flops in turn["flops_by_cause"].items():
            causes[cause] = causes.get(cause, 0.0) + flops
        for part, value in turn["parts_ms"].items() if turn["timed"] else ():
            parts[part] = parts.get(part, 0.0) + value
    ledger = last.reuse.ledger.to_dict()
    return {
        "chosen": last.reuse.policy,
        "reuse": {
            **{name: sum(t[name] for t in turns) for name in counts},
            "match_end": str(last.reuse.match_end),
            "seams": [int(seam) for seam in last.reuse.seams],
        },
        "flops": sum(t["flops"] for t in turns),
        "ledger": {**ledger, "flops_by_cause": causes, "flops": sum(causes.values())},
        "timings_ms": {"first_token": sum(t["ms"] for t in turns if t["timed"]), **parts},
    }
