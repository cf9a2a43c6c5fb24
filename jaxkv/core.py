"""The engine's state, and its way from a plan to a result. `engine.py` and its other parts build on it."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from jax.sharding import Mesh

from jaxkv.cache.contract import CacheContract, describe
from jaxkv.cache.domain import Domain, as_domain
from jaxkv.cache.dtypes import check_dtype, kv_token_bytes, scale_format
from jaxkv.cache.eviction import LRU, EvictionPolicy, check_policy
from jaxkv.cache.match import Cause, MatchEnd
from jaxkv.cache.radix import Place
from jaxkv.cache.sequence import (
    EMPTY_SEGMENTS,
    PAGE,
    Sequence,
    Sight,
    frozen,
)
from jaxkv.carry import Resume, carry_of, replayed
from jaxkv.checks import (
    check_bytes,
    check_geometry,
    check_length,
    check_tokens,
)
from jaxkv.errors import ConfigError, HandleError
from jaxkv.execute import Computed, Materialized, compute, extended, materialize, must_materialize
from jaxkv.generation import LOOP_STEPS
from jaxkv.io.models import Model
from jaxkv.memory import Memory
from jaxkv.model.backend import Backend
from jaxkv.parallel import one_replica, place_model
from jaxkv.recurrent import make_store, refuse
from jaxkv.results import StepResult, report
from jaxkv.reuse.plan import ReusePlan, plan_extension, plan_prompt
from jaxkv.serving.loop import Loop
from jaxkv.serving.request import ServingConfig
from jaxkv.tiering import make_tiers
from jaxkv.windows import bytes_for_pages, check_local_pages, refuse_bound

F = TypeVar("F", bound=Callable[..., Any])


def interruptible(method: F) -> F:
    """Notes that a call was broken off by something that is no error, such as Ctrl-C."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._memory.interrupted = True
            raise

    return cast(F, call)


