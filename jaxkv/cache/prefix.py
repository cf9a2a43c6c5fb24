"""Which tokens are cached, where, and since when: a radix tree over tokens, not over pages.

Edges end at any token, or only on a grid of chunks. On a grid no page is shared in part: rows of two
pages would shift what attention folds together, and with it the last bits. Children are found by
their first token (chunk), and tokens are always compared: a key is only an index. Roots are digests
of cache contracts, so nothing is shared between two of them. Loops run over the nodes of one path;
tokens and pages are handled by whole-array operations.

References: a node holds one for each of its segment rows. `PrefixIndex.match` takes one for each
row that it returns, **on behalf of the caller**, so that eviction between match and use takes
nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from jaxkv.cache.match import Cause, Match, MatchEnd
from jaxkv.cache.pool import PagePool, as_int32
from jaxkv.cache.radix import TOKEN_BYTES, Node, below, check_node, cut, require_exact, rows_along
from jaxkv.cache.sequence import EMPTY_SEGMENTS, PAGE
from jaxkv.errors import ConfigError, HandleError, TokenError
from jaxkv.typing import Int32

__all__ = ["Cause", "Match", "MatchEnd", "PrefixIndex"]

_ONE = np.int32(1)  # not a Python 1: see pool.py
_NO_PAGES = EMPTY_SEGMENTS[:, PAGE]


class PrefixIndex:
    """Radix tree of token runs over the pages of one pool; see the module for who holds what.

    Attributes:
      pool: the pages that segments refer to.
      grid: nodes begin and end on multiples of this, in tokens; 1 is token granularity.
      nodes: nodes in all trees, roots not counted.
      tokens: tokens in all trees.
    """

    def __init__(self, pool: PagePool, *, grid: int = 1) -> None:
        if grid < 1:
            raise ConfigError(f"grid is {grid}, expected at least 1 token")
        self.pool = pool
        self.grid = grid
        self.nodes = 0
        self.tokens = 0
        self._roots: dict[bytes, Node] = {}
        self._held: Int32 = np.zeros(pool.num_pages, np.int32)  # references of the index, by page
        # Leaves by age. An entry is checked when it is popped, not updated when its leaf is
        # touched: a touch costs nothing, and a leaf moves at most once for each time it was
        # touched.
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._serial = 0

    @property
    def pages(self) -> int:
        """Distinct pages that the index refers to."""
        return int(np.count_nonzero(self._held))

    @property
    def reclaimable(self) -> int:
        """Pages that nobody but the index holds: what `evict` can free at most."""
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

    def peek(self, root: bytes, tokens: Int32, *, limit: int) -> tuple[int, Int32]:
        """Tokens of a prompt i32[n] that `match` would find, and their pages. Pins and ages nothing."""
        path, end = self._walk(self._roots.get(root), tokens, min(limit, len(tokens)))
        length = end.position // self.grid * self.grid
        return length, rows_along(path, length)[:, PAGE]

    def match(
        self, root: bytes, tokens: npt.ArrayLike, *, limit: int | None = None, granularity: int = 1
    ) -> Match:
        """Finds the longest cached prefix and **pins** it. Changes the tree's ages, nothing else.

        The pool gains one reference for each row of the result's segments, in the caller's name:
        give `match.pages` to `pool.release` when the segments are no longer used, also after an
        error.

        Args:
          root: the digest of the cache contract.
          tokens: i32[n], the prompt.
          limit: match at most this many tokens; n - 1 leaves one to compute.
          granularity: the length is cut back to a multiple of this and of the grid, in tokens.
        Raises:
          TokenError: the tokens are not a one-dimensional int32 array.
          ConfigError: a negative limit, or a granularity below 1.
        """
        prompt = as_int32("tokens", tokens, TokenError)
        if limit is not None and limit < 0:
            raise ConfigError(f"limit is {limit}, expected 0 or more tokens")
        if granularity < 1:
            raise ConfigError(f"granularity is {granularity}, expected at least 1 token")
        wanted = len(prompt) if limit is None else min(limit, len(prompt))
        path, end = self._walk(self._roots.get(root), prompt, wanted)
        step = math.lcm(granularity, self.grid)
        length = end.position // step * step
        if length < end.position:
            end = MatchEnd(Cause.GRANULARITY, length, before=end)
        self._touch(path)
        segments = rows_along(path, length)
        self.pool.retain_held(segments[:, PAGE])
        return Match(length, segments, end)

    def insert(self, root: bytes, tokens: npt.ArrayLike, segments: Int32) -> int:
        """Indexes the KV of a prompt. Where its tokens are cached already, the first copy stays.

        The index takes references of its own for what it keeps; those of the caller are untouched.

        Args:
          root: the digest of the cache contract.
          tokens: i32[n], all exact; nothing else may get here (`Sequence.exact_prefix`).
          segments: i32[W, 4], positions 0..n-1 in order, written slots where they were born.
        Returns:
          Tokens that were not cached before.
        Raises:
          ContractError: a slot does not stand where it was born: relocated KV is private.
          HandleError: the segments do not cover the tokens, or a slot is not written or not held.
          TokenError: the tokens are not a one-dimensional int32 array.
        """
        prompt = as_int32("tokens", tokens, TokenError)
        n = len(prompt)
        require_exact(segments, n, self.pool)
        if n % self.grid:
            raise HandleError(f"{n} tokens are published, expected a multiple of the grid {self.grid}")
        if n == 0:
            return 0
        top = self._roots.get(root)
        if top is None:
            top = self._roots[root] = Node(None, 0, b"", EMPTY_SEGMENTS, 0)
        path, end = self._walk(top, prompt, n)
        self._touch(path)
        at = end.position // self.grid * self.grid
        if at == n:
            return 0
        while path and path[-1].start >= at:  # they agree in less than their first chunk
            path.pop()
        parent = path[-1] if path else top
        if at < parent.end:
            parent = self._split(parent, at)
        leaf = Node(parent, at, prompt[at:].tobytes(), cut(segments, at, n), self._clock)
        self._take(leaf.segments[:, PAGE])
        parent.children[self._file(leaf)] = leaf
        self._push(leaf)
        self.nodes += 1
        self.tokens += n - at
        return n - at

    def evict(self, need: int) -> Int32:
        """Forgets the leaves that were not used for longest until `need` pages became free.

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
            while count < need and (leaf := self._pop_oldest()) is not None:
                if self._yields(leaf) or (last_resort and self._hides(leaf)):
                    pages = self._remove(leaf)
                    freed.append(pages)
                    count += len(pages)
                else:
                    passed.append(leaf)
            for leaf in passed:
                self._push(leaf)
        return np.concatenate(freed)

    def drop(self, root: bytes) -> Int32:
        """Forgets everything under a contract: i32[f], the page ids that became free by it."""
        top = self._roots.pop(root, None)
        if top is None:
            return _NO_PAGES
        gone = list(below(top))
        for node in gone:
            node.parent = None
        self.nodes -= len(gone)
        self.tokens -= sum(node.end - node.start for node in gone)
        self._heap = [entry for entry in self._heap if entry[2].parent is not None]
        heapq.heapify(self._heap)
        return self._give_back(np.concatenate([_NO_PAGES, *(n.segments[:, PAGE] for n in gone)]))

    def references(self) -> Iterator[Int32]:
        """The pages each node holds, one entry for each reference: input of `PagePool.check`."""
        for top in self._roots.values():
            for node in below(top):
                yield node.segments[:, PAGE]

    def check(self) -> None:
        """Integrity of trees, counters, references and heap; raises HandleError at a fault."""
        nodes = tokens = 0
        leaves = set()
        for top in self._roots.values():
            for node in below(top):
                check_node(node, self.pool, self.grid)
                nodes += 1
                tokens += node.end - node.start
                if not node.children:
                    leaves.add(id(node))
        if (nodes, tokens) != (self.nodes, self.tokens):
            raise HandleError(
                f"the index counts {self.nodes} nodes and {self.tokens} tokens, "
                f"expected the {nodes} and {tokens} that it has"
            )
        queued = [id(entry[2]) for entry in self._heap]
        if len(queued) != len(set(queued)) or leaves - set(queued):
            raise HandleError("the eviction heap lacks a leaf or has a node twice")
        held = np.zeros(self.pool.num_pages, np.int32)
        for pages in self.references():
            np.add.at(held, pages, _ONE)
        if (held != self._held).any() or (held > self.pool.refcount).any():
            raise HandleError("the index holds other references than it counts")

    def _walk(self, top: Node | None, tokens: Int32, wanted: int) -> tuple[list[Node], MatchEnd]:
        """Nodes from below the root that agree with tokens[:wanted], the last one maybe in part."""
        path: list[Node] = []
        if wanted and (top is None or not top.children):
            return path, MatchEnd(Cause.ABSENT, 0)
        text = tokens[:wanted].tobytes()
        node, at = top, 0
        while at < wanted:
            assert node is not None
            if wanted - at < self.grid:
                return path, MatchEnd(Cause.GRANULARITY, at)
            child = node.children.get(text[TOKEN_BYTES * at : TOKEN_BYTES * (at + self.grid)])
            if child is None:
                differs = Cause.TOKENS if self.grid == 1 else Cause.CHUNK
                return path, MatchEnd(differs if node.children else Cause.EXHAUSTED, at)
            path.append(child)
            if not text.startswith(child.key, TOKEN_BYTES * at):
                if not child.key.startswith(text[TOKEN_BYTES * at :]):
                    run = child.tokens[: wanted - at]
                    unequal = run != tokens[at : at + len(run)]
                    return path, MatchEnd(Cause.TOKENS, at + int(unequal.argmax()))
                break
            at, node = child.end, child
        if wanted == len(tokens):
            return path, MatchEnd(Cause.COMPLETE, wanted)
        cause = Cause.LAST_TOKEN if wanted == len(tokens) - 1 else Cause.LIMIT
        return path, MatchEnd(cause, wanted)

    def _file(self, node: Node) -> bytes:
        """What a node is filed under at its parent."""
        return node.key[: TOKEN_BYTES * self.grid]

    def _touch(self, path: list[Node]) -> None:
        self._clock = clock = self._clock + 1
        for node in path:
            node.stamp = clock

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node at a position; the node keeps the tail, a new one above it gets the head."""
        parent, byte = node.parent, TOKEN_BYTES * (at - node.start)
        assert parent is not None
        rows = len(node.segments)
        upper = cut(node.segments, node.start, at)
        head = Node(parent, node.start, node.key[:byte], upper, node.stamp)
        node.parent = head
        node.hold(at, node.key[byte:], cut(node.segments, at, node.end))
        if len(upper) + len(node.segments) > rows:  # both refer to the page in which the cut lies
            self._take(node.segments[:1, PAGE])
        parent.children[self._file(head)] = head
        head.children[self._file(node)] = node
        self.nodes += 1
        return head

    def _remove(self, leaf: Node) -> Int32:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._file(leaf)]
        leaf.parent = None
        self.nodes -= 1
        self.tokens -= leaf.end - leaf.start
        if parent.parent is not None and not parent.children and not parent.queued:
            self._push(parent)
        return self._give_back(leaf.segments[:, PAGE])

    def _take(self, pages: Int32) -> None:
        self.pool.retain(pages)
        np.add.at(self._held, pages, _ONE)

    def _give_back(self, pages: Int32) -> Int32:
        np.subtract.at(self._held, pages, _ONE)
        return self.pool.release(pages)

    def _push(self, leaf: Node) -> None:
        leaf.queued = True
        self._serial += 1  # breaks ties: nodes have no order
        heapq.heappush(self._heap, (leaf.stamp, self._serial, leaf))

    def _pop_oldest(self) -> Node | None:
        """Takes the oldest leaf off the heap; stale entries are renewed or dropped."""
        while self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.parent is None or node.children:
                continue
            if node.stamp == stamp:
                return node
            self._push(node)
        return None

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
