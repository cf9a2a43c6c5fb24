"""What stays in the prefix index and what goes: references, eviction, quotas, expiry, pins.

References: a node holds one for each of its segment rows, and a pin one more for each row that it
covers, so that nobody counts on its pages. Work grows with what goes, was used since, or is in use;
never with the trees.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.eviction import LRU, TTL, CostPerByte, EvictionPolicy, Queue
from jaxkv.cache.metrics import Ghosts, Metrics
from jaxkv.cache.pool import PagePool
from jaxkv.cache.radix import TOKEN_BYTES, Node, below, check_node, cut, text_to
from jaxkv.cache.sequence import EMPTY_SEGMENTS, FIRST, HI, PAGE
from jaxkv.cache.snapshots import Snapshots
from jaxkv.cache.tree import ALL, Gone, Pinned, Tree
from jaxkv.errors import ConfigError, HandleError
from jaxkv.typing import Int32

_ONE = np.int32(1)  # not a Python 1: see pool.py
pin_ids = itertools.count(1)  # not the index's: a pin outlives an index that is built anew
_NO_PAGES = EMPTY_SEGMENTS[:, PAGE]
MAX_IDLE = 4096  # empty trees that are kept, for what is known of their domains


class Retention:
    """The part of `PrefixIndex` that decides what stays."""

    def __init__(
        self,
        pool: PagePool,
        *,
        grid: int = 1,
        policy: EvictionPolicy | None = None,
        page_bytes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
        quota_of: Callable[[CacheContract], int | None] = lambda _: None,
        snapshots: Snapshots | None = None,
    ) -> None:
        if grid < 1:
            raise ConfigError(f"grid is {grid}, expected at least 1 token")
        self.pool = pool
        self.grid = grid
        self.nodes = 0
        self.tokens = 0
        self.policy = policy or LRU()
        self.page_bytes = page_bytes
        self.clock = clock
        self.metrics = metrics or Metrics()
        self.ghosts = Ghosts()
        self.gone: list[Gone] | None = None  # a list: evicted entries are noted there
        self.snapshots = snapshots  # with recurrent layers
        self._quota_of = quota_of
        self._ages = isinstance(self.policy, CostPerByte)
        self._floor = 0.0
        self._trees: dict[bytes, Tree] = {}
        self._idle: dict[bytes, None] = {}  # empty trees, oldest first
        self._held: Int32 = np.zeros(pool.num_pages, np.int32)  # references of nodes, by page
        self._queue = Queue(self.policy, page_bytes, ALL)
        self._pins: dict[int, Pinned] = {}
        self._pin_ends: list[tuple[float, int]] = []
        self._stamp = 0

    @property
    def pages(self) -> int:
        """Distinct pages that the index refers to."""
        return int(np.count_nonzero(self._held))

    @property
    def reclaimable(self) -> int:
        """Pages that only unpinned entries hold: what `evict` can free at most."""
        return int(np.count_nonzero(self._held == self.pool.refcount)) - self.pool.free_count

    def obtainable(self, released: Iterable[Int32], kept: Int32) -> int:
        """Pages that are free, or would be if others gave back `released` and the index all but `kept`.

        Args:
          released: references of others, i32[n] each.
          kept: page ids i32[n] that are not to be counted.
        """
        ours = self._held.copy()
        for pages in released:
            np.add.at(ours, pages, _ONE)
        obtainable = ours == self.pool.refcount
        obtainable[kept] = False
        return int(np.count_nonzero(obtainable))

    @property
    def pinned_pages(self) -> int:
        """Distinct pages that pins hold."""
        pages = [pinned.pages for pinned in self._pins.values()]
        return len(np.unique(np.concatenate(pages))) if pages else 0

    def trees(self) -> Iterator[Tree]:
        """Every contract's tree that is not empty."""
        return (tree for tree in self._trees.values() if not tree.empty)

    def tree(self, root: bytes) -> Tree | None:
        """A contract's tree, if anything was cached under it."""
        return self._trees.get(root)

    def evict(self, need: int) -> Int32:
        """Forgets leaves, in the policy's order, until `need` pages became free.

        Leaves whose pages are all in use elsewhere are passed over; they are dropped only where
        nothing else is left, and only if reclaimable pages stand at or above them. The work grows
        with what is evicted, touched since, or in use; not with the tree.

        Returns:
          i32[f] freed page ids, f >= need. Empty, and nothing is forgotten, if `reclaimable` <
          need: a request that cannot be met must not cost others their cache.
        """
        if need <= 0 or self.reclaimable < need:
            return _NO_PAGES
        freed: list[Int32] = []
        count = 0
        for last_resort in (False, True):
            passed: list[Node] = []
            while count < need and (leaf := self._queue.pop()) is not None:
                if self._yields(leaf) or (last_resort and self._hides(leaf)):
                    if self._ages:
                        self._floor = max(self._floor, self.policy.key(leaf, self.page_bytes)[0])
                    pages = self._remove(leaf, "evicted")
                    freed.append(pages)
                    count += len(pages)
                else:
                    passed.append(leaf)
            for leaf in passed:
                self._enqueue(leaf)
        return np.concatenate(freed)

    def expire(self) -> Int32:
        """Takes off pins whose time has come and forgets entries that a TTL ends: i32[f] freed pages."""
        now = self.clock()
        while self._pin_ends and self._pin_ends[0][0] <= now:
            self.unpin(heapq.heappop(self._pin_ends)[1])
        freed: list[Int32] = [_NO_PAGES]
        if isinstance(self.policy, TTL):
            while (leaf := self._queue.peek()) is not None and leaf.used + self.policy.seconds <= now:
                freed.append(self._remove(leaf, "expired"))
        return np.concatenate(freed)

    def set_quota(self, root: bytes, quota: int | None) -> None:
        """Limits the bytes of pages and snapshots of a contract; `enforce` makes it so."""
        tree = self._trees.get(root)
        if tree is not None:
            tree.limit(quota, self.policy, self.page_bytes)

    def enforce(self, root: bytes) -> Int32:
        """Brings a tree within its quota: its own entries and snapshots go, and last the newest is cut short.

        Returns:
          i32[f], pages that became free.
        """
        tree = self._trees.get(root)
        if tree is None or not self._over(tree):
            return _NO_PAGES
        freed: list[Int32] = [_NO_PAGES]
        newest = tree.newest
        for spared in (newest, None):
            if spared is not None:
                spared.pins += 1
            while self._over(tree) and (pages := self._give_own(tree)) is not None:
                freed.append(pages)
            if spared is not None:
                spared.pins -= 1
                if spared.evictable:
                    freed.append(self._fit(spared))
                if spared.evictable:
                    self._enqueue(spared)
        return np.concatenate(freed)

    def _over(self, tree: Tree) -> bool:
        return tree.quota is not None and tree.charge(self.page_bytes) > tree.quota

    def _give_own(self, tree: Tree) -> Int32 | None:
        """Drops a tree's leaf or snapshot of least worth: pages that became free; None if it has none."""
        assert tree.own is not None
        leaf, store = tree.own.pop(), self.snapshots
        least = None if store is None else store.least(self.policy, tree)
        if store is None or least is None or (leaf and least[0] > self.policy.key(leaf, self.page_bytes)):
            return None if leaf is None else self._remove(leaf, "quota")
        store.give_up(least[1])
        if leaf is not None:
            tree.own.push(leaf)
        return _NO_PAGES

    def _fit(self, leaf: Node) -> Int32:
        """Cuts the newest leaf to what its quota leaves beside one snapshot, if any; then other snapshots go.

        KV in front of no snapshot saves nothing, so room for one is worth more than the last tokens.
        """
        tree, store = leaf.tree, self.snapshots
        assert tree is not None
        if tree.quota is None or not self._over(tree):
            return _NO_PAGES
        room = max(tree.quota - (tree.state_bytes if tree.states else 0), 0)
        freed = self._shorten(leaf, tree.rows - room // self.page_bytes)
        while store is not None and tree.rows * self.page_bytes <= room and self._over(tree):
            least = store.least(self.policy, tree)
            if least is None:
                break
            store.give_up(least[1])
        return freed

    def drop(self, root: bytes) -> Int32:
        """Forgets everything under a contract: i32[f], the page ids that became free by it."""
        tree = self._trees.pop(root, None)
        self._idle.pop(root, None)
        if tree is None:
            return _NO_PAGES
        for number in [n for n, pinned in self._pins.items() if pinned.node.tree is tree]:
            self.unpin(number)
        gone = list(below(tree.top))
        for node in gone:
            node.parent = None
            if self.snapshots is not None:
                self.snapshots.drop(node)
        self.nodes -= tree.nodes
        self.tokens -= tree.tokens
        return self._give_back(np.concatenate([_NO_PAGES, *(n.segments[:, PAGE] for n in gone)]))

    def unpin(self, number: int) -> None:
        """Takes a pin off; one that has expired is off already."""
        pinned = self._pins.pop(number, None)
        if pinned is None:
            return
        node: Node | None = pinned.node
        while node is not None:
            node.pins -= 1
            if node.evictable:
                self._enqueue(node)
            node = node.parent
        self.pool.release(pinned.pages)  # frees nothing: the nodes hold the same pages

    def references(self) -> Iterator[Int32]:
        """The pages that nodes and pins hold, one entry a reference: input of `PagePool.check`."""
        yield from self._node_pages()
        for pinned in self._pins.values():
            yield pinned.pages

    def _node_pages(self) -> Iterator[Int32]:
        for tree in self._trees.values():
            for node in below(tree.top):
                yield node.segments[:, PAGE]

    def check(self) -> None:
        """Integrity of trees, counters, references and queues; raises HandleError at a fault."""
        nodes = tokens = 0
        leaves = set()
        for tree in self._trees.values():
            inside = list(below(tree.top))
            own = set() if tree.own is None else tree.own.check()
            for node in inside:
                check_node(node, self.pool, self.grid)
                if node.evictable:
                    leaves.add(id(node))
                    if tree.own is not None and id(node) not in own:
                        raise HandleError("a domain's eviction queue lacks a leaf")
            count, length = len(inside), sum(node.end - node.start for node in inside)
            rows = sum(node.charge for node in inside)
            if sum(len(node.states or ()) for node in inside) != tree.states:
                raise HandleError(f"a tree counts {tree.states} snapshots, expected those beside its nodes")
            if (count, length, rows) != (tree.nodes, tree.tokens, tree.rows):
                raise HandleError(
                    f"a tree counts {tree.nodes} nodes, {tree.tokens} tokens and {tree.rows} rows, "
                    f"expected the {count}, {length} and {rows} that it has"
                )
            if tree.empty != (tree.root in self._idle):
                raise HandleError("the list of empty trees is wrong")
            nodes += count
            tokens += length
        if (nodes, tokens) != (self.nodes, self.tokens):
            raise HandleError(
                f"the index counts {self.nodes} nodes and {self.tokens} tokens, "
                f"expected the {nodes} and {tokens} that it has"
            )
        if self.snapshots is not None:
            self.snapshots.check(node for tree in self._trees.values() for node in below(tree.top))
        if leaves - self._queue.check():
            raise HandleError("the eviction queue lacks a leaf")
        held = np.zeros(self.pool.num_pages, np.int32)
        for pages in self._node_pages():
            np.add.at(held, pages, _ONE)
        if (held != self._held).any() or (held > self.pool.refcount).any():
            raise HandleError("the index holds other references than it counts")

    def _tree_for(self, root: bytes, contract: CacheContract | None) -> Tree:
        tree = self._trees.get(root)
        if tree is None:
            tree = self._trees[root] = Tree(root, contract)
            tree.state_bytes = 0 if self.snapshots is None else self.snapshots.nbytes
            self._idle[root] = None
            if contract is not None:
                tree.limit(self._quota_of(contract), self.policy, self.page_bytes)
            if len(self._idle) > MAX_IDLE:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._trees[oldest]
        return tree

    def _file(self, node: Node) -> bytes:
        """What a node is filed under at its parent."""
        return node.key[: TOKEN_BYTES * self.grid]

    def _enqueue(self, leaf: Node) -> None:
        self._queue.push(leaf)
        tree = leaf.tree
        if tree is not None and tree.own is not None:
            tree.own.push(leaf)

    def _remove(self, leaf: Node, cause: str) -> Int32:
        """Takes a leaf out of its tree, notes why, and returns the pages that became free."""
        parent, tree = leaf.parent, leaf.tree
        assert parent is not None
        assert tree is not None
        tokens = leaf.end - leaf.start
        key = self._file(leaf)
        self.ghosts.add(parent.uid, key, leaf.key, cause)
        self.metrics.remove(cause, tokens, self.clock() - leaf.created)
        if self.gone is not None and tree.contract is not None and cause != "expired":
            states = tuple((p, snapshot.slot) for p, snapshot in (leaf.states or {}).items())
            self.gone.append(Gone(tree.contract, text_to(leaf), leaf.start, leaf.segments, states))
        if self.snapshots is not None:
            self.snapshots.drop(leaf)
        tree.rows -= leaf.charge
        tree.tokens -= tokens
        tree.nodes -= 1
        self.tokens -= tokens
        self.nodes -= 1
        del parent.children[key]
        leaf.parent = None
        if parent.evictable:
            self._enqueue(parent)
        elif tree.empty:
            self._idle[tree.root] = None
        return self._give_back(leaf.segments[:, PAGE])

    def _shorten(self, leaf: Node, rows: int) -> Int32:
        """Cuts the last `rows` segment rows off a leaf, and what the grid asks for: i32[f] freed pages."""
        if rows <= 0:
            return _NO_PAGES
        keep = leaf.segments[: max(len(leaf.segments) - rows, 0)]
        end = int(keep[-1, FIRST] + keep[-1, HI]) if len(keep) else leaf.start
        end = end // self.grid * self.grid
        tree = leaf.tree
        assert tree is not None
        if end <= leaf.start:
            return self._remove(leaf, "quota")
        key = leaf.key[TOKEN_BYTES * (end - leaf.start) :]
        tokens, before, old = leaf.end - end, leaf.charge, leaf.segments
        leaf.hold(leaf.start, leaf.key[: -len(key)], cut(old, leaf.start, end))
        if self.snapshots is not None:
            self.snapshots.drop(leaf, beyond=end)
        self.ghosts.add(leaf.uid, key[: TOKEN_BYTES * self.grid], key, "quota")
        self.metrics.remove("quota", tokens, self.clock() - leaf.created)
        tree.rows -= before - leaf.charge
        tree.tokens -= tokens
        self.tokens -= tokens
        return self._give_back(old[len(leaf.segments) :, PAGE])

    def _take(self, pages: Int32) -> None:
        self.pool.retain(pages)
        np.add.at(self._held, pages, _ONE)

    def _give_back(self, pages: Int32) -> Int32:
        np.subtract.at(self._held, pages, _ONE)
        return self.pool.release(pages)

    def _yields(self, leaf: Node) -> bool:
        """Whether dropping the leaf frees a page at once."""
        return bool((self.pool.refcount[leaf.segments[:, PAGE]] == 1).any())

    def _hides(self, leaf: Node) -> bool:
        """Whether the leaf or a node above it refers to a page that only the index holds."""
        node: Node | None = leaf
        while node is not None:
            pages = node.segments[:, PAGE]
            if (self.pool.refcount[pages] == self._held[pages]).any():
                return True
            node = node.parent
        return False
