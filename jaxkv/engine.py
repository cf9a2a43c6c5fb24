"""The one stateful object. It decides on the host what stands where, runs pure steps, answers values.

A call: check tokens, match or plan, place new tokens in pages, run steps, commit, publish what is
exact, report. `docs/architecture.md` follows one through.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from jaxkv.batching import Batching
from jaxkv.cache.contract import CacheContract
from jaxkv.cache.domain import Domain, as_domain
from jaxkv.cache.match import Cause, MatchEnd
from jaxkv.cache.sequence import (
    Sequence,
)
from jaxkv.caching import CacheControl
from jaxkv.carry import resume_edit
from jaxkv.checks import (
    check_count,
    check_length,
    check_moves,
    check_params,
    check_tokens,
)
from jaxkv.core import interruptible
from jaxkv.errors import ConfigError
from jaxkv.generation import Sampling
from jaxkv.model.params import Params
from jaxkv.parallel import place_params
from jaxkv.probing import Prober
from jaxkv.readback import read_kv
from jaxkv.results import Generation, KVState, StepResult
from jaxkv.reuse.plan import plan
from jaxkv.reuse.policies import Policy
from jaxkv.revising import Revising
from jaxkv.stats import Stats, domain_stats, engine_stats
from jaxkv.trials import Trials
from jaxkv.typing import Float32
from jaxkv.warming import Warming
from jaxkv.windows import resumer


class Engine(CacheControl, Batching, Revising, Warming):
    """Prefill, edit, extend, generate and score over shared write-once pages.

    Args:
      model: from `jaxkv.load`.
      num_pages: pages in the pool, 1024 if not given; a page holds `page_size` tokens of every layer.
      capacity_bytes: the pool's size in bytes of KV, instead of `num_pages`.
      page_size: slots in a page, a power of two from 8 to 256.
      local_pages: pages of layers that see a window, for a model that has such layers: enough for the
        windows that are in use, docs/families.md says how many. None gives them `num_pages`, which edits
        that compute in the middle of a text need.
      chunk_size: tokens of one prefill step; a multiple of `page_size`.
      kv_dtype: "float32", "bfloat16", or quantized, "int8" or "float8_e4m3fn" (docs/quantized.md); the
        model's dtype when None.
      reuse_granularity: "token" reuses every matching token; "chunk" ends hits on the chunk grid, and
        then logits of a warm run equal those of a cold one bit for bit.
      max_deltas: distinct distances that a view may hold (0 included) before it is materialized.
      eviction: which cached entries go first: `LRU()`, `LFU()`, `TTL(seconds=)`, `Priority()` or
        `CostPerByte()`.
      domain_quota_bytes: KV and snapshots that a domain may have cached, in the pool and in each tier, where
        `set_quota` says nothing else.
      host_tier_bytes: host memory that evicted entries go to, and come back from when they match.
      disk_tier: a directory behind it; it outlives the process, and engines may share it.
      disk_tier_bytes: what the directory may hold.
      clock: seconds that never go back, for lifetimes, pins and `TTL`.
      prefix_cache: whether exact prefixes are published and matched.
      num_states: of a model with recurrent layers, states that fit: one for each running sequence and each
        snapshot, two for a sequence that is computed; 64 when None.
      snapshot_every: tokens between snapshots of a long text, for such a model; 4 chunks when None.
      keep_operators: keep beside each state what its tokens make of any other, about as many bytes again;
        `SCR(states="compose")` needs it.
      adapter_digest: content digest (`jaxkv.params_digest`) of an adapter that is part of the weights.
      poison_free_pages: fill free pages with NaN, so that a stray read shows; for tests.
      implementation: of attention and page writes: "auto", "xla", "pallas_tpu", "pallas_gpu", "triton".
      interpret: run forced kernels in the interpreter, on any machine; for tests.
      mesh: devices that this engine is split over: a `jax.sharding.Mesh`, or a text as in "model:4"; see
        `jaxkv.parallel`. Pool sizes count the whole pool, whatever part of it a device holds.
      serving: limits and clock of `submit`, `step` and `run`.

    Raises:
      ConfigError: an argument is out of range.
    """

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
        work = plan(
            policy, sequence, tokens, grid=self._grid, probe=prober, resume=resumer(self._memory, sequence)
        )
        self._shapes |= prober.shapes
        if work.trial is not None:
            return trials.take(work)
        trials.drop()
        check_length(len(work.tokens), self.config)
        check_moves(work.spans if work.rotate else (), self.config)
        whole = work.prefix == len(tokens) == len(sequence)
        end = MatchEnd(Cause.COMPLETE if whole else Cause.TOKENS, work.prefix)
        on_grid = min(sequence.grid_length, work.prefix)
        resume = resume_edit(self._memory, sequence, work)
        try:
            return self._apply(
                work,
                sequence.contract,
                end,
                started,
                grid_length=on_grid,
                priority=sequence.priority,
                resume=resume,
                place=self._memory.places.get(sequence.id),
            )
        finally:
            self._memory.release_states([] if resume is None else resume.held)

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
        memory = self._memory
        return read_kv(memory.pages, memory.pool, sequence, self.config, memory.residency)

    @interruptible
    def fork(self, sequence: Sequence) -> Sequence:
        """A second handle on the same state, released on its own. Copies no KV."""
        self._require_live(sequence)
        place = self._memory.places.get(sequence.id)
        return self._memory.adopt(lambda id: dataclasses.replace(sequence, id=id), place)

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
        params = place_params(params, self.config, self._memory.backend.mesh)
        self._params, self._contract = params, contract

    @property
    def contract(self) -> CacheContract:
        """The contract under which KV is made here; each domain has its own, by `within`."""
        return self._contract

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
