"""Nodes of the prefix index and their payload: runs of tokens and the segments that hold their KV.

The index itself (`prefix.py`) knows paths, ages and references; what a payload is, how it is cut
and joined, and what makes it valid is known here alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxkv.cache.pool import PagePool
from jaxkv.cache.sequence import EMPTY_SEGMENTS, FIRST, HI, LO, PAGE, frozen, rows_of
from jaxkv.errors import ContractError, HandleError
from jaxkv.typing import Int32

if TYPE_CHECKING:
    from jaxkv.cache.snapshots import Snapshot
    from jaxkv.cache.tree import Tree

TOKEN_BYTES = 4
_uids = itertools.count(1)


class Node:
    """A run of tokens behind its parent's. A root has no parent and no tokens."""

    __slots__ = (
        "children",
        "continues",
        "created",
        "end",
        "first_hi",
        "floor",
        "hits",
        "key",
        "parent",
        "pins",
        "priority",
        "queued",
        "segments",
        "shared_until",
        "stamp",
        "start",
        "states",
        "tree",
        "uid",
        "used",
    )

    def __init__(
        self, tree: Tree | None, parent: Node | None, start: int, key: bytes, segments: Int32, stamp: int
    ) -> None:
        self.tree = tree  # the contract's
        self.uid: object = next(_uids)
        self.parent = parent  # None: a root, or no longer in the tree
        self.children: dict[bytes, Node] = {}  # by first token, or first chunk of tokens
        self.stamp = stamp  # number of the last match or insert that passed here
        self.used = self.created = 0.0  # seconds, on the index's clock
        self.hits = 1
        self.priority = 0
        self.floor = 0.0  # see `CostPerByte`
        self.pins = 0  # pins at or below this node; it stays as long as there are any
        self.queued = 0  # bits of the eviction queues that have an entry for this node
        self.shared_until = 0  # rows of positions before this are a declared prefix's: no quota counts them
        self.states: dict[int, Snapshot] | None = None  # by position; of models with recurrent layers
        self.hold(start, key, segments)

    def hold(self, start: int, key: bytes, segments: Int32) -> None:
        """Sets what the node holds: tokens from position `start` on, and their segments, i32[W, 4].

        The tokens are bytes of the node's own: comparing them is one memcmp without a temporary,
        and no buffer larger than the run is kept alive.
        """
        self.start = start
        self.key = key
        self.end = start + len(key) // TOKEN_BYTES
        self.segments = segments
        # Whether the first row goes on in the slot behind the parent's last one, and where it ends.
        above = EMPTY_SEGMENTS if self.parent is None else self.parent.segments
        self.continues = bool(
            len(above) and above[-1, PAGE] == segments[0, PAGE] and above[-1, HI] == segments[0, LO]
        )
        self.first_hi = int(segments[0, HI]) if self.continues else 0

    @property
    def evictable(self) -> bool:
        """Whether it is an unpinned leaf in a tree."""
        return self.parent is not None and not self.children and not self.pins

    @property
    def charge(self) -> int:
        """Segment rows that count towards the domain's quota."""
        rows = self.segments
        if self.shared_until <= self.start:
            return len(rows)
        return int(np.count_nonzero(rows[:, FIRST] + rows[:, LO] >= self.shared_until))

    @property
    def saved_end(self) -> int:
        """Where what it saves from recomputing ends: with recurrent layers, at its last snapshot."""
        if self.tree is None or not self.tree.state_bytes:
            return self.end
        return max(self.states or (self.start,))

    def size(self, page_bytes: int) -> int:
        """Bytes of its pages and snapshots."""
        states = len(self.states) * self.tree.state_bytes if self.states and self.tree else 0
        return len(self.segments) * page_bytes + states

    @property
    def tokens(self) -> Int32:
        """i32[end - start]."""
        return np.frombuffer(self.key, np.int32)


class Place(NamedTuple):
    """Where the index has, or had, the first `position` tokens of a text: in `node` and those above it.

    A hint, kept beside a sequence that begins with these tokens: they were compared when it was made, and
    `PrefixIndex.confirm` says what is left of it.
    """

    node: Node
    position: int

    def within(self, length: int) -> Place:
        """The same for no more than the first `length` tokens."""
        return Place(self.node, min(self.position, length))


def path_to(node: Node) -> list[Node]:
    """The nodes from below the root to a node, itself included."""
    path = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    path.reverse()
    return path


def text_to(node: Node) -> bytes:
    """The bytes of all tokens from position 0 to the end of a node."""
    return b"".join([each.key for each in path_to(node)])


