"""The policy that is given an error instead of a method."""

from __future__ import annotations

import dataclasses
import math

from jaxkv.errors import ConfigError
from jaxkv.reuse.policies.base import MIN_SPAN, Edit, Policy, Selection
from jaxkv.reuse.policies.dependents import Dependents
from jaxkv.reuse.policies.first_k import FirstK
from jaxkv.reuse.policies.scr import SCR
from jaxkv.reuse.policies.sinks import Sinks
from jaxkv.reuse.probes import Trial

LADDER: tuple[Policy, ...] = (
    SCR(),
    SCR() | Sinks(4) | FirstK(32),
    SCR() | Sinks(4) | Dependents(64, 64),
)


@dataclasses.dataclass(frozen=True)
class Budget:
    """Climb the ladder until the predicted KL is under `eps` nats per token; else be exact.

    Each rung is executed, cheapest first, and its KL predicted from what that showed
    (`jaxkv.reuse.estimate`). What is compared with `eps` is the upper bound that held for 95% of the
    edits it was calibrated on, not the expected value. A rung that is given up is counted as `probe`.

    The prediction needs a calibration of the model; an engine whose weights have none refuses the
    policy with a ConfigError that names the command which makes one.
    """

    eps: float = 0.01
    ladder: tuple[Policy, ...] = LADDER
    min_span = MIN_SPAN

    def __post_init__(self) -> None:
        known = isinstance(self.eps, int | float) and not isinstance(self.eps, bool)
        if not known or not 0 < self.eps < math.inf:
            raise ConfigError(f"eps is {self.eps!r}, expected a positive number of nats per token")
        if not self.ladder or any(isinstance(p, Budget) or not isinstance(p, Policy) for p in self.ladder):
            raise ConfigError(f"ladder is {self.ladder!r}, expected a tuple of policies, no budget in it")

    @property
    def exact(self) -> bool:
        return False

    def select(self, edit: Edit) -> Selection:
        if not edit.survivors:
            return Selection(exact=True)  # nothing to keep but the prefix
        for rung in self.ladder:
            trial = Trial(rung)
            if trial not in edit.evidence:
                return Selection(ask=trial)
            if edit.evidence[trial].bound <= self.eps:
                return Selection(take=rung)
        return Selection(exact=True)

    def __str__(self) -> str:
        name = f"budget({self.eps})"
        return name if self.ladder == LADDER else name + "[" + ";".join(str(p) for p in self.ladder) + "]"
