"""The one stateful object. It decides on the host what stands where, runs pure steps, answers values.

A call: check tokens, match or plan, place new tokens in pages, run steps, commit, publish what is
exact, report. `docs/architecture.md` follows one through.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxkv.cache.contract import CacheContract, describe
from jaxkv.cache.domain import Domain, as_domain
from jaxkv.cache.eviction import LRU, EvictionPolicy, check_policy
from jaxkv.cache.match import Cause, MatchEnd
from jaxkv.cache.pages import check_dtype
from jaxkv.cache.sequence import (
    EMPTY_SEGMENTS,
    PAGE,
    Sequence,
    clip,
    frozen,
)
from jaxkv.caching import CacheControl, interruptible, make_tiers
from jaxkv.checks import (
    check_count,
    check_geometry,
    check_length,
    check_moves,
    check_params,
    check_tokens,
)
from jaxkv.errors import ConfigError, HandleError
from jaxkv.execute import Computed, Materialized, compute, extended, materialize, must_materialize
from jaxkv.generation import Decoded, Sampling, decode_batch
from jaxkv.healing import displace, heal
from jaxkv.io.models import Model
from jaxkv.memory import Memory
from jaxkv.model.backend import Backend
from jaxkv.model.params import Params
from jaxkv.probing import Prober
from jaxkv.readback import read_kv
from jaxkv.results import Generation, KVState, StepResult, report
from jaxkv.reuse.diff import Span
from jaxkv.reuse.estimate import Calibration, Estimate, Signals, load_calibration
from jaxkv.reuse.plan import ReusePlan, plan, plan_extension, plan_heal, plan_prompt
from jaxkv.reuse.policies import Policy
from jaxkv.schedule import Placement
from jaxkv.serving.loop import Loop
from jaxkv.serving.request import Request, RequestResult, Round, ServingConfig
from jaxkv.serving.worker import Worker
from jaxkv.signals import read_signals
from jaxkv.stats import Stats, domain_stats, engine_stats
from jaxkv.trials import Trials
from jaxkv.typing import Float32, Int32


class Engine(CacheControl):
    """Prefill, edit, extend, generate and score over shared write-once pages.

    Args:
      model: from `jaxkv.load`.
      num_pages: pages in the pool, 1024 if not given; a page holds `page_size` tokens of every layer.
      capacity_bytes: the pool's size in bytes of KV, instead of `num_pages`.
      page_size: slots in a page, a power of two from 8 to 256.
      chunk_size: tokens of one prefill step; a multiple of `page_size`.
      kv_dtype: "float32" or "bfloat16"; the model's dtype when None.
      reuse_granularity: "token" reuses every matching token; "chunk" ends hits on the chunk grid, and
        then logits of a warm run equal those of a cold one bit for bit.
      max_deltas: distinct distances that a view may hold (0 included) before it is materialized.
      eviction: which cached entries go first: `LRU()`, `LFU()`, `TTL(seconds=)`, `Priority()` or
        `CostPerByte()`.
      domain_quota_bytes: KV that a domain may have cached, where `set_quota` says nothing else.
      host_tier_bytes: host memory that evicted entries go to, and come back from when they match.
      disk_tier: a directory behind it; it outlives the process, and engines may share it.
      disk_tier_bytes: what the directory may hold.
      clock: seconds that never go back, for lifetimes, pins and `TTL`.
      prefix_cache: whether exact prefixes are published and matched.
      adapter_digest: content digest (`jaxkv.params_digest`) of an adapter that is part of the weights.
      poison_free_pages: fill free pages with NaN, so that a stray read shows; for tests.
      implementation: of attention and page writes: "auto", "xla", "pallas_tpu", "pallas_gpu", "triton".
      interpret: run forced kernels in the interpreter, on any machine; for tests.
      serving: limits and clock of `submit`, `step` and `run`.

    Raises:
      ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int | None = None,
        capacity_bytes: int | None = None,
        page_size: int = 16,
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
        poison_free_pages: bool = False,
        implementation: str = "auto",
        interpret: bool = False,
        serving: ServingConfig | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise ConfigError(f"model is a {type(model).__name__}, expected what jaxkv.load returns")
        kv_dtype = check_dtype(kv_dtype or model.dtype)
        self._token_bytes = model.config.kv_bytes_per_token(jnp.dtype(kv_dtype).itemsize)
        num_pages = check_geometry(
            num_pages=num_pages,
            capacity_bytes=capacity_bytes,
            token_bytes=self._token_bytes,
            page_size=page_size,
            chunk_size=chunk_size,
            reuse_granularity=reuse_granularity,
            max_deltas=max_deltas,
        )
        self.model = model
        self.config = model.config
        self.chunk_size = chunk_size
        self.max_deltas = max_deltas
        self._params = model.params
        self._grid = chunk_size if reuse_granularity == "chunk" else 1
        self._prefix_cache = prefix_cache
        tokenizer = model.tokenizer
        self._contract = CacheContract(
            weights_digest=model.weights_digest,
            architecture=describe(model.config),
            kv_dtype=kv_dtype,
            chunk_grid=self._grid,
            tokenizer_digest=tokenizer.digest if tokenizer else "",
            template_digest=tokenizer.template_digest if tokenizer else "",
            adapter_digest=adapter_digest,
        )
        self._memory = Memory(
            model.config,
            num_pages=num_pages,
            page_size=page_size,
            kv_dtype=self._contract.kv_dtype,
            grid=self._grid,
            poison=poison_free_pages,
            backend=Backend(implementation, interpret),
            eviction=check_policy(eviction),
            clock=clock,
            quota=self._quota_pages(domain_quota_bytes, page_size),
            tiers=make_tiers(host_tier_bytes, disk_tier, disk_tier_bytes, self._grid),
        )
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

    # ---- sequences in, values out ------------------------------------------------------------

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
        if reuse:
            limit = length if self._grid == 1 else length - 1
            match = self._memory.match(contract, tokens, limit=limit)
            segments, matched, end = match.segments, match.length, match.end
        work = plan_prompt(tokens, segments, matched)
        try:
            result = self._apply(work, contract, end, started, publish=reuse, priority=priority)
            if reuse:
                self._memory.metrics.look_up(contract.domain, length, matched, end)
            return result
        finally:
            self._memory.release(segments[:, PAGE])

    @interruptible
    def edit(self, sequence: Sequence, new_tokens: Any, policy: Policy) -> StepResult:
        """Answers for `new_tokens` from the KV of `sequence`, as `policy` allows.

        `sequence` stays as it was. The result's `reuse.kind` says whether it is exact.

        Raises:
          HandleError: `sequence` was released.
          TokenError, CapacityError: as in `prefill`.
          RelocationError: the policy moves keys and the model's positions do not compose.
        """
        started = time.perf_counter()
        self._require_live(sequence)
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise ConfigError(f"policy is {policy!r}, expected a policy such as jaxkv.SCR()")
        tokens = check_tokens(new_tokens, self.config)
        trials = Trials(self, sequence, tokens)
        prober = Prober(
            self._memory,
            self._params,
            sequence,
            tokens,
            chunk_size=self.chunk_size,
            max_deltas=self.max_deltas,
            encode=self.model.tokenizer.encode if self.model.tokenizer else None,
            trial=trials.run,
        )
        work = plan(policy, sequence, tokens, grid=self._grid, probe=prober)
        self._shapes |= prober.shapes
        if work.trial is not None:
            return trials.take(work)
        trials.drop()
        check_length(len(work.tokens), self.config)
        check_moves(work.spans if work.rotate else (), self.config)
        whole = work.prefix == len(tokens) == len(sequence)
        end = MatchEnd(Cause.COMPLETE if whole else Cause.TOKENS, work.prefix)
        on_grid = min(sequence.grid_length, work.prefix)
        return self._apply(
            work, sequence.contract, end, started, grid_length=on_grid, priority=sequence.priority
        )

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
            work, sequence.contract, where, started, grid_length=on_grid, priority=sequence.priority
        )

    def generate(
        self,
        sequence: Sequence,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: tuple[int, ...] | None = None,
    ) -> Generation:
        """Continues `sequence`, which stays as it was. Temperature 0 is greedy.

        Ends after `max_tokens`, or at a token of `stop` (the model's end tokens when None), which is
        neither returned nor written.
        """
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=self.end_tokens if stop is None else tuple(stop),
        )
        return self.generate_batch([sequence], max_tokens=max_tokens, sampling=sampling)[0]

    @interruptible
    def generate_batch(
        self,
        sequences: list[Sequence],
        *,
        max_tokens: int,
        sampling: Sampling | list[Sampling] | None = None,
    ) -> list[Generation]:
        """Continues several sequences together in one compiled loop; `sampling` may differ by row."""
        max_tokens = check_count("max_tokens", max_tokens)
        if not sequences:
            raise ConfigError("sequences are empty, expected at least one")
        if sampling is None:
            sampling = Sampling(stop=self.end_tokens)
        samplings = sampling if isinstance(sampling, list) else [sampling] * len(sequences)
        if len(samplings) != len(sequences):
            raise ConfigError(
                f"sampling has {len(samplings)} rows, expected one for each of {len(sequences)} sequences"
            )
        for sequence in sequences:
            self._require_live(sequence)
            check_length(len(sequence) + max_tokens, self.config)
        return self._decode(sequences, [max_tokens] * len(sequences), samplings, publish=True)

    @interruptible
    def score(self, sequence: Sequence, continuation: Any) -> Float32:
        """Logits f32[T, V]; row t predicts continuation[t] from the sequence and continuation[:t].

        The sequence stays as it was, and so does the prefix index.
        """
        tokens = check_tokens(continuation, self.config, "continuation")
        self._require_live(sequence)
        first = np.asarray(sequence.logits, np.float32)[None]
        if len(tokens) == 1:
            return first
        outputs = self._peek(sequence, tokens[:-1]).outputs
        return np.concatenate([first, *(np.asarray(out.logits)[0, :n] for out, n in outputs)])

    @interruptible
    def attention_outputs(self, sequence: Sequence, continuation: Any) -> Float32:
        """Attention outputs f32[L, T, N·H] of `continuation` fed behind `sequence`, which stays."""
        tokens = check_tokens(continuation, self.config, "continuation")
        outputs = self._peek(sequence, tokens).outputs
        return np.concatenate([np.asarray(out.attention)[:, 0, :n] for out, n in outputs], axis=1)

    @interruptible
    def read_kv(self, sequence: Sequence) -> KVState:
        """Keys (un-rotated) and values of a sequence, read back to the host in float32."""
        self._require_live(sequence)
        return read_kv(self._memory.pages[0], self._memory.pool, sequence, self.config)

    @interruptible
    def heal(self, sequence: Sequence, *, tokens: int) -> StepResult:
        """Recomputes the next `tokens` stale positions of `sequence`, which stays as it was.

        From left to right, so that what is healed is exact: it enters the prefix index, and once nothing
        is stale the result is an exact sequence, equal to a fresh prefill to rounding, and bit for bit with
        `reuse_granularity="chunk"`, where whole chunks are healed. For idle time between requests.

        Raises:
          ConfigError: `tokens` is not a whole number of at least 1.
          HandleError, CapacityError: as in `edit`.
        """
        started = time.perf_counter()
        self._require_live(sequence)
        count = check_count("tokens", tokens)
        work = plan_heal(sequence, count, grid=self._grid)
        done = heal(
            self._memory,
            self._params,
            sequence,
            work,
            grid=self._grid,
            max_deltas=self.max_deltas,
            chunk_size=self.chunk_size,
        )
        try:
            made = self._memory.adopt(lambda id: dataclasses.replace(sequence, id=id, **done.changes))
        finally:
            self._memory.release(done.fresh)
        self._publish(made)
        self._shapes |= done.shapes
        self._counters["forwarded"] += len(work.forward)
        reuse = report(
            work,
            made,
            MatchEnd(Cause.COMPLETE, work.prefix),
            config=self.config,
            page_size=self._memory.pool.page_size,
            moved=0,
            timings={"forward": time.perf_counter() - started},
            refreshed=not made.exact,
        )
        return StepResult(sequence=made, logits=done.changes["logits"], reuse=reuse)

    def signals(self, source: Sequence, result: StepResult) -> Signals:
        """What `result`, an edit of `source` under an approximate policy, shows of its own error."""
        for sequence in (source, result.sequence):
            self._require_live(sequence)
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

    @interruptible
    def fork(self, sequence: Sequence) -> Sequence:
        """A second handle on the same state, released on its own. Copies no KV."""
        self._require_live(sequence)
        return self._memory.adopt(lambda id: dataclasses.replace(sequence, id=id))

    @interruptible
    def release(self, sequence: Sequence) -> None:
        """Gives the sequence's pages back. What was published stays in the prefix index.

        A sequence that is garbage-collected is released on the engine's next call.

        Raises:
          HandleError: it was released before, or is not this engine's.
        """
        if not isinstance(sequence, Sequence) or sequence.id not in self._memory.live:
            self._require_live(sequence)
        self._memory.release(self._memory.live.pop(sequence.id))

    # ---- many requests: see docs/serving.md ------------------------------------------------------

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

    def replace_params(self, params: Params, weights_digest: str, adapter_digest: str = "") -> None:
        """Takes new weights. Everything cached under the old ones is unreachable at once.

        Raises:
          ConfigError: a weight is missing or has another shape than the old one.
        """
        check_params(params, self._params)
        self._memory.past.append(self._contract)
        contract = dataclasses.replace(
            self._contract, weights_digest=weights_digest, adapter_digest=adapter_digest
        )
        self._params, self._contract = params, contract

    @property
    def contract(self) -> CacheContract:
        """The contract under which KV is made here; each domain has its own, by `within`."""
        return self._contract

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Token ids that end a generation, from the model and its tokenizer."""
        extra = self.model.tokenizer.eos_ids if self.model.tokenizer else ()
        return tuple(sorted({*self.config.eos_token_ids, *extra}))

    def stats(self, domain: str | Domain | None = None) -> Stats:
        """Counters: pages, tokens by kind, lookups by how they ended, evictions, lifetimes in seconds.

        With a domain: what that domain may know, its own lookups and what it has cached.
        """
        self._memory.begin()
        if domain is not None:
            return domain_stats(self._memory, self._contract.within(as_domain(domain)))
        loop = {"requests": len(self._loop.jobs), "preemptions": self._loop.preemptions}
        return engine_stats(self._memory, self._counters, len(self._shapes)) | loop

    def check(self) -> None:
        """Integrity: sequences and the prefix index account for every page, or a HandleError."""
        self._memory.check()

    # ---- from a plan to a result -----------------------------------------------------------------

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
    ) -> StepResult:
        """Executes a plan: materializes if asked, computes, hands out, publishes, reports.

        `grid_length`: leading tokens that whole chunks computed, if the plan is not aligned itself.
        """
        memory = self._memory
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
                    logits=result,
                )
            )
        finally:
            memory.release(moved.fresh)
            if done is not None:
                memory.release(done.placement.fresh)
        if publish:
            self._publish(sequence)
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

    def _decode(
        self, sequences: list[Sequence], limits: list[int], samplings: list[Sampling], *, publish: bool
    ) -> list[Generation]:
        """Continues live sequences, each by at most its limit, in one compiled loop."""
        placements: list[Placement] = []
        claimed: set[int] = set()
        try:
            for sequence, limit in zip(sequences, limits, strict=True):
                positions = np.arange(limit, dtype=np.int32) + len(sequence)
                placements.append(self._memory.place(sequence.segments, positions, claimed))
            decoded = decode_batch(
                self._memory,
                self._params,
                sequences,
                placements,
                limits=limits,
                samplings=samplings,
                max_deltas=self.max_deltas,
            )
            done = [self._finish(*each) for each in zip(sequences, placements, decoded, strict=True)]
        finally:
            for placement in placements:
                self._memory.release(placement.fresh)
        if publish:
            for generation in done:
                self._publish(generation.sequence)
        return done

    def _peek(self, sequence: Sequence, tokens: Int32) -> Computed:
        """Runs tokens behind a sequence without keeping what they wrote.

        Always with all logits and attention outputs: one compiled step serves every question.
        """
        self._require_live(sequence)
        check_length(len(sequence) + len(tokens), self.config)
        done = compute(
            self._memory,
            self._params,
            segments=sequence.segments,
            attended=sequence.table_segments,
            tokens=tokens,
            positions=np.arange(len(tokens), dtype=np.int32) + len(sequence),
            rotate=sequence.rotate,
            max_deltas=self.max_deltas,
            chunk_size=self.chunk_size,
            logits="all",
            capture=True,
        )
        self._memory.release(done.placement.fresh)
        self._shapes |= done.shapes
        return done

    def _finish(self, source: Sequence, placement: Placement, decoded: Decoded) -> Generation:
        """Hands out a generation; slots that were reserved and not written go back."""
        end = len(source) + len(decoded.tokens)
        written = Placement.of(clip(placement.segments, 0, end))
        self._memory.commit(written)
        copies = source.copies
        sequence = self._memory.adopt(
            lambda id: Sequence(
                id=id,
                tokens=frozen(np.concatenate([source.tokens, decoded.tokens])),
                segments=extended(source.segments, written),
                copies=None if copies is None else extended(copies, written),
                provenance=source.continued(end),
                contract=source.contract,
                grid_length=source.grid_length,
                priority=source.priority,
                rotate=source.rotate,
                logits=decoded.logits,
            )
        )
        self._counters["generated"] += len(decoded.tokens)
        return Generation(
            tokens=decoded.tokens,
            text=self._text(decoded.tokens),
            sequence=sequence,
            finish_reason="stop" if decoded.stopped else "length",
        )

    def _text(self, tokens: Int32) -> str | None:
        tokenizer = self.model.tokenizer
        # A model's vocabulary may be padded beyond its tokenizer's.
        return tokenizer.decode(tokens[tokens < tokenizer.vocab_size]) if tokenizer else None

    def _publish(self, sequence: Sequence) -> None:
        """Offers what is exact to the prefix index: after the step returned, never before."""
        if self._prefix_cache:
            self._memory.publish(sequence, sequence.grid_length if self._grid > 1 else len(sequence))

    # ---- checks --------------------------------------------------------------------------------

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
