"""The measurements: each returns seconds of one repeat."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.speed.config import SpeedConfig
from jaxkv.cache.dtypes import kv_token_bytes
from jaxkv.cache.sequence import Sequence
from jaxkv.engine import Engine
from jaxkv.generation import Sampling
from jaxkv.io.models import Model
from jaxkv.reuse.policies import Policy, policy_from_name
from jaxkv.typing import Int32

COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts what XLA compiles, or takes from the persistent cache, from now on."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            self.totals["count"] += 1
            self.totals["milliseconds"] += round(1000 * duration_secs)


class Subject:
    """The engine under test, without a prefix index: every call pays for itself."""

    def __init__(self, model: Model, config: SpeedConfig, tokens: Int32) -> None:
        kept = max(config.batches) * sum(config.contexts)
        longest = kept + max(
            max(config.prefill),
            max(config.batches) * (config.decode_tokens + config.page_size),
            3 * config.edit_context,
        )
        self._config, self._tokens = config, tokens
        self.engine = Engine(
            model,
            num_pages=math.ceil(longest / config.page_size) + 4 * max(config.batches),
            page_size=config.page_size,
            chunk_size=config.chunk_size,
            kv_dtype=None if config.kv_dtype == "model" else config.kv_dtype,
            implementation=config.implementation,
            interpret=config.interpret,
            prefix_cache=False,
        )
        self._prompts: dict[int, list[Sequence]] = {}  # by context; kept, or every repeat would compute them
        self.page_bytes = config.page_size * kv_token_bytes(model.config, self.engine.contract.kv_dtype)

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt of `tokens` to its logits, nothing reused."""
        begin = time.perf_counter()
        result = self.engine.prefill(self._tokens[:tokens])
        result.logits.block_until_ready()
        spent = time.perf_counter() - begin
        self.engine.release(result.sequence)
        return spent

    def decode(self, context: int, batch: int) -> float:
        """Seconds of `decode_tokens` tokens of each of `batch` sequences behind a context."""
        kept = self._prompts.setdefault(context, [])
        while len(kept) < batch:
            # Different texts: no page is shared.
            text = np.roll(self._tokens, 17 * len(kept))[:context]
            kept.append(self.engine.prefill(text).sequence)
        sequences = kept[:batch]
        begin = time.perf_counter()
        done = self.engine.generate_batch(
            sequences, max_tokens=self._config.decode_tokens, sampling=Sampling(stop=())
        )
        spent = time.perf_counter() - begin
        for each in done:
            self.engine.release(each.sequence)
        return spent

    def edits(self, policies: tuple[str, ...]) -> dict[str, tuple[float, int]]:
        """Seconds to the first token and tokens computed, for one edit under each policy in turn."""
        config = self._config
        old = self._tokens[: config.edit_context]
        at = int(config.edit_context * config.edit_position)
        other = np.roll(self._tokens, config.edit_context)[: config.edit_size]
        # One token more than it takes away, so that what is behind it moves.
        new = np.concatenate([old[:at], other, old[at + config.edit_size - 1 :]])
        source = self.engine.prefill(old).sequence
        found = {}
        for name in policies:
            policy: Policy = policy_from_name(name)
            begin = time.perf_counter()
            result = self.engine.edit(source, new, policy)
            result.logits.block_until_ready()
            found[name] = (time.perf_counter() - begin, result.reuse.forwarded)
            self.engine.release(result.sequence)
        self.engine.release(source)
        return found


def start_up(config: SpeedConfig) -> dict[str, Any]:
    """Two fresh processes, one after the other: the first leaves the second a full compilation cache.

    Returns:
      `first` and `second`, seconds of each stage and of the whole process; `weights`, their bytes, and
      `load_peak`, by how many bytes the second's peak rose while it loaded them.
    """
    starts = [_start_up(config) for _ in range(2)]
    return {
        "first": starts[0]["seconds"],
        "second": starts[1]["seconds"],
        **{key: starts[1][key] for key in ("weights", "load_peak")},
    }


def _start_up(config: SpeedConfig) -> dict[str, Any]:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "experiments.speed.start", config.model, config.dtype],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    whole = time.perf_counter() - begin
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise RuntimeError(f"the fresh process failed: {last[0] if last else 'it said nothing'}")
    start: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    start["seconds"]["process"] = whole
    return start
