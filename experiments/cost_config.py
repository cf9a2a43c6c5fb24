"""What an edit_cost run is, typed and checked, prices included."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from experiments import fields
from experiments.config import TINY_MODEL
from jaxkv.checks import check_geometry
from jaxkv.errors import ConfigError, nearest
from jaxkv.reuse.bill import Tariff
from jaxkv.reuse.policies import policy_from_name

FIGURES = ("read", "write", "output", "minimum", "step", "ttl")
_KEYS = ("value", "date", "source", "confirmed")

SMOKE: dict[str, Any] = {
    "model": TINY_MODEL,
    "context": 320,
    "changed": 48,
    "generated": 4,
    "page_size": 16,
    "chunk_size": 64,
    "repeats": 1,
}


@dataclasses.dataclass(frozen=True)
class Price:
    """One figure of a tariff, with where it is from."""

    value: float
    date: str  # ISO, when it was looked up
    source: str
    confirmed: bool  # whether the source was read; False: taken on hearsay


@dataclasses.dataclass(frozen=True)
class PricedTariff:
    """A tariff and the provenance of its figures."""

    tariff: Tariff
    prices: Mapping[str, Price]  # by figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostConfig(fields.Fields):
    """Three edits of one context, each under every policy; then the same on paper for a large model."""

    experiment: str = "edit_cost"
    name: str = "edit_cost"

    context: int = 2000  # tokens cached before the edit
    changed: int = 200  # tokens appended, or replaced in the middle and at the start
    generated: int = 16
    policies: tuple[str, ...] = ("exact", "scr", "first_k(32)")
    page_size: int = 16
    chunk_size: int = 512
    num_pages: int = 0  # 0: what the run needs
    repeats: int = 3  # timings of an edit; the fastest counts
    age: float = 60.0  # seconds between two turns: what a TTL is compared with
    prices: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # tariff -> figure -> Price's fields

    paper_prompt: int = 20_000
    paper_changed: int = 2_000
    paper_generated: int = 500

    def __post_init__(self) -> None:
        self.check(
            {
                "seed": 0, "context": 16, "changed": 1, "generated": 1, "num_pages": 0, "repeats": 1,
                "age": 0, "paper_prompt": 2, "paper_changed": 1, "paper_generated": 0,
            },
            {},
        )  # fmt: skip
        for whole, part in (("context", "changed"), ("paper_prompt", "paper_changed")):
            if 2 * getattr(self, part) > getattr(self, whole):
                raise ConfigError(
                    f"config.{part} is {getattr(self, part)}, expected at most half of {whole} "
                    f"{getattr(self, whole)}"
                )
        check_geometry(
            num_pages=self.num_pages or 1,
            page_size=self.page_size,
            chunk_size=self.chunk_size,
            reuse_granularity="token",
            max_deltas=2,
        )
        self.tariffs()

    def tariffs(self) -> list[PricedTariff]:
        """The tariffs of `prices`.

        Raises:
          ConfigError: a figure is missing, unknown or without date or source.
        """
        return [_tariff(name, figures) for name, figures in self.prices.items()]


def _tariff(name: str, figures: Any) -> PricedTariff:
    where = f"config.prices.{name}"
    if not isinstance(figures, Mapping):
        raise ConfigError(f"{where} is {figures!r}, expected a mapping of figures")
    for key in figures:
        if key not in FIGURES:
            raise ConfigError(f"{where}.{key} is unknown{nearest(str(key), FIGURES)}")
    prices = {}
    for figure in FIGURES:
        if figure not in figures:
            raise ConfigError(f"{where}.{figure} is missing, expected a value with date and source")
        given = figures[figure]
        if not isinstance(given, Mapping) or set(given) != set(_KEYS):
            raise ConfigError(f"{where}.{figure} is {given!r}, expected the keys {', '.join(_KEYS)}")
        try:
            datetime.date.fromisoformat(given["date"])
        except (TypeError, ValueError):
            raise ConfigError(f"{where}.{figure}.date is {given['date']!r}, expected YYYY-MM-DD") from None
        if not isinstance(given["source"], str) or not given["source"].strip():
            raise ConfigError(f"{where}.{figure}.source is {given['source']!r}, expected where it is from")
        if not isinstance(given["confirmed"], bool):
            raise ConfigError(f"{where}.{figure}.confirmed is {given['confirmed']!r}, expected True or False")
        prices[figure] = Price(**given)
    return PricedTariff(Tariff(name=name, **{figure: p.value for figure, p in prices.items()}), prices)  # type: ignore[arg-type]


KNOWN_KEYS = fields.known_keys(CostConfig)


def defaults(**values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict with every key, holding `values`."""
    return fields.defaults_of(CostConfig, **values)


def resolve(config: Mapping[str, Any], given: Collection[str] = ()) -> CostConfig:
    """Checks `config` and fills in what it leaves out; see `experiments.fields.build`."""
    typed = fields.build(CostConfig, config, SMOKE, given)
    policies = [str(policy_from_name(name)) for name in typed.policies]
    return dataclasses.replace(typed, policies=("exact", *(p for p in policies if p != "exact")))
