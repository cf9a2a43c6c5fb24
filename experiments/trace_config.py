"""What a prefix_trace run is, typed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from experiments import fields
from experiments.config import TINY_MODEL
from jaxkv.cache.eviction import LFU, LRU, CostPerByte, EvictionPolicy
from jaxkv.checks import check_geometry
from jaxkv.errors import ConfigError
from jaxkv.serving.request import ADMISSIONS, ORDERS, ServingConfig

ARRIVAL_ORDERS = ("poisson", "bursts", "round_robin")
EVICTIONS: dict[str, EvictionPolicy] = {"lru": LRU(), "lfu": LFU(), "cost_per_byte": CostPerByte()}

SMOKE: dict[str, Any] = {
    "model": TINY_MODEL,
    "requests": 10,
    "system_tokens": 60,
    "template_tokens": 20,
    "question_tokens": 12,
    "max_tokens": 4,
    "rate": 1000.0,
    "num_pages": (64,),
    "orders": ("poisson",),
    "chunk_size": 32,
    "prefill_budget": 32,
    "max_running": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig(fields.Fields):
    """One trace, replayed in every cell of orders × num_pages × evictions × schedules."""

    experiment: str = "prefix_trace"
    name: str = "prefix_trace"

    requests: int = 40
    tenants: int = 2  # isolation domains: what one computed, another never finds
    systems: int = 3  # system prompts
    templates: int = 3  # templates under each system prompt
    system_tokens: int = 256
    template_tokens: int = 96
    question_tokens: int = 48  # mean; uniform from half to one and a half of it
    follow_ups: float = 0.25  # share of requests that go on with an earlier conversation
    skew: float = 1.0  # Zipf exponent of the popularity of tenants, systems and templates; 0 = uniform
    urgent: float = 0.0  # share of requests with priority 1 instead of 0
    max_tokens: int = 16
    rate: float = 1.0  # arrivals a second, Poisson

    orders: tuple[str, ...] = ("poisson",)  # in which the same requests arrive
    num_pages: tuple[int, ...] = (512,)  # of each replica
    mesh: str = ""  # as in "data:2,model:4", two replicas over four devices each; one device when empty
    evictions: tuple[str, ...] = ("lru",)
    schedules: tuple[str, ...] = ("prefix",)  # ServingConfig.order
    admission: str = "preempt"
    page_size: int = 16
    chunk_size: int = 256
    prefill_budget: int = 256
    max_running: int = 4
    decode_steps: int = 4

    def __post_init__(self) -> None:
        self.check(
            {
                "seed": 0, "requests": 1, "tenants": 1, "systems": 1, "templates": 1, "system_tokens": 1,
                "template_tokens": 1, "question_tokens": 2, "follow_ups": 0, "skew": 0, "urgent": 0,
                "max_tokens": 1, "num_pages": 1,
            },
            {"orders": ARRIVAL_ORDERS, "evictions": EVICTIONS, "schedules": ORDERS, "admission": ADMISSIONS},
        )  # fmt: skip
        for name in ("follow_ups", "urgent"):
            if getattr(self, name) > 1:
                raise ConfigError(f"config.{name} is {getattr(self, name)}, expected a share from 0 to 1")
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"config.rate is {self.rate}, expected arrivals a second, more than 0")
        for pages in self.num_pages:
            check_geometry(
                num_pages=pages,
                page_size=self.page_size,
                chunk_size=self.chunk_size,
                reuse_granularity="token",
                max_deltas=2,
            )
        self.serving("prefix").budget(page_size=self.page_size, chunk_size=self.chunk_size, grid=1)

    def serving(self, schedule: str, **changes: Any) -> ServingConfig:
        """The loop's limits."""
        values: dict[str, Any] = {
            "max_running": self.max_running,
            "prefill_budget": self.prefill_budget,
            "decode_steps": self.decode_steps,
            "admission": self.admission,
            "order": schedule,
            "max_waiting": self.requests,
        }
        return ServingConfig(**{**values, **changes})


KNOWN_KEYS = fields.known_keys(TraceConfig)


def defaults(**values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict with every key, holding `values`."""
    return fields.defaults_of(TraceConfig, **values)


def resolve(config: Mapping[str, Any], given: Collection[str] = ()) -> TraceConfig:
    """Checks `config` and fills in what it leaves out; see `experiments.fields.build`."""
    return fields.build(TraceConfig, config, SMOKE, given)
