"""What a turn would cost at a host that prices cached input: the ledger in money instead of FLOPs.

Prices are relative to one plain input token, so that they compare over models and years. Tariffs are
data, given by whoever knows them: `configs/edit_cost.py` has dated ones with their sources.
"""

from __future__ import annotations

import dataclasses
import math

from jaxkv.errors import ConfigError
from jaxkv.reuse.ledger import Ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tariff:
    """How a host prices input that it finds cached. Multiples are of a plain input token's price."""

    name: str
    read: float  # a token read from the cache
    write: float  # a token that is computed and written to the cache; 1 = no surcharge
    output: float  # a generated token
    minimum: int  # tokens that a cached prefix has at least
    step: int  # cached prefixes end on multiples of this, in tokens
    ttl: float  # seconds that a prefix stays after it was last used

    def __post_init__(self) -> None:
        for field in ("read", "write", "output", "ttl"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{self.name}.{field} is {value!r}, expected a number of 0 or more")
        for field in ("minimum", "step"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.name}.{field} is {value!r}, expected a whole number of 1 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bill:
    """One turn, priced. `prompt = read + written + plain`, in tokens."""

    read: int  # from the cache
    written: int  # computed, and cached for the next turn
    plain: int  # computed, and not cached
    generated: int
    cost: float  # in plain input tokens
    uncached: float  # the same turn at a host without any cache

    @property
    def relative(self) -> float:
        """Cost over that without a cache; above 1 where writing cost more than reading saved."""
        return self.cost / self.uncached if self.uncached else math.nan


def bill(tariff: Tariff, *, prompt: int, shared: int, generated: int = 0, age: float = 0.0) -> Bill:
    """Prices a turn.

    Read is the shared prefix, cut back to whole steps, if it reaches the minimum and was used within
    the TTL. Written is what the rest of the prompt adds to the cacheable prefix, in whole steps.

    Args:
      tariff: the host's.
      prompt: tokens of the prompt.
      shared: leading tokens that are those of an earlier prompt.
      generated: tokens of the answer.
      age: seconds since the shared prefix was last used.

    Raises:
      ConfigError: a negative count, or more shared than prompted.
    """
    if not 0 <= shared <= prompt or generated < 0 or age < 0:
        raise ConfigError(
            f"shared is {shared}, generated {generated} and age {age}, expected 0 to the prompt's {prompt} "
            "and 0 or more"
        )

    def cacheable(tokens: int) -> int:
        whole = tokens // tariff.step * tariff.step
        return whole if whole >= tariff.minimum else 0

    read = cacheable(shared) if age <= tariff.ttl else 0
    written = max(cacheable(prompt) - read, 0)
    plain = prompt - read - written
    answer = tariff.output * generated
    return Bill(
        read=read,
        written=written,
        plain=plain,
        generated=generated,
        cost=tariff.read * read + tariff.write * written + plain + answer,
        uncached=prompt + answer,
    )


def bill_ledger(tariff: Tariff, ledger: Ledger, *, generated: int = 0, age: float = 0.0) -> Bill:
    """Prices a ledger's turn as if the host counted relocated KV as read, which none does today.

    For an exact turn nothing is relocated and it is the host's own price. Dropped tokens cost nothing.
    """
    kept = ledger.matched + ledger.relocated
    return bill(tariff, prompt=ledger.prompt - ledger.dropped, shared=kept, generated=generated, age=age)
