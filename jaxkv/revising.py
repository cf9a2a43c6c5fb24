"""What an engine does about approximate sequences: heal them, and say how wrong they may be."""

from __future__ import annotations

import dataclasses
import time

from jaxkv.cache.match import Cause, MatchEnd
from jaxkv.cache.sequence import (
    Sequence,
)
from jaxkv.carry import resume_heal
from jaxkv.checks import (
    check_count,
)
from jaxkv.core import EngineCore, interruptible
from jaxkv.healing import displace, heal
from jaxkv.recurrent import refuse
from jaxkv.results import StepResult, report
from jaxkv.reuse.diff import Span
from jaxkv.reuse.estimate import Calibration, Estimate, Signals, load_calibration
from jaxkv.reuse.plan import plan_heal
from jaxkv.signals import read_signals
from jaxkv.windows import resumer


class Revising(EngineCore):
    """The methods of `Engine` for sequences that are approximate."""

    @interruptible
    def heal(self, sequence: Sequence, *, tokens: int) -> StepResult:
        """Recomputes the next `tokens` stale positions of `sequence`, which stays as it was.

        From left to right, so that what is healed is exact: it enters the prefix index, and once nothing
        is stale the result is an exact sequence, equal to a fresh prefill to rounding, and bit for bit with
        `reuse_granularity="chunk"`, where whole chunks are healed. For idle time between requests.
        With recurrent layers it goes on from the nearest snapshot and leaves one behind what it healed;
        what the sequence answers changes once its last token is healed, not before.

        Raises:
          ConfigError: `tokens` is not a whole number of at least 1.
          HandleError, CapacityError: as in `edit`.
        """
        started = time.perf_counter()
        self._require_live(sequence)
        count = check_count("tokens", tokens)
        work = plan_heal(sequence, count, grid=self._grid, resume=resumer(self._memory, sequence))
        memory = self._memory
        work, resume = resume_heal(memory, sequence, work)
        try:
            done = heal(
                memory,
                self._params,
                sequence,
                work,
                grid=self._grid,
                max_deltas=self.max_deltas,
                chunk_size=self.chunk_size,
                resume=resume,
            )
        finally:
            memory.release_states([] if resume is None else resume.held)
        try:
            place = memory.places.get(sequence.id)
            made = memory.adopt(lambda id: dataclasses.replace(sequence, id=id, **done.changes), place)
            self._publish(made, done.states)
        finally:
            memory.release(done.fresh)
            memory.release_states(slot for _, slot in done.states)
        self._shapes |= done.shapes
        self._counters["forwarded"] += len(work.forward)
        reuse = report(
            work,
            made,
            MatchEnd(Cause.COMPLETE, work.prefix),
            config=self.config,
            page_size=memory.pool.page_size,
            moved=0,
            timings={"forward": time.perf_counter() - started},
            refreshed=not made.exact and memory.states is None,
        )
        return StepResult(sequence=made, logits=done.changes["logits"], reuse=reuse)

    def signals(self, source: Sequence, result: StepResult) -> Signals:
        """What `result`, an edit of `source` under an approximate policy, shows of its own error."""
        for sequence in (source, result.sequence):
            self._require_live(sequence)
        refuse(self.config, "an error estimate", "the divergence itself, measured against Exact()")
        return read_signals(self._memory, self._params, source, result)[0]

    def estimate(
        self, source: Sequence, result: StepResult, calibration: Calibration | None = None
    ) -> Estimate:
        """Predicts the KL of `result`, an edit of `source`, before anybody reads it.

        Args:
          source, result: what was edited, and what `edit` returned.
          calibration: of these weights; the one that came with jaxkv when None.

        Raises:
          ConfigError: no calibration is known for these weights.
          HandleError: one of the two was released.
        """
        if result.reuse.kind == "exact":
            return Estimate(kl=0.0, bound=0.0)
        refuse(self.config, "an error estimate", "the divergence itself, measured against Exact()")
        found = calibration or load_calibration(self._contract.weights_digest)
        for sequence in (source, result.sequence):
            self._require_live(sequence)
        signals, flops = read_signals(self._memory, self._params, source, result)
        return dataclasses.replace(found.estimate(signals), flops=flops)

    @interruptible
    def displace(self, sequence: Sequence, spans: tuple[Span, ...]) -> Sequence:
        """A control: `sequence`, exact, with spans rotated away and back as a relocation would.

        Its content is exact, so its divergence from `sequence` is what rotation alone costs.
        """
        self._require_live(sequence)
        changes, fresh = displace(self._memory, sequence, spans)
        try:
            return self._memory.adopt(lambda id: dataclasses.replace(sequence, id=id, **changes))
        finally:
            self._memory.release(fresh)
