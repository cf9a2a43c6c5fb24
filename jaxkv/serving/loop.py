"""The serving loop: rounds of chunked prefill and batched decode over an engine's pages.

Part of the engine, in a file of its own, like `memory.py`. A round admits what fits, computes at most
`prefill_budget` prompt tokens, then gives every row up to `decode_steps` tokens. When pages run out the
request of lowest rank gives up its own and is computed again later. docs/serving.md follows a request.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from jaxkv.cache.domain import Domain
from jaxkv.cache.sequence import Sequence
from jaxkv.errors import CapacityError, ConfigError, HandleError
from jaxkv.generation import Sampling
from jaxkv.results import Generation, StepResult
from jaxkv.serving.job import Job, grown, in_order, part_end, worth_waiting_for
from jaxkv.serving.request import FinishReason, Request, RequestResult, Round, ServingConfig
from jaxkv.serving.worker import Worker
from jaxkv.typing import Int32

LOOKAHEAD = 64  # waiting requests that are looked at in a round: bounds the cost of ordering them
_ids = itertools.count(1)


@dataclasses.dataclass
class _Draft:
    """A round in the making."""

    tokens: dict[Request, Int32] = dataclasses.field(default_factory=dict)
    admitted: list[Request] = dataclasses.field(default_factory=list)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    prefilled: int = 0


class Loop:
    """Requests of one engine. Only `Engine` holds one."""

    def __init__(
        self, config: ServingConfig, *, num_pages: int, page_size: int, chunk: int, grid: int
    ) -> None:
        self.config = config
        self.num_pages = num_pages
        self.page_size = page_size
        self.unit = chunk if grid > 1 else page_size
        self.budget = config.budget(page_size=page_size, chunk_size=chunk, grid=grid)
        self.jobs: list[Job] = []  # in order of submission; ended ones until a round has told of them
        self.preemptions = 0
        self._kept: list[RequestResult] = []  # told by a round of a `run` that was broken off

    @property
    def pending(self) -> list[Job]:
        """Requests that have not arrived."""
        return [job for job in self.jobs if not job.arrived and job.result is None]

    @property
    def waiting(self) -> list[Job]:
        """Requests that have arrived and hold nothing."""
        return [j for j in self.jobs if j.arrived and j.sequence is None and j.result is None]

    @property
    def running(self) -> list[Job]:
        """Requests that hold KV."""
        return [job for job in self.jobs if job.sequence is not None and job.result is None]

    # ---- requests in and out -------------------------------------------------------------------

    def submit(
        self,
        tokens: Int32,
        *,
        max_tokens: int,
        sampling: Sampling,
        domain: str | Domain,
        priority: Any,
        arrival: Any,
    ) -> Request:
        """Takes a checked prompt; see `Engine.submit`."""
        if not isinstance(sampling, Sampling):
            raise ConfigError(f"sampling is a {type(sampling).__name__}, expected jaxkv.Sampling")
        if isinstance(priority, bool) or not isinstance(priority, int | np.integer):
            raise ConfigError(f"priority is {priority!r}, expected a whole number")
        now = self.config.clock.now()
        when = now if arrival is None else arrival
        if isinstance(when, bool) or not isinstance(when, int | float | np.number) or not np.isfinite(when):
            raise ConfigError(f"arrival is {arrival!r}, expected seconds on the loop's clock")
        need = self._pages(len(tokens) + max_tokens)
        if need > self.num_pages:
            raise CapacityError(
                f"{len(tokens)} tokens and max_tokens {max_tokens} need {need} pages, "
                f"expected at most the pool's {self.num_pages}"
            )
        waiting = len(self.pending) + len(self.waiting)
        if waiting >= self.config.max_waiting:
            raise CapacityError(
                f"{waiting} requests are waiting, expected fewer than max_waiting {self.config.max_waiting}"
            )
        job = Job(
            Request(
                id=next(_ids),
                tokens=tokens,
                max_tokens=int(max_tokens),
                sampling=sampling,
                domain=domain,
                priority=int(priority),
                arrival=float(when),
            ),
            tokens,
            arrived=bool(when <= now),
        )
        self.jobs.append(job)
        return job.request

    def cancel(self, request: Request, worker: Worker) -> RequestResult:
        """Ends a request; see `Engine.cancel`."""
        if not isinstance(request, Request):
            raise HandleError(f"request is a {type(request).__name__}, expected what submit returned")
        for job in self.jobs:
            if job.request is request and job.result is None:
                return self._end(job, "cancelled", self.config.clock.now(), worker)
        raise HandleError(f"request {request.id} has ended or is another engine's, expected one in the loop")

    # ---- rounds ----------------------------------------------------------------------------------

    def run(self, worker: Worker) -> list[RequestResult]:
        """Rounds until nothing is left; see `Engine.run`."""
        while True:
            done = self.round(worker)
            self._kept += done.finished
            if done.idle:
                results, self._kept = self._kept, []
                return results
            if done.progressed or done.preempted:
                continue
            if not self.pending:
                raise self._stuck(worker)
            self.config.clock.wait_until(min(job.request.arrival for job in self.pending))

    def round(self, worker: Worker) -> Round:
        """One round; see `Engine.step`."""
        draft = _Draft()
        self._recover(worker, draft)
        self._arrive()
        self._prefill(worker, draft)
        self._decode(worker, draft)
        ended = [job.result for job in self.jobs if job.result is not None]
        self.jobs = [job for job in self.jobs if job.result is None]
        return Round(
            tokens=draft.tokens,
            finished=tuple(ended),
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted),
            prefilled=draft.prefilled,
            decoded=sum(map(len, draft.tokens.values())),
            waiting=len(self.waiting),
            running=len(self.running),
            pending=len(self.pending),
        )

    def _arrive(self) -> None:
        now = self.config.clock.now()
        for job in self.pending:
            job.arrived = job.request.arrival <= now

    def _recover(self, worker: Worker, draft: _Draft) -> None:
        """Requests whose KV is gone (a failed step, new weights) wait to be computed again."""
        for job in self.running:
            if job.sequence is not None and not worker.current(job.sequence):
                self._preempt(job, worker, draft)

    def _prefill(self, worker: Worker, draft: _Draft) -> None:
        """Spends the budget on prompts: those under way first, but not before a higher priority."""
        budget = self.budget
        todo = sorted((job for job in self.running if job.prefilling), key=lambda job: job.rank)
        while budget > 0:
            head = todo[0] if todo else None
            spent = self._admit(worker, draft, budget, head)
            if not spent and head is None:
                return
            if not spent and head is not None:
                todo.pop(0)
                spent = self._continue(head, worker, draft, budget)
            budget -= spent
            draft.prefilled += spent

    def _decode(self, worker: Worker, draft: _Draft) -> None:
        """Gives every row that has its prompt up to `decode_steps` tokens."""
        for job in self.running:  # an interrupt came between its last tokens and its end
            if not job.left:
                self._end(job, "length", self.config.clock.now(), worker)
        generations: list[Generation] = []
        while rows := sorted((j for j in self.running if not j.prefilling), key=lambda job: job.rank):
            sequences = [job.sequence for job in rows if job.sequence is not None]
            limits = [min(self.config.decode_steps, job.left) for job in rows]
            try:
                generations = worker.decode(sequences, limits, [job.request.sampling for job in rows])
                break
            except CapacityError:
                self._preempt(self._last(), worker, draft)
        now = self.config.clock.now()
        for job, out in zip(rows, generations, strict=True):
            if len(out.tokens):
                draft.tokens[job.request] = out.tokens
                job.tokens = grown(job.tokens, out.tokens)
                if np.isnan(job.first_token):
                    job.first_token = now
            self._replace(job, out.sequence, worker)
            if out.finish_reason == "stop" or not job.left:
                worker.publish(out.sequence)
                self._end(job, out.finish_reason, now, worker)

    # ---- admission and preemption ------------------------------------------------------------------

    def _admit(self, worker: Worker, draft: _Draft, budget: int, head: Job | None) -> int:
        """Starts the first waiting request that may start. Returns the tokens computed for it."""
        waiting = sorted(self.waiting, key=lambda job: job.rank)[:LOOKAHEAD]
        above = [head] if head is not None else []
        if len(self.running) >= self.config.max_running:
            above.append(self._last())
        if above:
            least = max(job.request.priority for job in above)
            waiting = [job for job in waiting if job.request.priority > least]
        if not waiting:
            return 0
        job = waiting[0]
        if self.config.order == "prefix":
            leaders = [j for j in self.running if j.prefilling]
            cached = {j: worker.cached(j.tokens, j.request.domain) for j in waiting}
            ready = [
                j
                for j in in_order(waiting, cached, self.config.patience)
                if j.passed >= self.config.patience or not worth_waiting_for(j, leaders, cached[j], self.unit)
            ]
            if not ready:
                return 0
            job = ready[0]
        # Whoever does not fit is not overtaken by smaller ones: it would wait for ever.
        matched = self._make_way(job, worker, draft)
        if matched is None:
            return 0
        end = part_end(matched, len(job.tokens), budget, self.unit)
        if end == matched < len(job.tokens):
            return 0  # too little of the budget is left in this round
        now = self.config.clock.now()
        try:
            result = worker.prefill(job.tokens[:end], domain=job.request.domain, reuse=not job.cold)
        except CapacityError:
            return 0
        job.sequence = result.sequence
        for other in waiting:
            if other.rank < job.rank and other.request.priority == job.request.priority:
                other.passed += 1
        draft.admitted.append(job.request)
        if np.isnan(job.admitted):
            job.admitted = now
            job.hit_tokens = result.reuse.matched
        return self._computed(job, result)

    def _continue(self, job: Job, worker: Worker, draft: _Draft, budget: int) -> int:
        """Computes the next part of a prompt under way. Returns its tokens."""
        start = job.kv_length
        end = part_end(start, len(job.tokens), budget, self.unit)
        while end > start and job.sequence is not None:  # it may be preempted in favour of others
            try:
                result = worker.extend(job.sequence, job.tokens[start:end])
            except CapacityError:
                self._preempt(self._last(), worker, draft)
                continue
            self._replace(job, result.sequence, worker)
            return self._computed(job, result)
        return 0

    def _computed(self, job: Job, result: StepResult) -> int:
        job.computed_tokens += result.reuse.forwarded
        if not job.prefilling and np.isnan(job.prefilled):
            job.prefilled = self.config.clock.now()
        return result.reuse.forwarded

    def _make_way(self, job: Job, worker: Worker, draft: _Draft) -> int | None:
        """Cached tokens of a request that fits now, maybe after preempting lower priorities, or None."""
        lower = [j for j in self.running if j.request.priority < job.request.priority]
        lower.sort(key=lambda j: j.rank)
        victims: list[Job] = []
        job.cold = False
        while True:
            released = [j.sequence.held_pages for j in victims if j.sequence is not None]
            others = [j for j in self.running if j not in victims]
            matched, room = worker.room(job.tokens, job.request.domain, released)
            if len(others) < self.config.max_running:
                if self._need(job, matched) + self._promised(job, others) <= room:
                    break
                if not others:  # alone it fits, but for the cached pages that it would pin
                    _, room = worker.room(job.tokens[:0], job.request.domain, released)
                    if self._need(job, 0) <= room:
                        job.cold, matched = True, 0
                        break
            if not lower:
                return None
            victims.append(lower.pop())
        for victim in victims:
            self._preempt(victim, worker, draft)
        return matched

    def _whole(self, job: Job) -> bool:
        """Whether a request is admitted only with room for all of its generation.

        A preempted one always: else it would take the same pages again and lose them again.
        """
        return self.config.admission == "reserve" or job.preemptions > 0

    def _need(self, job: Job, matched: int) -> int:
        """Fresh pages for what a request is admitted with."""
        target = job.total if self._whole(job) else min(len(job.tokens) + self.config.decode_steps, job.total)
        return self._pages(target - matched)

    def _promised(self, job: Job, others: list[Job]) -> int:
        """Fresh pages that running requests still count on."""
        if self._whole(job):
            return sum(self._pages(other.total - other.kv_length) for other in others)
        return sum(
            self._pages(min(len(other.tokens) + self.config.decode_steps, other.total) - other.kv_length)
            for other in others
            if other.prefilling
        )

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _last(self) -> Job:
        """The request that is preempted first: lowest priority, then latest arrival."""
        return max(self.running, key=lambda job: job.rank)

    def _preempt(self, job: Job, worker: Worker, draft: _Draft) -> None:
        """Takes exactly its own pages from a request, which waits to be computed again."""
        self._replace(job, None, worker)
        job.preemptions += 1
        self.preemptions += 1
        draft.preempted.append(job.request)

    def _end(self, job: Job, reason: FinishReason, now: float, worker: Worker) -> RequestResult:
        job.result = result = job.end(reason, now, worker.text(job.generated))
        self._replace(job, None, worker)
        return result

    def _replace(self, job: Job, sequence: Sequence | None, worker: Worker) -> None:
        # The new one first: whatever interrupts, the request holds one that is live.
        old, job.sequence = job.sequence, sequence
        if old is not None and worker.live(old):
            worker.release(old)

    def _stuck(self, worker: Worker) -> CapacityError:
        job = min(self.waiting, key=lambda job: job.rank)
        matched, room = worker.room(job.tokens, job.request.domain, ())
        return CapacityError(
            f"request {job.request.id} needs {self._need(job, matched)} pages and {room} can be had, "
            "expected room for it: release sequences that the loop does not own, or cancel it"
        )
