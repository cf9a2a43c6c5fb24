"""In which order cached entries are given up: policies as values, and the queue that they order.

A policy maps what is known of an entry to a key; the smallest key goes first. Keys may only rise
while an entry stays in the cache (use, hits and priority only rise), so the queue need not be
updated when an entry is used: an entry that comes up with an old key is put back under its new one,
at most once for each time it was used. Taking the next entry is O(log n), amortized. (A branch that cuts
an entry in two may lower the worth of what is left under `CostPerByte`; that shows when it comes up.)
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any, Protocol, runtime_checkable

from jaxkv.cache.radix import Node
from jaxkv.errors import ConfigError, HandleError

Key = tuple[float, ...]


@runtime_checkable
class EvictionPolicy(Protocol):
    """What decides which entry goes first."""

    def key(self, entry: Node, page_bytes: int) -> Key:
        """Smaller goes first. May not fall while the entry stays."""
        ...


@dataclasses.dataclass(frozen=True)
class LRU:
    """The entry not used for longest goes first."""

    def key(self, entry: Node, page_bytes: int) -> Key:  # noqa: ARG002
        return (entry.stamp,)


@dataclasses.dataclass(frozen=True)
class LFU:
    """The entry used least often goes first; of equals, the one not used for longest."""

    def key(self, entry: Node, page_bytes: int) -> Key:  # noqa: ARG002
        return (entry.hits, entry.stamp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTL:
    """An entry goes once it was not used for `seconds`; before that, as with `LRU`."""

    seconds: float

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or self.seconds <= 0:
            raise ConfigError(f"TTL.seconds is {self.seconds!r}, expected a positive number")

    def key(self, entry: Node, page_bytes: int) -> Key:  # noqa: ARG002
        return (entry.stamp,)


@dataclasses.dataclass(frozen=True)
class Priority:
    """The entry of lowest `priority` (`engine.prefill(..., priority=)`) goes first, then as with `LRU`."""

    def key(self, entry: Node, page_bytes: int) -> Key:  # noqa: ARG002
        return (entry.priority, entry.stamp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostPerByte:
    """The entry that saves the fewest FLOPs per byte goes first.

    Recomputing tokens s..e-1 behind their prefix costs C_token·(e−s) + C_attn·½(e²−s²) (arXiv
    2609.37725, Eq. 9 with P = e, R = s, G = 0). An entry is worth `floor + uses · cost / bytes`, where
    `floor` is the worth of what was evicted last when the entry was last used: without it, an entry
    that was popular once would never go (GreedyDual-Size-Frequency; Cherkasova 1998).

    Attributes:
      token_flops, attention_flops: C_token and C_attn; an engine puts in its model's where they are None.
    """

    token_flops: float | None = None
    attention_flops: float | None = None

    def __post_init__(self) -> None:
        for name in ("token_flops", "attention_flops"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value >= 0):
                raise ConfigError(f"CostPerByte.{name} is {value!r}, expected 0 or more")

    def filled(self, token_flops: float, attention_flops: float) -> CostPerByte:
        """The same with a model's costs where none are given."""
        token, attention = self.token_flops, self.attention_flops
        return CostPerByte(
            token_flops=token_flops if token is None else token,
            attention_flops=attention_flops if attention is None else attention,
        )

    def cost(self, start: int, end: int) -> float:
        """FLOPs that recomputing positions start..end-1 takes."""
        tokens, attended = end - start, (end**2 - start**2) / 2
        return (self.token_flops or 0.0) * tokens + (self.attention_flops or 0.0) * attended

    def key(self, entry: Node, page_bytes: int) -> Key:
        saved = self.cost(entry.start, entry.saved_end) / entry.size(page_bytes)
        return (entry.floor + entry.hits * saved, entry.stamp)


POLICIES: tuple[type[Any], ...] = (LRU, LFU, TTL, Priority, CostPerByte)


def check_policy(policy: Any) -> EvictionPolicy:
    """Returns `policy`, or raises a ConfigError that lists what there is."""
    if isinstance(policy, type) or not isinstance(policy, EvictionPolicy):
        names = ", ".join(f"{kind.__name__}()" for kind in POLICIES)
        raise ConfigError(f"eviction is {policy!r}, expected a policy: {names}")
    return policy


class Queue:
    """Leaves in the order in which they go. An entry is looked at when it comes up, not before."""

    def __init__(self, policy: EvictionPolicy, page_bytes: int, bit: int) -> None:
        self._policy = policy
        self._page_bytes = page_bytes
        self._bit = bit  # of `Node.queued`: a leaf may stand in two queues
        self._heap: list[tuple[Key, int, Node]] = []
        self._serial = 0
        self._limit = 64

    def push(self, leaf: Node) -> None:
        """Adds a leaf, once."""
        if leaf.queued & self._bit:
            return
        leaf.queued |= self._bit
        self._serial += 1  # breaks ties: nodes have no order
        heapq.heappush(self._heap, (self._policy.key(leaf, self._page_bytes), self._serial, leaf))
        if len(self._heap) > self._limit:
            # Entries of leaves that went another way are dropped before they are most of the heap.
            self._heap = [entry for entry in self._heap if self._stays(entry[2])]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def _stays(self, node: Node) -> bool:
        if node.evictable:
            return True
        node.queued &= ~self._bit
        return False

    def pop(self) -> Node | None:
        """Takes the leaf that goes first; one whose key rose is put back behind others."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.queued &= ~self._bit
            if not node.evictable:
                continue
            if self._policy.key(node, self._page_bytes) <= key:
                return node
            self.push(node)
        return None

    def peek(self) -> Node | None:
        """The leaf that `pop` would take; it stays."""
        node = self.pop()
        if node is not None:
            self.push(node)
        return node

    def check(self) -> set[int]:
        """The ids of the nodes in the queue; a HandleError if one stands there twice."""
        queued = [id(entry[2]) for entry in self._heap]
        if len(queued) != len(set(queued)):
            raise HandleError("the eviction queue has a node twice")
        return set(queued)