class EngineCore:
    """What every part of `Engine` uses: the memory, the contract, and how a plan is carried out."""

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int | None = None,
        capacity_bytes: int | None = None,
        page_size: int = 16,
        local_pages: int | None = None,
        chunk_size: int = 512,
        kv_dtype: str | None = None,
        reuse_granularity: Literal["token", "chunk"] = "token",
        max_deltas: int = 8,
        prefix_cache: bool = True,
        eviction: EvictionPolicy = LRU(),  # noqa: B008
        domain_quota_bytes: int | None = None,
        host_tier_bytes: int = 0,
        disk_tier: str | Path | None = None,
        disk_tier_bytes: int = 2**34,
        clock: Callable[[], float] = time.monotonic,
        adapter_digest: str = "",
        num_states: int | None = None,
        snapshot_every: int | None = None,
        keep_operators: bool = False,
        poison_free_pages: bool = False,
        implementation: str = "auto",
        interpret: bool = False,
        serving: ServingConfig | None = None,
        mesh: Mesh | str | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise ConfigError(f"model is a {type(model).__name__}, expected what jaxkv.load returns")
        kv_dtype = check_dtype(kv_dtype or model.dtype)
        check_local_pages(model.config, local_pages, page_size, max(chunk_size, LOOP_STEPS))
        whole = local_pages is None
        self._token_bytes = max(kv_token_bytes(model.config, kv_dtype, windowed=whole), 1)
        num_pages = check_geometry(
            num_pages=num_pages,
            capacity_bytes=bytes_for_pages(model.config, capacity_bytes, local_pages, page_size, kv_dtype),
            token_bytes=self._token_bytes,
            page_size=page_size,
            chunk_size=chunk_size,
            reuse_granularity=reuse_granularity,
            max_deltas=max_deltas,
        )
        mesh = one_replica(mesh)
        self.model = model = place_model(model, mesh)
        self.config = model.config
        self.chunk_size = chunk_size
        self.max_deltas = max_deltas
        self._params = model.params
        self._sight = Sight.of(model.config)
        self._grid = chunk_size if reuse_granularity == "chunk" else 1
        self._prefix_cache = prefix_cache
        tokenizer = model.tokenizer
        self._contract = CacheContract(
            weights_digest=model.weights_digest,
            architecture=describe(model.config),
            kv_dtype=kv_dtype,
            scale_format=scale_format(kv_dtype),
            chunk_grid=self._grid,
            tokenizer_digest=tokenizer.digest if tokenizer else "",
            template_digest=tokenizer.template_digest if tokenizer else "",
            adapter_digest=adapter_digest,
        )
        states = make_store(
            model.config,
            num_states,
            snapshot_every,
            chunk=chunk_size,
            grid=self._grid,
            dtype=model.dtype,
            operators=keep_operators,
        )
        self._least_quota = page_size * self._token_bytes + (states.nbytes if states else 0)
        self._memory = Memory(
            model.config,
            num_pages=num_pages,
            page_size=page_size,
            kv_dtype=self._contract.kv_dtype,
            grid=self._grid,
            poison=poison_free_pages,
            backend=Backend(implementation, interpret, mesh),
            eviction=check_policy(eviction),
            clock=clock,
            quota=self._check_quota(domain_quota_bytes),
            tiers=make_tiers(host_tier_bytes, disk_tier, disk_tier_bytes, self._grid),
            states=states,
            local_pages=local_pages,
        )
        if self._memory.tiers is not None:
            refuse_bound(self._memory, "a host or disk tier")
        if local_pages is not None:
            refuse(model.config, "a bound of local layers' pages", "local_pages None")
        if serving is not None and not isinstance(serving, ServingConfig):
            raise ConfigError(f"serving is a {type(serving).__name__}, expected jaxkv.ServingConfig")
        self._loop = Loop(
            serving or ServingConfig(),
            num_pages=num_pages,
            page_size=page_size,
            chunk=chunk_size,
            grid=self._grid,
        )
        self._counters: Counter[str] = Counter()
        self._shapes: set[tuple[Any, ...]] = set()

    @interruptible
    def prefill(
        self, tokens: Any, *, domain: str | Domain = "default", reuse: bool = True, priority: int = 0
    ) -> StepResult:
        """Computes a prompt, reusing the longest exact prefix that `domain` has published.

        Args:
          tokens: token ids, n >= 1.
          domain: isolation domain, a tenant's name or a `Domain`; domains share nothing.
          reuse: False computes everything and publishes nothing: a fresh reference.
          priority: of what is cached of it and of what grows from it, for the `Priority` policy.

        Raises:
          TokenError: empty, or an id outside the vocabulary.
          CapacityError: longer than the model's positions, or than the pool; the pool is unchanged.
        """
        contract = self._contract.within(as_domain(domain))
        return self._prefill(tokens, contract, reuse=reuse and self._prefix_cache, priority=priority)

    def _prefill(self, tokens: Any, contract: CacheContract, *, reuse: bool, priority: int) -> StepResult:
        started = time.perf_counter()
        self._memory.begin()
        tokens = check_tokens(tokens, self.config)
        length = len(tokens)
        segments, matched, end = EMPTY_SEGMENTS, 0, MatchEnd(Cause.DISABLED, 0)
        resume: Resume | None = None
        place: Place | None = None
        if reuse:
            limit = length if self._grid == 1 else length - 1
            match = self._memory.match(contract, tokens, limit=limit)
            segments, matched, end, place = match.segments, match.length, match.end, match.place
            resume = None if match.state is None else Resume(match.resume, match.state)
        work = plan_prompt(tokens, segments, matched)
        try:
            result = self._apply(
                work, contract, end, started, publish=reuse, priority=priority, resume=resume, place=place
            )
            if reuse:
                self._memory.metrics.look_up(contract.domain, length, matched, end)
            return result
        finally:
            self._memory.release(segments[:, PAGE])
            self._memory.release_states([] if resume is None else [resume.slot])

    @interruptible
    def extend(self, sequence: Sequence, tokens: Any) -> StepResult:
        """Appends `tokens` to `sequence`, which stays as it was. Exact if the sequence is."""
        started = time.perf_counter()
        self._require_live(sequence)
        added = check_tokens(tokens, self.config)
        check_length(len(sequence) + len(added), self.config)
        work = plan_extension(sequence, frozen(np.concatenate([sequence.tokens, added])))
        where = MatchEnd(Cause.COMPLETE, len(sequence))
        # Chunks that begin where whole chunks ended are on the grid too.
        whole = sequence.grid_length == len(sequence)
        on_grid = len(work.tokens) if whole else sequence.grid_length
        return self._apply(
            work,
            sequence.contract,
            where,
            started,
            grid_length=on_grid,
            priority=sequence.priority,
            resume=None if sequence.state is None else Resume(len(sequence), sequence.state),
            place=self._memory.places.get(sequence.id),
        )

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Token ids that end a generation, from the model and its tokenizer."""
        extra = self.model.tokenizer.eos_ids if self.model.tokenizer else ()
        return tuple(sorted({*self.config.eos_token_ids, *extra}))

    @interruptible
    def release(self, sequence: Sequence) -> None:
        """Gives the sequence's pages back. What was published stays in the prefix index.

        A sequence that is garbage-collected is released on the engine's next call.

        Raises:
          HandleError: it was released before, or is not this engine's.
        """
        if not isinstance(sequence, Sequence) or sequence.id not in self._memory.live:
            self._require_live(sequence)
        self._memory.let_go(sequence.id)

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence is this engine's, and live."""
        return isinstance(sequence, Sequence) and sequence.id in self._memory.live

    def _check_quota(self, quota_bytes: int | None) -> int | None:
        return None if quota_bytes is None else check_bytes("quota_bytes", quota_bytes, self._least_quota)

    def _apply(
        self,
        work: ReusePlan,
        contract: CacheContract,
        end: MatchEnd,
        started: float,
        *,
        grid_length: int = 0,
        publish: bool = True,
        priority: int = 0,
        resume: Resume | None = None,
        place: Place | None = None,
    ) -> StepResult:
        """Executes a plan: materializes if asked, computes, hands out, publishes, reports.

        Args:
          grid_length: leading tokens that whole chunks computed, if the plan is not aligned itself.
          resume: where recurrent layers start; the caller keeps its reference.
          place: where the index has the tokens of `work.prefix`, or some of them, if that is known.
        """
        memory = self._memory
        if memory.states is not None:
            work = replayed(work, resume)
        planned = time.perf_counter()
        on_grid = len(work.tokens) if work.aligned else grid_length
        moved = Materialized(segments=work.attended, fresh=EMPTY_SEGMENTS[:, PAGE], moved=0)
        done: Computed | None = None
        try:
            if work.rotate and must_materialize(
                memory, work.attended, form=work.form, max_deltas=self.max_deltas
            ):
                moved = materialize(memory, work.attended)
            relocated = time.perf_counter()
            done = compute(
                memory,
                self._params,
                segments=work.segments,
                attended=moved.segments,
                tokens=work.tokens[work.forward],
                positions=work.forward,
                rotate=work.rotate,
                max_deltas=self.max_deltas,
                chunk_size=self.chunk_size,
                write=work.write,
                kept=work.kept,
                carry=carry_of(memory, resume, work),
            )
            forwarded = time.perf_counter()
            attended = extended(moved.segments, done.placement)
            # The composed control forgets the keys as born: the next move starts from its copies.
            born = moved.segments if work.form == "composed" else work.segments
            segments = extended(born, done.placement)
            memory.commit(done.placement)
            result = done.logits
            sequence = memory.adopt(
                lambda id: Sequence(
                    id=id,
                    tokens=work.tokens,
                    segments=segments,
                    copies=None if np.array_equal(attended, segments) else attended,
                    provenance=work.provenance,
                    contract=contract,
                    grid_length=on_grid // self._grid * self._grid,
                    priority=priority,
                    rotate=work.rotate,
                    sight=self._sight,
                    logits=result,
                    state=done.state,
                ),
                None if place is None else place.within(work.prefix),
            )
        except BaseException:
            if done is not None:
                memory.release_states(slot for _, slot in done.states)
            raise
        finally:
            memory.release(moved.fresh)
            if done is not None:
                memory.release(done.placement.fresh)
        try:
            if publish:
                self._publish(sequence, done.states)
        finally:
            memory.release_states(slot for _, slot in done.states)
        self._shapes |= done.shapes
        self._counters.update(matched=work.matched, relocated=work.relocated, forwarded=len(work.forward))
        timings = {
            "plan": planned - started,
            "relocate": relocated - planned,
            "forward": forwarded - relocated,
        }
        reuse = report(
            work,
            sequence,
            end,
            config=self.config,
            page_size=memory.pool.page_size,
            moved=moved.moved,
            timings=timings,
        )
        return StepResult(sequence=sequence, logits=result, reuse=reuse)

    def _publish(self, sequence: Sequence, states: tuple[tuple[int, int], ...] = ()) -> None:
        """Offers what is exact to the prefix index: after the step returned, never before.

        With it go states (position, slot) left on the way, and the one behind its last token.
        """
        if self._prefix_cache:
            if sequence.state is not None:
                states = (*states, (len(sequence), sequence.state))
            limit = sequence.grid_length if self._grid > 1 else len(sequence)
            self._memory.publish(sequence, limit, states)

    def _require_live(self, sequence: Sequence) -> None:
        if not isinstance(sequence, Sequence):
            raise HandleError(f"sequence is a {type(sequence).__name__}, expected a jaxkv Sequence")
        self._memory.begin()
        if sequence.id not in self._memory.live:
            raise HandleError(
                f"sequence {sequence.id} was released or is another engine's, expected a live one"
            )
        theirs = sequence.contract
        self._contract.within(theirs.domain, scope=theirs.scope).require(theirs)
