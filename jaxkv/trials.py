"""Trials: executing a policy to see what its answer would be worth, and keeping the answer."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from jaxkv.cache.sequence import Sequence
from jaxkv.results import StepResult
from jaxkv.reuse.estimate import Estimate
from jaxkv.reuse.plan import ReusePlan
from jaxkv.reuse.policies import Policy
from jaxkv.typing import Int32


class Editor(Protocol):
    """What a trial needs of an engine."""

    def edit(self, sequence: Sequence, new_tokens: Any, policy: Policy) -> StepResult: ...

    def estimate(self, source: Sequence, result: StepResult) -> Estimate: ...

    def release(self, sequence: Sequence) -> None: ...


class Trials:
    """The trials of one edit. One at a time is held: a policy that was given up is released."""

    def __init__(self, engine: Editor, source: Sequence, tokens: Int32) -> None:
        self._engine, self._source, self._tokens = engine, source, tokens
        self._held: tuple[Policy, StepResult] | None = None
        self._spent = 0.0

    def run(self, policy: Policy) -> tuple[Estimate, float]:
        """Executes `policy` and predicts its KL; the FLOPs are counted where the answer goes."""
        self.drop()
        result = self._engine.edit(self._source, self._tokens, policy)
        self._held = policy, result
        estimate = self._engine.estimate(self._source, result)
        flops = result.reuse.ledger.flops + estimate.flops
        self._spent += flops
        return estimate, flops

    def take(self, work: ReusePlan) -> StepResult:
        """The result of the policy that `work` settles on, named after the policy that chose it."""
        if self._held is None or self._held[0] != work.trial:
            self.drop()
            assert work.trial is not None
            self._held = work.trial, self._engine.edit(self._source, self._tokens, work.trial)
            self._spent += self._held[1].reuse.ledger.flops
        result = self._held[1]
        self._held = None
        ledger = result.reuse.ledger
        flops = dict(ledger.flops_by_cause)
        if given_up := self._spent - ledger.flops:
            flops["probe"] = flops.get("probe", 0.0) + given_up
        reuse = dataclasses.replace(
            result.reuse,
            policy=f"{work.policy}: {result.reuse.policy}",
            ledger=dataclasses.replace(ledger, flops_by_cause=flops),
        )
        return dataclasses.replace(result, reuse=reuse)

    def drop(self) -> None:
        """Releases what is held."""
        if self._held is not None:
            self._engine.release(self._held[1].sequence)
            self._held = None
