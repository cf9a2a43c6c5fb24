"""What a cache did, as numbers: hits by token, ends of matches by cause, evictions, lifetimes."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections import Counter

from jaxkv.cache.domain import Domain
from jaxkv.cache.match import MatchEnd

MAX_DOMAINS = 10_000  # domains whose counters are kept; those not seen for longest are forgotten


@dataclasses.dataclass
class Distribution:
    """Count, mean and a histogram over powers of two of values that are not negative."""

    count: int = 0
    total: float = 0.0
    buckets: Counter[int] = dataclasses.field(default_factory=Counter)  # exponent e: 2^(e-1) <= value < 2^e

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.buckets[math.frexp(value)[1] if value > 0 else -64] += 1

    @property
    def mean(self) -> float:
        """0 where nothing was counted."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """An upper bound of the value below which `share` of all lie, within a factor of two."""
        seen = 0
        for exponent in sorted(self.buckets):
            seen += self.buckets[exponent]
            if seen >= share * self.count:
                return math.ldexp(1.0, exponent)
        return 0.0


class Metrics:
    """Counters of one cache. They outlive the index, which may be built anew."""

    def __init__(self) -> None:
        self.lifetimes = Distribution()  # seconds from insertion to eviction
        self.gaps = Distribution()  # seconds from one use of an entry to the next
        self.removed: Counter[str] = Counter()  # entries and tokens by cause: "evicted", "evicted_tokens"
        self.lookups: Counter[str] = Counter()
        self._domains: collections.OrderedDict[Domain, Counter[str]] = collections.OrderedDict()

    def remove(self, cause: str, tokens: int, lifetime: float) -> None:
        """Counts an entry that went."""
        self.removed[cause] += 1
        self.removed[f"{cause}_tokens"] += tokens
        self.lifetimes.add(lifetime)

    def look_up(self, owner: Domain, wanted: int, matched: int, end: MatchEnd) -> None:
        """Counts a lookup of `wanted` tokens for a domain, and for all."""
        mine = self._domains.get(owner)
        if mine is None:
            mine = self._domains[owner] = Counter()
            if len(self._domains) > MAX_DOMAINS:
                self._domains.popitem(last=False)
        self._domains.move_to_end(owner)
        for counter in (self.lookups, mine):
            counter["lookups"] += 1
            counter["lookup_tokens"] += wanted
            counter["hit_tokens"] += matched
            counter[f"end_{end.limiting}"] += 1

    def of(self, owner: Domain) -> Counter[str]:
        """A domain's own lookups; empty where it was never seen."""
        return Counter(self._domains.get(owner, {}))


class Ghosts:
    """Which runs went, and why, for as long as there is room: so that a match can say so.

    A run is known by the node behind which it stood and by its first tokens. Nodes belong to one root,
    so nothing is said about another domain's.
    """

    MOST = 4096
    TOKENS = 16  # compared, at most; in a tree on a grid, a whole chunk is the key already

    def __init__(self) -> None:
        self._runs: collections.OrderedDict[tuple[object, bytes], tuple[bytes, str]] = (
            collections.OrderedDict()
        )

    def add(self, behind: object, key: bytes, run: bytes, cause: str) -> None:
        """Notes that the run filed under `key` behind a node went."""
        self._runs[behind, key] = run[: 4 * self.TOKENS], cause
        self._runs.move_to_end((behind, key))
        if len(self._runs) > self.MOST:
            self._runs.popitem(last=False)

    def drop(self, behind: object, key: bytes) -> None:
        """Forgets one: the run is back."""
        self._runs.pop((behind, key), None)

    def find(self, behind: object, key: bytes, text: bytes, at: int) -> str | None:
        """Why the run that goes on with `text[at:]` behind a node went, if that is known."""
        if not self._runs:
            return None
        known = self._runs.get((behind, key))
        if known is None:
            return None
        run = known[0][: len(text) - at]
        return known[1] if text.startswith(run, at) else None

    def __len__(self) -> int:
        return len(self._runs)
