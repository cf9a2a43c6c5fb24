"""Data parallelism: several engines, each on devices of its own with a pool of its own.

A sequence's pages lie in one pool, so it lives on one replica, and what it asks for is computed there.
Engines know nothing of each other: page tables and all bookkeeping stay those of one engine, and replicas run
at the same time, each in a thread that waits for its own devices. (One engine whose batch rows lie on
different replicas would run them in lockstep: a prefill, which has one row, would keep all of them busy for
one.)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jax.sharding import Mesh

from jaxkv.cache.domain import Domain
from jaxkv.cache.sequence import Sequence as TokenSequence
from jaxkv.checks import check_tokens
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError, HandleError
from jaxkv.generation import Sampling
from jaxkv.io.models import Model
from jaxkv.parallel import as_mesh, split_replicas
from jaxkv.results import Generation, StepResult
from jaxkv.reuse.policies import Policy
from jaxkv.serving.request import Request, RequestResult, Round
from jaxkv.serving.routing import check_route, choose, common_prefix
from jaxkv.stats import Stats

T = TypeVar("T")


class Replicas:
    """One engine for each index of the mesh axis "data". A prompt goes where most of it is cached.

    What concerns a sequence is asked of its own engine: `replicas.of(sequence).score(sequence, text)`.

    Args:
      model: from `jaxkv.load`; every replica gets its weights, sharded over the axis "model".
      mesh: a `jax.sharding.Mesh`, or a text as in "data:2,model:4". Its devices must be this process's own.
      route: how prompts are routed, one of `jaxkv.serving.routing.ROUTES`.
      options: of each `Engine`; pool sizes are those of one replica.

    Raises:
      ConfigError: a bad mesh, route or option.
    """

    def __init__(
        self, model: Model, *, mesh: Mesh | str, route: str = "longest_match", **options: Any
    ) -> None:
        found = as_mesh(mesh)
        if found is None:
            raise ConfigError("mesh is None, expected a text as in 'data:2,model:4'")
        if found.is_multi_process:
            raise ConfigError(
                "mesh has devices of several processes, expected this process's own: give each process "
                "replicas of its own, or spread one engine over all with Engine(mesh=...)"
            )
        self._route = check_route(route)
        self.engines = tuple(Engine(model, mesh=part, **options) for part in split_replicas(found))
        self._routed = itertools.count()
        self._queued: tuple[list[Request], ...] = tuple([] for _ in self.engines)

    def __len__(self) -> int:
        return len(self.engines)

    # ---- where things go -------------------------------------------------------------------------

    def of(self, sequence: TokenSequence) -> Engine:
        """The engine that a sequence lives on.

        Raises:
          HandleError: it was released or is no replica's.
        """
        return self.engines[self._home(sequence)]

    def _home(self, sequence: TokenSequence) -> int:
        for index, engine in enumerate(self.engines):
            if engine.holds(sequence):
                return index
        raise HandleError("sequence was released or is no replica's, expected a live one")

    def route(self, tokens: Any, domain: str | Domain = "default") -> int:
        """The replica that a prompt would go to now: counts as one routed request."""
        tokens = check_tokens(tokens, self.engines[0].config)
        matched = [engine.cached(tokens, domain) for engine in self.engines]
        work = [sum(len(r.tokens) + r.max_tokens for r in queue) for queue in self._queued]
        for index, queue in enumerate(self._queued):  # what will be cached by the time that it is computed
            ahead = (common_prefix(r.tokens, tokens) for r in queue if r.domain == domain)
            matched[index] = max([matched[index], *ahead])
        if not any(work):  # nothing waits: the emptier pool
            work = [int(engine.stats()["pages_live"]) for engine in self.engines]
        return choose(self._route, matched, work, len(tokens), number=next(self._routed))

    # ---- one sequence ------------------------------------------------------------------------------

    def prefill(self, tokens: Any, *, domain: str | Domain = "default", **options: Any) -> StepResult:
        """`Engine.prefill` on the replica that the prompt is routed to."""
        return self.engines[self.route(tokens, domain)].prefill(tokens, domain=domain, **options)

    def extend(self, sequence: TokenSequence, tokens: Any) -> StepResult:
        """`Engine.extend`, where the sequence lives."""
        return self.of(sequence).extend(sequence, tokens)

    def edit(self, sequence: TokenSequence, new_tokens: Any, policy: Policy) -> StepResult:
        """`Engine.edit`, where the sequence lives."""
        return self.of(sequence).edit(sequence, new_tokens, policy)

    def generate(self, sequence: TokenSequence, **options: Any) -> Generation:
        """`Engine.generate`, where the sequence lives."""
        return self.of(sequence).generate(sequence, **options)

    def release(self, sequence: TokenSequence) -> None:
        """`Engine.release`, where the sequence lives."""
        self.of(sequence).release(sequence)

    # ---- many at once --------------------------------------------------------------------------------

    def generate_batch(
        self,
        sequences: Sequence[TokenSequence],
        *,
        max_tokens: int,
        sampling: Sampling | list[Sampling] | None = None,
    ) -> list[Generation]:
        """`Engine.generate_batch`: each replica decodes its own rows, all replicas at the same time."""
        if not sequences:
            raise ConfigError("sequences are empty, expected at least one")
        rows: tuple[list[int], ...] = tuple([] for _ in self.engines)
        for number, sequence in enumerate(sequences):
            rows[self._home(sequence)].append(number)
        if isinstance(sampling, list) and len(sampling) != len(sequences):
            raise ConfigError(
                f"sampling has {len(sampling)} rows, expected one for each of {len(sequences)} sequences"
            )

        def part(index: int) -> list[Generation]:
            mine = rows[index]
            own = [sampling[i] for i in mine] if isinstance(sampling, list) else sampling
            return self.engines[index].generate_batch(
                [sequences[i] for i in mine], max_tokens=max_tokens, sampling=own
            )

        busy = [index for index, mine in enumerate(rows) if mine]
        done: dict[int, Generation] = {}
        for index, generations in zip(busy, self._at_once(part, busy), strict=True):
            done |= dict(zip(rows[index], generations, strict=True))
        return [done[number] for number in range(len(sequences))]

    def submit(
        self, tokens: Any, *, max_tokens: int, domain: str | Domain = "default", **options: Any
    ) -> Request:
        """`Engine.submit` on the replica that the prompt is routed to, which is decided now."""
        index = self.route(tokens, domain)
        request = self.engines[index].submit(tokens, max_tokens=max_tokens, domain=domain, **options)
        self._queued[index].append(request)
        return request

    def run(self) -> list[RequestResult]:
        """`Engine.run` of all replicas at the same time; results in the order in which requests ended."""
        everyone = range(len(self.engines))
        try:
            results = self._at_once(lambda index: self.engines[index].run(), everyone)
        finally:
            for queue in self._queued:
                queue.clear()
        return sorted(itertools.chain(*results), key=lambda result: result.metrics.finished)

    def step(self) -> Round:
        """`Engine.step` of all replicas at the same time, as one round."""
        rounds = self._at_once(lambda index: self.engines[index].step(), range(len(self.engines)))
        ended = {result.request for done in rounds for result in done.finished}
        for queue in self._queued:
            queue[:] = [request for request in queue if request not in ended]
        joined: dict[str, Any] = {"tokens": dict(itertools.chain(*(r.tokens.items() for r in rounds)))}
        for field in dataclasses.fields(Round):
            if field.name != "tokens":
                values = [getattr(done, field.name) for done in rounds]
                whole = isinstance(values[0], int)
                joined[field.name] = sum(values) if whole else tuple(itertools.chain(*values))
        return Round(**joined)

    def cancel(self, request: Request) -> RequestResult:
        """`Engine.cancel` where the request was routed to."""
        for engine, queue in zip(self.engines, self._queued, strict=True):
            if request in queue:
                queue.remove(request)
                return engine.cancel(request)
        return self.engines[0].cancel(request)  # which says what is wrong with it

    def warm_up(self, **options: Any) -> int:
        """`Engine.warm_up` of all replicas at the same time; the programs of all of them."""
        return sum(
            self._at_once(lambda index: self.engines[index].warm_up(**options), range(len(self.engines)))
        )

    def stats(self) -> Stats:
        """Counters of all replicas: their sums, and means of what is a mean or a share."""
        every = [engine.stats() for engine in self.engines]
        means = {name for name, value in every[0].items() if isinstance(value, float)} | {"page_bytes"}
        totals = {name: sum(stats[name] for stats in every) for name in every[0]}
        return {name: total / len(every) if name in means else total for name, total in totals.items()}

    def check(self) -> None:
        """`Engine.check` of all replicas."""
        for engine in self.engines:
            engine.check()

    def _at_once(self, part: Callable[[int], T], indices: Sequence[int]) -> list[T]:
        if len(indices) == 1:
            return [part(indices[0])]
        with ThreadPoolExecutor(len(indices), "replica") as threads:
            return list(threads.map(part, indices))
