"""Simulates data-parallel replicas under a `prefix_trace`: which route finds how much, and how evenly.

No model runs. Each replica has the library's own pool, prefix index and eviction, and computes the tokens it
does not find at a given rate, one request after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from experiments.trace_config import TraceConfig
from experiments.workloads.prefix_trace import TraceRequest, make_trace
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.schedule import coalesce, place
from jaxkv.serving.routing import choose


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """How much there is to do, for each replica, and how fast one works."""

    requests: int = 60  # for each replica
    load: float = 2.0  # of a replica's rate, if it found nothing
    rate: float = 4000.0  # prompt tokens a second
    num_pages: int = 1024
    page_size: int = 16
    systems: int = 16
    templates: int = 8
    tenants: int = 4
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routed:
    """What came of one route over so many replicas."""

    replicas: int
    route: str
    hit_rate: float  # prompt tokens found
    imbalance: float  # tokens computed by the busiest replica over the mean
    wait_mean: float  # seconds from arrival to the start of a request's prefill
    wait_p95: float


class Replica:
    """One pool with its index, and when it will have done its work."""

    def __init__(self, traffic: Traffic) -> None:
        self.pool = PagePool(traffic.num_pages, traffic.page_size)
        self.now = 0.0
        self.index = PrefixIndex(self.pool, clock=lambda: self.now)
        self.free_at = 0.0
        self.computed = 0

    def cached(self, root: bytes, tokens: np.ndarray) -> int:
        """Leading tokens that it would find."""
        return self.index.peek(root, tokens, limit=len(tokens) - 1)[0]

    def serve(self, root: bytes, tokens: np.ndarray, now: float, rate: float) -> tuple[int, float]:
        """Computes what is missing and publishes it; returns the tokens found and when it started."""
        self.now = now
        match = self.index.match(root, tokens, limit=len(tokens) - 1)
        positions = np.arange(match.length, len(tokens), dtype=np.int32)
        placement = place(self.pool, match.segments, positions, make_room=self._make_room)
        self.pool.fill(*placement.filled)
        segments = coalesce(np.concatenate([match.segments, placement.segments]))
        self.index.insert(root, tokens, segments)
        self.pool.release(placement.fresh)
        self.pool.release(match.pages)
        missing = len(tokens) - match.length
        start = max(self.free_at, now)
        self.free_at = start + missing / rate
        self.computed += missing
        return match.length, start

    def _make_room(self, need: int) -> None:
        if need > self.pool.free_count:
            self.index.evict(need - self.pool.free_count)


def simulate(
    traffic: Traffic, replicas: int, route: str, *, advance: Callable[[], None] | None = None
) -> Routed:
    """Sends a trace through `replicas` under one route; the same trace for every route."""
    trace, mean = trace_of(traffic, replicas)
    interval = mean / (traffic.load * traffic.rate * replicas)
    nodes = [Replica(traffic) for _ in range(replicas)]
    found, total = 0, 0
    waits = []
    roots = functools.cache(root_of)
    for number, request in enumerate(trace):
        now = request.arrival * interval
        root, tokens = roots(request.tenant), request.tokens
        blind = route in ("round_robin", "random")
        matched = [0 if blind else node.cached(root, tokens) for node in nodes]
        work = [max(int((node.free_at - now) * traffic.rate), 0) for node in nodes]
        chosen = choose(route, matched, work, len(tokens), number=number, seed=traffic.seed)
        hit, start = nodes[chosen].serve(root, tokens, now, traffic.rate)
        found, total = found + hit, total + len(tokens)
        waits.append(start - now)
        if advance is not None:
            advance()
    computed = np.array([node.computed for node in nodes], np.float64)
    return Routed(
        replicas=replicas,
        route=route,
        hit_rate=found / total,
        imbalance=float(computed.max() / computed.mean()),
        wait_mean=float(np.mean(waits)),
        wait_p95=float(np.percentile(waits, 95)),
    )


@functools.lru_cache(maxsize=2)
def trace_of(traffic: Traffic, replicas: int) -> tuple[list[TraceRequest], float]:
    """Requests with arrivals at a mean distance of 1, and their mean length in tokens."""
    config = TraceConfig(
        requests=traffic.requests * replicas,
        systems=traffic.systems,
        templates=traffic.templates,
        tenants=traffic.tenants,
        seed=traffic.seed,
        rate=1.0,
    )
    text = np.random.default_rng([traffic.seed, 91]).integers(0, 32_000, 1 << 18).astype(np.int32)
    trace = make_trace(config, text, "poisson")
    return trace, float(np.mean([len(request.tokens) for request in trace]))


def root_of(tenant: str) -> bytes:
    """Tenants share nothing: each has a root of its own."""
    return tenant.encode()
