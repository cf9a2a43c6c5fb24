"""Which tokens are cached, where, and since when: a radix tree over tokens, not over pages.

Edges end at any token, or only on a grid of chunks. On a grid no page is shared in part: rows of two
pages would shift what attention folds together, and with it the last bits. Children are found by
their first token (chunk), and tokens are always compared: a key is only an index. Roots are digests
of cache contracts, so nothing is shared between two of them, but what is declared public. Loops run
over the nodes of one path; tokens and pages are handled by whole-array operations.

References: a node holds one for each of its segment rows. `PrefixIndex.match` takes one for each
row that it returns, **on behalf of the caller**, so that eviction between match and use takes
nothing.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.match import Cause, Match, MatchEnd
from jaxkv.cache.pool import as_int32
from jaxkv.cache.radix import TOKEN_BYTES, Node, Place, cut, exact_rows, path_to, rows_along
from jaxkv.cache.retention import Retention, pin_ids
from jaxkv.cache.sequence import FIRST, HI, PAGE
from jaxkv.cache.snapshots import Snapshot
from jaxkv.cache.tree import Pin, Pinned
from jaxkv.errors import ConfigError, HandleError, TokenError
from jaxkv.typing import Int32

__all__ = ["Cause", "Match", "MatchEnd", "PrefixIndex"]


class PrefixIndex(Retention):
    """Radix tree of token runs over the pages of one pool; see the module for who holds what.

    Attributes:
      pool: the pages that segments refer to.
      grid: nodes begin and end on multiples of this, in tokens; 1 is token granularity.
      nodes: nodes in all trees, roots not counted.
      tokens: tokens in all trees.
    """

    def match(
        self,
        root: bytes,
        tokens: npt.ArrayLike,
        *,
        limit: int | None = None,
        granularity: int = 1,
        public: bytes | None = None,
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
          public: the root of declared prefixes, which are looked at too; the longer match counts.
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
        text = prompt[:wanted].tobytes()
        path, end = self._walk(root, prompt, text)
        paths = [(path, end)]
        if public is not None and public in self._trees:
            shared, until = self._walk(public, prompt, text)
            paths.append((shared, until))
            if until.position > end.position:
                path, end = shared, until
        step = math.lcm(granularity, self.grid)
        length = end.position // step * step
        if length < end.position:
            end = MatchEnd(Cause.GRANULARITY, length, before=end)
        if path:
            now = self.clock()
            self.metrics.gaps.add(now - path[-1].used)
            self._touch(path, now, uses=1)
        segments = rows_along(path, length)
        self.pool.retain_held(segments[:, PAGE])
        state = self._snapshot(paths, min(length, len(prompt) - 1))
        place = Place(path[-1], length) if path else None
        if state is None:
            return Match(length, segments, end, place=place)
        return Match(length, segments, end, state.position, state.slot, place)

    def snapshot(
        self, root: bytes, tokens: Int32, *, limit: int, public: bytes | None = None
    ) -> tuple[int, int] | None:
        """Position and slot of the deepest snapshot of a text at or before `limit` tokens, or None.

        The slot gains a reference in the caller's name.
        """
        text = tokens[:limit].tobytes()
        roots = [root] if public is None else [root, public]
        found = self._snapshot([self._walk(each, tokens, text) for each in roots], limit)
        return None if found is None else (found.position, found.slot)

    def all_snapshots(self, roots: tuple[bytes, ...], tokens: Int32) -> dict[int, int]:
        """Slots by position of all snapshots along a text. References stay the index's."""
        found: dict[int, int] = {}
        for root in roots:
            path, end = self._walk(root, tokens, tokens.tobytes())
            for node in path:
                states = (node.states or {}).items()
                found |= {p: s.slot for p, s in states if p <= end.position and p not in found}
        return found

    def keep_states(
        self, root: bytes, tokens: Int32, states: list[tuple[int, int]], since: Place | None = None
    ) -> None:
        """Keeps states (position, slot) beside what is cached of a text; where there is one, it stays.

        The index takes references of its own; those of the caller are untouched. `since`: as in `publish`.
        """
        if self.snapshots is None:
            return
        since = self.confirm(root, since, len(tokens))
        path, end = self._walk(root, tokens, tokens[since.position if since else 0 :].tobytes(), since)
        for position, slot in states:
            if 0 < position <= end.position and position % self.grid == 0:
                self.snapshots.add(path, position, slot)

    def _snapshot(self, paths: list[tuple[list[Node], MatchEnd]], limit: int) -> Snapshot | None:
        """The deepest snapshot along paths, as far as each agrees with a text. It is used now."""
        if self.snapshots is None:
            return None
        within = [self.snapshots.deepest(path, min(limit, end.position)) for path, end in paths]
        found = [snapshot for snapshot in within if snapshot is not None]
        if not found:
            return None
        deepest = max(found, key=lambda snapshot: snapshot.position)
        self.snapshots.use(deepest, self.clock())
        return deepest

    def confirm(self, root: bytes, place: Place | None, length: int) -> Place | None:
        """What still holds of a place, for the first `length` tokens of its text; None if nothing does.

        A node's path from its root is the same tokens for as long as it is in the tree: a split puts a node
        above it, and cutting it short takes tokens off its end.
        """
        if place is None:
            return None
        node, position = place.node, min(place.position, place.node.end, length) // self.grid * self.grid
        if node.tree is not self._trees.get(root) or node.parent is None:
            return None
        while position <= node.start:
            node = node.parent
            if node.parent is None:
                return None
        return Place(node, position)

    def insert(self, root: bytes, tokens: npt.ArrayLike, segments: Int32, **options: Any) -> int:
        """`publish`, which has the options; returns tokens that were not cached before."""
        before = self.tokens
        self.publish(root, tokens, segments, **options)
        return self.tokens - before

    def publish(
        self,
        root: bytes,
        tokens: npt.ArrayLike,
        segments: Int32,
        *,
        since: Place | None = None,
        contract: CacheContract | None = None,
        priority: int = 0,
        public: bytes | None = None,
    ) -> Place | None:
        """Indexes the KV of a prompt. Where its tokens are cached already, the first copy stays.

        The index takes references of its own for what it keeps; those of the caller are untouched.
        Nothing goes for it: where the domain has a quota, `enforce` comes next. With `since`, the work
        grows with the tokens behind it and with the nodes of its path, not with the prompt.

        Args:
          root: the digest of the cache contract.
          tokens: i32[n], all exact; nothing else may get here (`Sequence.exact_prefix`).
          segments: i32[W, 4], positions 0..n-1 in order, written slots where they were born; with `since`,
            from its position on.
          since: as `confirm` gives it, where the index has leading tokens: those are not compared again.
          contract: of which `root` is the digest; without it no quota holds and nothing is spilled.
          priority: for the policy of that name; entries keep the highest they were given.
          public: the root of declared prefixes, whose pages no quota counts.
        Returns:
          Where the index has the tokens now; None if there are none.
        Raises:
          ContractError: a slot does not stand where it was born: relocated KV is private.
          HandleError: the segments do not cover the tokens, or a slot is not written or not held.
          TokenError: the tokens are not a one-dimensional int32 array.
        """
        prompt = as_int32("tokens", tokens, TokenError)
        n = len(prompt)
        since = self.confirm(root, since, n)
        start = since.position if since else 0
        text = prompt[start:].tobytes()
        path, end = self._walk(root, prompt, text, since)
        now, at = self.clock(), end.position // self.grid * self.grid
        if n % self.grid:
            raise HandleError(f"{n} tokens are published, expected a multiple of the grid {self.grid}")
        rows = exact_rows(segments, start, at, n, self.pool)
        if n == 0:
            return None
        tree = self._tree_for(root, contract)
        while path and path[-1].start >= at:  # they agree in less than their first chunk
            path.pop()
        if path and at < min(path[-1].end, n):
            path[-1] = self._split(path[-1], at)  # before the touch: the tail was not used
        self._touch(path, now, uses=0)
        if priority:
            for node in path:
                node.priority = max(node.priority, priority)
        if at == n:
            return Place(path[-1], n)
        parent = path[-1] if path else tree.top
        leaf = Node(tree, parent, at, text[TOKEN_BYTES * (at - start) :], rows, self._stamp)
        leaf.used = leaf.created = now
        leaf.priority, leaf.floor = priority, self._floor
        if tree.quota is not None and public is not None and public in self._trees:
            leaf.shared_until = self._shared(public, prompt, [*path, leaf])
        self._take(leaf.segments[:, PAGE])
        key = self._file(leaf)
        parent.children[key] = leaf
        self.ghosts.drop(parent.uid, key)
        self._idle.pop(root, None)
        self._enqueue(leaf)
        for owner in (self, tree):
            owner.nodes += 1
            owner.tokens += n - at
        tree.rows += leaf.charge
        tree.newest = leaf
        return Place(leaf, n)

    def pin(self, root: bytes, tokens: npt.ArrayLike, until: float | None) -> Pin:
        """Keeps the cached prefix of a text until a time on the index's clock, or until `unpin`.

        The result says how many tokens that is; none where nothing is cached.
        """
        prompt = as_int32("tokens", tokens, TokenError)
        path, end = self._walk(root, prompt, prompt.tobytes())
        length = end.position // self.grid * self.grid
        while path and path[-1].start >= length:
            path.pop()
        pin = Pin(next(pin_ids), length, until)
        if not path:
            return pin
        if length < path[-1].end:
            path[-1] = self._split(path[-1], length)
        for node in path:
            node.pins += 1
        top = path[-1].tree
        assert top is not None
        top.top.pins += 1
        pages = rows_along(path, length)[:, PAGE].copy()
        self.pool.retain_held(pages)
        self._pins[pin.id] = Pinned(pin, path[-1], pages)
        if until is not None:
            heapq.heappush(self._pin_ends, (until, pin.id))
        return pin

    def peek(self, root: bytes, tokens: Int32, *, limit: int) -> tuple[int, Int32]:
        """Tokens of a prompt i32[n] that `match` would find, and their segments. Pins and ages nothing."""
        path, end = self._walk(root, tokens, tokens[:limit].tobytes())
        length = end.position // self.grid * self.grid
        return length, rows_along(path, length)

    def node_at(self, root: bytes, tokens: Int32) -> Node | None:
        """The node in which a text that is cached whole ends, or None. Changes nothing."""
        path, end = self._walk(root, tokens, tokens.tobytes())
        return path[-1] if path and end.position == len(tokens) else None

    def renew(self, node: Node) -> None:
        """Makes a node and those above it the ones used last."""
        self._touch(path_to(node), self.clock(), uses=0)

    def _shared(self, public: bytes, prompt: Int32, path: list[Node]) -> int:
        """Leading tokens whose KV is that of a declared prefix: the same pages, not only the same text.

        `path` leads to a new node; where sharing ended in front of it, nothing is compared.
        """
        if len(path) > 1 and path[-2].shared_until < path[-2].end:
            return path[-2].shared_until
        theirs, end = self._walk(public, prompt, prompt.tobytes())
        found = rows_along(theirs, end.position)[:, PAGE]
        segments = rows_along(path, len(prompt))
        ours = segments[: len(found), PAGE]
        same = len(ours) if np.array_equal(ours, found[: len(ours)]) else int((ours != found).argmax())
        return int(segments[same - 1, FIRST] + segments[same - 1, HI]) if same else 0

    def _walk(
        self, root: bytes, tokens: Int32, text: bytes, since: Place | None = None
    ) -> tuple[list[Node], MatchEnd]:
        """Nodes from below a root that agree with a text, the last one maybe in part.

        Args:
          root: the contract's.
          tokens: i32[n], the whole text.
          text: bytes of the tokens that are wanted, those in front of `since` left out.
          since: a confirmed place: what is in front of it is not compared.
        """
        path: list[Node] = []
        tree = self._trees.get(root)
        at = base = since.position if since else 0
        wanted, grid = base + len(text) // TOKEN_BYTES, TOKEN_BYTES * self.grid
        if wanted and (tree is None or tree.empty):
            why = self.ghosts.find(root, text[:grid], text, 0)
            return path, MatchEnd(Cause(why) if why else Cause.ABSENT, 0)
        node = None if tree is None else tree.top
        if since is not None:
            node, path = since.node, path_to(since.node)
            if at < node.end:
                known = TOKEN_BYTES * (at - node.start)
                rest = node.key[known : known + len(text)]
                if not text.startswith(rest):
                    return path, MatchEnd(Cause.TOKENS, at + _first_unequal(rest, tokens[at:]))
                at += len(rest) // TOKEN_BYTES
        while at < wanted:
            assert node is not None
            if wanted - at < self.grid:
                return path, MatchEnd(Cause.GRANULARITY, at)
            here = TOKEN_BYTES * (at - base)
            key = text[here : here + grid]
            child = node.children.get(key)
            if child is None:
                why = self.ghosts.find(node.uid, key, text, here)
                if why:
                    return path, MatchEnd(Cause(why), at)
                differs = Cause.TOKENS if self.grid == 1 else Cause.CHUNK
                return path, MatchEnd(differs if node.children else Cause.EXHAUSTED, at)
            path.append(child)
            if not text.startswith(child.key, here):
                if not child.key.startswith(text[here:]):
                    run = child.key[: len(text) - here]
                    return path, MatchEnd(Cause.TOKENS, at + _first_unequal(run, tokens[at:]))
                break
            at, node = child.end, child
        if wanted == len(tokens):
            return path, MatchEnd(Cause.COMPLETE, wanted)
        cause = Cause.LAST_TOKEN if wanted == len(tokens) - 1 else Cause.LIMIT
        return path, MatchEnd(cause, wanted)

    def _touch(self, path: list[Node], now: float, uses: int) -> None:
        self._stamp = stamp = self._stamp + 1
        for node in path:
            node.stamp = stamp
            node.used = now
            node.hits += uses
        if self._ages:
            for node in path:
                node.floor = self._floor

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node at a position; the node keeps the tail, a new one above it gets the head."""
        parent, tree, byte = node.parent, node.tree, TOKEN_BYTES * (at - node.start)
        assert parent is not None
        assert tree is not None
        rows, charge = len(node.segments), node.charge
        upper = cut(node.segments, node.start, at)
        head = Node(tree, parent, node.start, node.key[:byte], upper, node.stamp)
        for name in ("used", "created", "hits", "priority", "floor", "pins", "shared_until"):
            setattr(head, name, getattr(node, name))
        node.parent = head
        node.hold(at, node.key[byte:], cut(node.segments, at, node.end))
        if len(upper) + len(node.segments) > rows:  # both refer to the page in which the cut lies
            self._take(node.segments[:1, PAGE])
        if self.snapshots is not None:
            self.snapshots.split(head, node)
        parent.children[self._file(head)] = head
        head.children[self._file(node)] = node
        self.nodes += 1
        tree.nodes += 1
        tree.rows += head.charge + node.charge - charge
        return head


def _first_unequal(run: bytes, tokens: Int32) -> int:
    """How many tokens of two different runs agree; the first is no longer than the second."""
    ours = np.frombuffer(run, np.int32)
    return int((ours != tokens[: len(ours)]).argmax())
