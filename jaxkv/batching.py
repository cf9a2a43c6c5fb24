"""Continuous batching: the methods of `Engine` that give requests to the serving loop."""

from __future__ import annotations

import functools
from typing import Any

from jaxkv.cache.domain import Domain, as_domain
from jaxkv.checks import (
    check_count,
    check_length,
    check_tokens,
)
from jaxkv.continuing import Continuing
from jaxkv.core import interruptible
from jaxkv.generation import Sampling
from jaxkv.serving.request import Request, RequestResult, Round
from jaxkv.serving.worker import Worker


class Batching(Continuing):
    """The methods of `Engine` for many requests, see docs/serving.md."""

    def submit(
        self,
        tokens: Any,
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        domain: str | Domain = "default",
        priority: int = 0,
        arrival: float | None = None,
    ) -> Request:
        """Gives a prompt to the serving loop; `step` and `run` work on it.

        Args:
          tokens: token ids, n >= 1.
          max_tokens: tokens to generate at most.
          sampling: greedy with the model's end tokens when None.
          domain: isolation domain, as in `prefill`.
          priority: higher goes first, and may take the pages of a lower one.
          arrival: seconds on the loop's clock at which the request arrives; now when None.

        Raises:
          TokenError: as in `prefill`.
          CapacityError: prompt and generation exceed the model's positions or the whole pool, or
            `max_waiting` requests wait already.
          ConfigError: another argument is out of range.
        """
        tokens = check_tokens(tokens, self.config)
        check_length(len(tokens) + check_count("max_tokens", max_tokens), self.config)
        sampling = Sampling(stop=self.end_tokens) if sampling is None else sampling
        as_domain(domain)  # or a ConfigError, here and not in some later step
        return self._loop.submit(
            tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            domain=domain,
            priority=priority,
            arrival=arrival,
        )

    @interruptible
    def step(self) -> Round:
        """One scheduling round: admits, computes parts of prompts, decodes a batch, ends requests."""
        return self._loop.round(self._worker())

    @interruptible
    def run(self) -> list[RequestResult]:
        """Rounds until every request has ended, those that arrive later included.

        Returns:
          Results in the order in which requests ended, cancelled ones included.
        Raises:
          CapacityError: a request can't get its pages because others than the loop hold them.
        """
        return self._loop.run(self._worker())

    @interruptible
    def cancel(self, request: Request) -> RequestResult:
        """Ends a request with what it has and gives back its own pages, nobody else's.

        Raises:
          HandleError: it has ended, or is not this engine's.
        """
        return self._loop.cancel(request, self._worker())

    def _worker(self) -> Worker:
        return Worker(
            memory=self._memory,
            contract=lambda domain: self._contract.within(as_domain(domain)),
            grid=self._grid,
            reuse=self._prefix_cache,
            prefill=self.prefill,
            extend=self.extend,
            decode=functools.partial(self._decode, publish=False),
            publish=self._publish,
            release=self.release,
            text=self._text,
        )
