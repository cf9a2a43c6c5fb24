"""One contract's tree in the prefix index, what it may hold, and the pins on it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.eviction import EvictionPolicy, Queue
from jaxkv.cache.radix import Node, below
from jaxkv.cache.sequence import EMPTY_SEGMENTS
from jaxkv.typing import Int32

ALL, OWN = 1, 2  # bits of the queue over all trees, and of a tree's own


class Tree:
    """The runs cached under one root key. Its own queue exists only where a quota needs it."""

    __slots__ = (
        "contract",
        "newest",
        "nodes",
        "own",
        "quota",
        "root",
        "rows",
        "state_bytes",
        "states",
        "tokens",
        "top",
    )

    def __init__(self, root: bytes, contract: CacheContract | None) -> None:
        self.root = root
        self.contract = contract
        self.top = Node(self, None, 0, b"", EMPTY_SEGMENTS, 0)
        self.top.uid = root  # what is known of a tree that went stays known to the next
        self.nodes = 0
        self.tokens = 0
        self.rows = 0  # segment rows that count towards the quota: an upper bound of its pages
        self.quota: int | None = None  # bytes of pages and snapshots
        self.own: Queue | None = None
        self.newest: Node | None = None  # the entry that was inserted last
        self.state_bytes = 0  # of a snapshot; 0 without recurrent layers
        self.states = 0  # snapshots beside its nodes

    def charge(self, page_bytes: int) -> int:
        """Bytes that count towards the quota."""
        return self.rows * page_bytes + self.states * self.state_bytes

    def limit(self, quota: int | None, policy: EvictionPolicy, page_bytes: int) -> None:
        """Sets or lifts the quota, in bytes."""
        self.quota = quota
        if quota is None:
            self.own = None
            for node in below(self.top):
                node.queued &= ~OWN
        elif self.own is None:
            self.own = Queue(policy, page_bytes, OWN)
            for node in below(self.top):
                if node.evictable:
                    self.own.push(node)

    @property
    def empty(self) -> bool:
        return not self.top.children


@dataclasses.dataclass(frozen=True)
class Pin:
    """Keeps the first `length` tokens of a text in the cache until it expires or is taken off."""

    id: int
    length: int  # tokens that were cached and are pinned; 0: nothing was
    until: float | None  # on the engine's clock, seconds; None: until it is taken off


@dataclasses.dataclass
class Pinned:
    """What the index keeps of a pin."""

    pin: Pin
    node: Node
    pages: Int32  # references of the pin's own, so that nobody counts on these pages


class Gone(NamedTuple):
    """An entry that was evicted. Its slots keep their contents until somebody writes."""

    contract: CacheContract
    text: bytes  # tokens 0..end-1, int32
    start: int
    segments: Int32  # i32[W, 4], positions start..end-1
    states: tuple[tuple[int, int], ...] = ()  # position and slot of its snapshots