def below(top: Node) -> Iterator[Node]:
    """All nodes under `top`, itself not included."""
    stack = list(top.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def cut(segments: Int32, start: int, end: int) -> Int32:
    """The part of gapless `segments` that stands at positions start..end-1. A new array."""
    part = segments[slice(*rows_of(segments, start, end))].copy()
    part[0, LO] = start - part[0, FIRST]
    part[-1, HI] = min(part[-1, HI], end - part[-1, FIRST])
    return frozen(part)


def rows_along(path: list[Node], length: int) -> Int32:
    """Segments of positions 0..length-1 along a path, rows of one page joined where nodes meet."""
    parts: list[Int32] = []
    joints: list[int] = []  # rows that go on in the next node, and where they end
    highs: list[int] = []
    count = 0
    for node in path:
        if node.start >= length:
            break
        part = node.segments
        if node.end > length:
            part = cut(part, node.start, length)
        if node.continues:
            joints.append(count - 1)
            highs.append(node.first_hi)
            part = part[1:]
        parts.append(part)
        count += len(part)
    if not parts:
        return EMPTY_SEGMENTS
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate(parts)
    if joints:
        rows[joints, HI] = highs  # a row that several nodes continue takes the last one's
        rows[-1, HI] = min(rows[-1, HI], length - rows[-1, FIRST])
    return frozen(rows)


def exact_rows(segments: Int32, start: int, at: int, n: int, pool: PagePool) -> Int32:
    """The rows of positions at..n-1 out of `segments`, which hold start..n-1; each slot was born there.

    Only these rows are read, so that publishing costs what is new, and that is enough: rows before `at` are
    not taken, as the index has these tokens already. What it has came through here when it was new, and it
    stays exact: slots are written once, and a page keeps its birth while the index holds it.

    Raises:
      ContractError: a slot does not stand where it was born.
      HandleError: wrong form, gaps, pages outside the pool or free, slots not written.
    """
    if segments.ndim != 2 or segments.shape[1] != 4 or segments.dtype != np.int32:
        raise HandleError(f"segments are {segments.dtype}{list(segments.shape)}, expected int32[W, 4]")
    if not len(segments) or n == start:
        if len(segments) or n != start:
            raise HandleError(f"{len(segments)} segments are given for {n - start} tokens")
        return segments
    # Python integers: as int32 scalars, sums could wrap.
    (_, low, _, born), (_, _, high, last) = segments[0].tolist(), segments[-1].tolist()
    if last + high != n:
        raise HandleError(f"segments end at position {last + high}, expected the token count {n}")
    if at == n and born + low == start:
        return segments[:0]
    row, _ = rows_of(segments, at, n)
    rows = segments[row:]
    page, lo, hi, first = np.ascontiguousarray(rows.T)
    begin, end = first + lo, first + hi
    gaps = born + low != start or begin[0] > at or end[0] <= at
    if gaps or lo.min() < 0 or (begin >= end).any() or (begin[1:] != end[:-1]).any():
        raise HandleError(
            f"segments overlap, leave gaps or are empty, expected positions {start} to {n - 1} in order"
        )
    if page.view(np.uint32).max() >= pool.num_pages:
        raise HandleError(f"segments name pages outside 0 to {pool.num_pages - 1}")
    if (moved := first != pool.birth[page]).any():
        bad = int(moved.argmax())
        raise ContractError(
            f"page {page[bad]} stands at {first[bad]} and was born at {pool.birth[page[bad]]}, "
            "expected exact KV only: relocated KV is private to its sequence"
        )
    if (unwritten := (hi > pool.filled[page]) | (pool.refcount[page] == 0)).any():
        bad = int(unwritten.argmax())
        raise HandleError(
            f"page {page[bad]} has {pool.filled[page[bad]]} slots written and "
            f"{pool.refcount[page[bad]]} references, expected a held page written up to {hi[bad]}"
        )
    return cut(rows, at, n)


def check_node(node: Node, pool: PagePool, grid: int) -> None:
    """Integrity of one node against its parent and the pool; raises HandleError."""
    parent, rows = node.parent, node.segments
    where = f"the node at positions {node.start} to {node.end}"
    if parent is None or node.start != parent.end or node.start >= node.end:
        raise HandleError(f"{where} does not follow its parent")
    if node.start % grid or node.end % grid:
        raise HandleError(f"{where} is off the grid of {grid} tokens")
    if parent.children.get(node.key[: TOKEN_BYTES * grid]) is not node:
        raise HandleError(f"{where} is not filed under its first tokens")
    if parent.parent is not None and node.stamp > parent.stamp:
        raise HandleError(f"{where} is younger than its parent")
    if parent.pins < node.pins and parent.parent is not None:
        raise HandleError(f"{where} is pinned and its parent is not")
    if node.evictable and not node.queued & 1:
        raise HandleError(f"{where} is a leaf that eviction does not know")
    begin, end = rows[:, FIRST] + rows[:, LO], rows[:, FIRST] + rows[:, HI]
    if begin[0] != node.start or end[-1] != node.end or (begin[1:] != end[:-1]).any():
        raise HandleError(f"{where} has segments for positions {begin[0]} to {end[-1]}")
    if (rows[:, FIRST] != pool.birth[rows[:, PAGE]]).any() or (begin >= end).any():
        raise HandleError(f"{where} has segments that do not stand where they were born")
    if (rows[:, HI] > pool.filled[rows[:, PAGE]]).any():
        raise HandleError(f"{where} has slots that were not written")
