"""prefix_trace: many requests over a few system prompts, tenants and templates, with arrival times.

A prompt is a system prompt, a template under it, and a question; a follow-up is an earlier prompt, an
answer and another question. All are runs of real text from the corpus, each from a place of its own, and
all draws come from the seed. The order in which the requests arrive is an axis: the requests and the
arrival times stay the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.typing import Float64, Int32

if TYPE_CHECKING:
    from experiments.trace_config import TraceConfig


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceRequest:
    """One request of a trace."""

    id: str
    tenant: str
    system: int
    template: int
    conversation: int
    turn: int  # 0, or the number of earlier turns that the prompt holds
    tokens: Int32  # i32[n]
    priority: int
    arrival: float  # seconds from the start


def make_trace(config: TraceConfig, tokens: Int32, order: str) -> list[TraceRequest]:
    """The requests in order of arrival.

    Args:
      config: what the trace is made of.
      tokens: the tokenized corpus.
      order: "poisson" as drawn; "bursts" all of a template together; "round_robin" one of each template
        in turn, the worst for a cache that forgets what was not used for longest.

    Raises:
      ConfigError: the corpus is too short.
    """
    rng = np.random.default_rng([config.seed, 55])
    text = _Text(config, tokens)
    requests: list[TraceRequest] = []
    open_ends: list[TraceRequest] = []  # the last turn of each conversation
    for number in range(config.requests):
        urgent = int(rng.random() < config.urgent)
        length = int(rng.integers(config.question_tokens // 2, 3 * config.question_tokens // 2 + 1))
        follows = bool(open_ends) and rng.random() < config.follow_ups
        tenant, system, template = (
            _zipf(rng, n, config.skew) for n in (config.tenants, config.systems, config.templates)
        )
        if follows:
            at = int(rng.integers(len(open_ends)))
            earlier = open_ends[at]
            answer = text.run(f"answer {number}", config.max_tokens)
            parts = [earlier.tokens, answer]
            request = dataclasses.replace(earlier, id=f"r{number:03}", turn=earlier.turn + 1, priority=urgent)
        else:
            at = len(open_ends)
            parts = [
                text.run(f"system {system}", config.system_tokens),
                text.run(f"template {system} {template}", config.template_tokens),
            ]
            request = TraceRequest(
                id=f"r{number:03}", tenant=f"tenant-{tenant}", system=system, template=template,
                conversation=at, turn=0, tokens=parts[0], priority=urgent, arrival=0.0,
            )  # fmt: skip
        whole = np.concatenate([*parts, text.run(f"question {number}", length)]).astype(np.int32)
        request = dataclasses.replace(request, tokens=whole)
        open_ends[at : at + 1] = [request]
        requests.append(request)
    times = np.cumsum(rng.exponential(1 / config.rate, len(requests)))
    return _arrive(requests, order, times)


def trace_digest(trace: list[TraceRequest]) -> str:
    """SHA-256 over prompts, tenants, priorities and arrival times, hex."""
    sha = hashlib.sha256()
    for r in trace:
        sha.update(f"{r.id} {r.tenant} {r.priority} {r.arrival!r} {len(r.tokens)}\n".encode())
        sha.update(r.tokens.tobytes())
    return sha.hexdigest()


def _arrive(requests: list[TraceRequest], order: str, times: Float64) -> list[TraceRequest]:
    """Deals the arrival times out. A later turn stays behind the earlier ones of its conversation."""

    def group(request: TraceRequest) -> tuple[str, int, int]:
        return request.tenant, request.system, request.template

    if order == "bursts":
        first = {group(r): i for i, r in reversed(list(enumerate(requests)))}
        requests = sorted(requests, key=lambda r: first[group(r)])
    elif order == "round_robin":
        count: dict[tuple[str, int, int], int] = {}
        rounds = []
        for r in requests:
            rounds.append(count.setdefault(group(r), 0))
            count[group(r)] += 1
        groups = sorted(count)
        places = [(turn, groups.index(group(r))) for turn, r in zip(rounds, requests, strict=True)]
        requests = [requests[i] for i in sorted(range(len(requests)), key=places.__getitem__)]
    return [dataclasses.replace(r, arrival=float(t)) for r, t in zip(requests, times, strict=True)]


def _zipf(rng: np.random.Generator, n: int, skew: float) -> int:
    """One of n, the i-th with a probability in proportion to 1 / (i + 1)^skew."""
    weights = 1 / np.arange(1, n + 1) ** skew
    return int(rng.choice(n, p=weights / weights.sum()))


class _Text:
    """Runs of corpus text by name: the same name and seed give the same run."""

    def __init__(self, config: TraceConfig, tokens: Int32) -> None:
        longest = max(config.system_tokens, config.template_tokens, 2 * config.question_tokens)
        if len(tokens) < 8 * longest:
            raise ConfigError(
                f"config.corpus has {len(tokens)} tokens, expected at least {8 * longest}, eight times the "
                "longest part of a prompt"
            )
        self._tokens, self._seed = tokens, config.seed

    def run(self, name: str, length: int) -> Int32:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        start = int.from_bytes(digest[:8], "little") % (len(self._tokens) - length + 1)
        return self._tokens[start : start + length]
