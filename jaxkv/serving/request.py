"""What goes into the serving loop and what comes out of it, as values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxkv.cache.domain import Domain
from jaxkv.checks import check_count
from jaxkv.errors import ConfigError, nearest
from jaxkv.generation import LOOP_STEPS, Sampling
from jaxkv.serving.clock import Clock, WallClock
from jaxkv.typing import Int32

ADMISSIONS = ("preempt", "reserve")
ORDERS = ("prefix", "arrival")
FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Limits of the serving loop, and its clock.

    Raises:
      ConfigError: a value is out of range.
    """

    max_running: int = 8  # requests that hold KV at once, and so the rows of a decode batch
    prefill_budget: int = 0  # prompt tokens computed in a round, between decodes; 0: the chunk size
    decode_steps: int = 8  # tokens that each row gets in a round, at most
    admission: str = "preempt"  # "reserve": only what fits with all of its generation
    order: str = "prefix"  # "arrival": first come, first served, whatever is cached
    patience: int = 8  # times that later arrivals of equal priority may overtake a request
    max_waiting: int = 4096  # requests submitted and not yet running
    clock: Clock = dataclasses.field(default_factory=WallClock)

    def __post_init__(self) -> None:
        for name in ("max_running", "decode_steps", "max_waiting"):
            check_count(name, getattr(self, name))
        for name in ("prefill_budget", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is {value!r}, expected a whole number of at least 0")
        if self.decode_steps > LOOP_STEPS:
            raise ConfigError(f"decode_steps is {self.decode_steps}, expected at most {LOOP_STEPS}")
        for name, known in (("admission", ADMISSIONS), ("order", ORDERS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"{name} is {value!r}, expected one of {', '.join(known)}{nearest(str(value), known)}"
                )
        if not isinstance(self.clock, Clock):
            raise ConfigError(
                f"clock is a {type(self.clock).__name__}, expected one with now() and wait_until()"
            )

    def budget(self, *, page_size: int, chunk_size: int, grid: int) -> int:
        """Prompt tokens of a round on this engine.

        Raises:
          ConfigError: too few for one whole part of a prompt.
        """
        least, name = (chunk_size, "chunk_size") if grid > 1 else (page_size, "page_size")
        if 0 < self.prefill_budget < least:
            raise ConfigError(
                f"prefill_budget is {self.prefill_budget}, expected at least {name} {least}, "
                "the smallest part of a prompt that is computed at once"
            )
        return self.prefill_budget or chunk_size


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A submitted request: the handle that `Engine.cancel` takes and that rounds and results name."""

    id: int
    tokens: Int32  # i32[n], the prompt
    max_tokens: int
    sampling: Sampling
    domain: str | Domain
    priority: int  # higher goes first
    arrival: float  # seconds on the loop's clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """How a request fared. Times in seconds on the loop's clock; nan for what did not happen."""

    arrival: float
    admitted: float  # first time that it got pages
    first_token: float  # end of the round that gave its first token
    finished: float
    prompt_tokens: int
    generated_tokens: int
    hit_tokens: int  # prompt tokens found in the prefix index when it was first admitted
    computed_tokens: int  # tokens prefilled, those computed again after a preemption included
    preemptions: int
    prefill_seconds: float  # from admission until the prompt was computed, first time

    @property
    def queue_seconds(self) -> float:
        """From arrival until it first got pages."""
        return self.admitted - self.arrival

    @property
    def ttft(self) -> float:
        """Time to first token: from arrival to the end of the round that gave it."""
        return self.first_token - self.arrival

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time from the end of its prefill to its end; nan without any."""
        seconds = self.finished - self.admitted - self.prefill_seconds
        return self.generated_tokens / seconds if self.generated_tokens and seconds > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, derived figures included; nan becomes None."""
        derived = ("queue_seconds", "ttft", "tokens_per_second")
        values = {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RequestResult:
    """A request that ended. What it held is released; what was exact stays in the prefix index."""

    request: Request
    tokens: Int32  # i32[n], generated, without the stop token
    text: str | None  # None when the model has no tokenizer
    finish_reason: FinishReason
    metrics: RequestMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What one scheduling round did."""

    tokens: Mapping[Request, Int32]  # new tokens of each request that got any, in order of rank
    finished: tuple[RequestResult, ...]  # cancelled ones since the last round included
    admitted: tuple[Request, ...]
    preempted: tuple[Request, ...]
    prefilled: int  # prompt tokens computed
    decoded: int  # tokens generated
    waiting: int  # requests that have arrived and hold nothing
    running: int  # requests that hold KV
    pending: int  # requests that have not arrived yet

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, now or later."""
        return not (self.waiting or self.running or self.pending)

    @property
    def progressed(self) -> bool:
        """Whether anything was computed or ended."""
        return bool(self.prefilled or self.decoded or self.finished)
