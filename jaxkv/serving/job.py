"""A request in the loop: what it has so far, and the order among requests. Host only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from jaxkv.cache.sequence import Sequence
from jaxkv.serving.request import FinishReason, Request, RequestMetrics, RequestResult
from jaxkv.typing import Int32


@dataclasses.dataclass(eq=False)
class Job:
    """One request's state.

    Each change of state is one assignment (`arrived`, `sequence`, `result`), and `tokens` change before
    `sequence`: an interrupt between any two of them leaves a state that the next round goes on from.
    """

    request: Request
    tokens: Int32  # i32[n], the prompt and what was generated
    arrived: bool = False
    sequence: Sequence | None = None  # KV of the leading tokens
    result: RequestResult | None = None
    cold: bool = False  # admitted without the prefix index: with it, it would not fit
    passed: int = 0  # later arrivals of equal priority that were admitted first
    preemptions: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    admitted: float = math.nan
    prefilled: float = math.nan
    first_token: float = math.nan

    @property
    def kv_length(self) -> int:
        """Leading tokens that have KV."""
        return 0 if self.sequence is None else len(self.sequence)

    @property
    def prefilling(self) -> bool:
        """Whether it is running and some of its tokens have no KV yet."""
        return self.sequence is not None and self.kv_length < len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens that it has in the end, at most."""
        return len(self.request.tokens) + self.request.max_tokens

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.total - len(self.tokens)

    @property
    def generated(self) -> Int32:
        """i32[g], tokens generated so far."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller goes first, and is preempted last: priority, then arrival."""
        return -self.request.priority, self.request.arrival, self.request.id

    def end(self, reason: FinishReason, now: float, text: str | None) -> RequestResult:
        """The result of a request that ends now."""
        tokens = self.generated.copy()
        tokens.flags.writeable = False
        return RequestResult(
            request=self.request,
            tokens=tokens,
            text=text,
            finish_reason=reason,
            metrics=RequestMetrics(
                arrival=self.request.arrival,
                admitted=self.admitted,
                first_token=self.first_token,
                finished=now,
                prompt_tokens=len(self.request.tokens),
                generated_tokens=len(tokens),
                hit_tokens=self.hit_tokens,
                computed_tokens=self.computed_tokens,
                preemptions=self.preemptions,
                prefill_seconds=self.prefilled - self.admitted,
            ),
        )


def common_prefix(a: Int32, b: Int32) -> int:
    """Leading tokens that two i32[...] arrays share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def worth_waiting_for(job: Job, leaders: Iterable[Job], cached: int, unit: int) -> bool:
    """Whether a request of its domain computes, right now, a longer prefix of `job` than is cached.

    Args:
      job: a waiting request.
      leaders: requests in prefill.
      cached: leading tokens of `job` that are cached.
      unit: tokens that the wait must save; prefixes end on multiples of it.
    """
    for leader in leaders:
        if leader.request.domain != job.request.domain or leader.cold:
            continue
        shared = common_prefix(job.tokens, leader.tokens) // unit * unit
        if shared >= cached + unit and leader.kv_length < shared:
            return True
    return False


def in_order(jobs: Iterable[Job], cached: dict[Job, int], patience: int) -> list[Job]:
    """Waiting requests as they are to be admitted.

    By priority; then whoever was overtaken `patience` times, by arrival; then whoever has most tokens
    cached, because they save most while they still are; then by arrival.
    """

    def key(job: Job) -> tuple[int, bool, int, tuple[int, float, int]]:
        overdue = job.passed >= patience
        return -job.request.priority, not overdue, 0 if overdue else -cached[job], job.rank

    return sorted(jobs, key=key)


def part_end(start: int, end: int, budget: int, unit: int) -> int:
    """Where the next part of a prompt ends: all that is left, or whole units within the budget.

    Whole units keep pages full, so that no sibling goes on in them, and chunks on their grid.
    """
    if end - start <= budget:
        return end
    return start + budget // unit * unit


def grown(tokens: Int32, new: Int32) -> Int32:
    """`tokens` with `new` behind them."""
    return np.concatenate([tokens, new])
