"""Who holds which state slot, and which states are kept beside the prefix index's token runs.

A snapshot is a slot that nobody writes again: the state of all recurrent layers behind exactly `position`
tokens of a text. A node of the index has those of the positions behind its tokens. They come and go by the
same policy as entries with KV, on their own worth: what replaying from the snapshot before costs, per byte.
A snapshot holds one reference to one slot and nothing else: no pages, no arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jaxkv.errors import CapacityError, HandleError

if TYPE_CHECKING:
    from jaxkv.cache.eviction import EvictionPolicy, Key
    from jaxkv.cache.radix import Node
    from jaxkv.cache.tree import Tree


class StateSlots:
    """Free list and reference counts of `num_slots` state slots. A method that raises changes nothing."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.refcount = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def none(self) -> int:
        """The slot id that reads zeros, the state before any token, and drops a write."""
        return self.num_slots

    @property
    def free_count(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def allocate(self) -> int:
        """Takes a free slot, with one reference.

        Raises:
          CapacityError: none is free.
        """
        if not self._free:
            raise CapacityError(
                f"all {self.num_slots} states are in use, expected a free one: release sequences, or give "
                "the engine more with num_states"
            )
        slot = self._free.pop()
        self.refcount[slot] = 1
        return slot

    def retain(self, slot: int) -> None:
        """Adds a reference; `none` needs none. Raises HandleError for a slot that nobody holds."""
        if slot == self.none:
            return
        if not 0 <= slot < self.num_slots or not self.refcount[slot]:
            raise HandleError(f"state slot {slot} is free or unknown, expected one that somebody holds")
        self.refcount[slot] += 1

    def release(self, slot: int) -> bool:
        """Takes back a reference; returns whether the slot became free by it."""
        if slot == self.none:
            return False
        if not 0 <= slot < self.num_slots or not self.refcount[slot]:
            raise HandleError(f"state slot {slot} is released, expected one that somebody holds")
        self.refcount[slot] -= 1
        if self.refcount[slot]:
            return False
        self._free.append(slot)
        return True

    def rebuild(self, references: Iterable[int]) -> list[int]:
        """Makes `references` the only ones, whatever was counted; returns slots that became free by it."""
        before = self.refcount
        self.refcount = [0] * self.num_slots
        for slot in references:
            if slot != self.none:
                self.refcount[slot] += 1
        self._free = [s for s in range(self.num_slots - 1, -1, -1) if not self.refcount[s]]
        return [s for s in self._free if before[s]]

    def check(self, references: Iterable[int]) -> None:
        """Integrity: counts equal the references given, one entry each, or a HandleError."""
        held = [0] * self.num_slots
        for slot in references:
            if slot != self.none:
                held[slot] += 1
        for slot, (counted, found) in enumerate(zip(self.refcount, held, strict=True)):
            if counted != found:
                raise HandleError(
                    f"state slot {slot} counts {counted} references, expected its holders' {found}"
                )
        if sorted(self._free) != [s for s in range(self.num_slots) if not held[s]]:
            raise HandleError("the free list of state slots is not exactly the rest")


class Snapshot:
    """A state beside a node. Its fields are those by which policies judge a node."""

    __slots__ = ("floor", "hits", "node", "position", "slot", "stamp", "used")

    def __init__(self, node: Node, position: int, slot: int) -> None:
        self.node = node
        self.position = position  # tokens before it
        self.slot = slot
        self.stamp, self.used, self.floor = node.stamp, node.used, node.floor
        self.hits = 1


class Candidate:
    """A snapshot as an eviction policy sees an entry."""

    def __init__(self, snapshot: Snapshot, nbytes: int) -> None:
        self.stamp, self.used, self.hits = snapshot.stamp, snapshot.used, snapshot.hits
        self.floor, self.priority = snapshot.floor, snapshot.node.priority
        self.start, self.end = before(snapshot), snapshot.position
        self.saved_end = self.end
        self._nbytes = nbytes

    def size(self, page_bytes: int) -> int:  # noqa: ARG002 - a state is no page
        """Bytes of the slot."""
        return self._nbytes


def before(snapshot: Snapshot) -> int:
    """Position of the next snapshot towards the root: where a replay would begin without this one."""
    node: Node | None = snapshot.node
    while node is not None:
        earlier = [p for p in node.states or () if p < snapshot.position]
        if earlier:
            return max(earlier)
        node = node.parent
    return 0


class Snapshots:
    """The snapshots of one prefix index."""

    def __init__(self, slots: StateSlots, nbytes: int) -> None:
        """`nbytes`: of one slot."""
        self.slots = slots
        self.nbytes = nbytes
        self.evicted = 0
        self._all: dict[int, Snapshot] = {}  # by slot: a slot is beside one position of one node
        self.freed: list[int] = []  # slots that became free since somebody looked

    def __len__(self) -> int:
        return len(self._all)

    def deepest(self, path: list[Node], limit: int) -> Snapshot | None:
        """The last snapshot at or before `limit` tokens along a path from a root."""
        for node in reversed(path):
            fitting = [p for p in node.states or () if p <= limit]
            if fitting:
                assert node.states is not None
                return node.states[max(fitting)]
        return None

    def use(self, snapshot: Snapshot, now: float) -> None:
        """Notes a use and takes a reference for whoever resumes there."""
        snapshot.stamp, snapshot.used = snapshot.node.stamp, now
        snapshot.hits += 1
        snapshot.floor = snapshot.node.floor
        self.slots.retain(snapshot.slot)

    def add(self, path: list[Node], position: int, slot: int) -> bool:
        """Keeps a state beside the node that has the token before `position`; the first copy stays."""
        for node in path:
            if node.start < position <= node.end:
                if node.states is None:
                    node.states = {}
                if position in node.states or slot in self._all:
                    return False
                self.slots.retain(slot)
                node.states[position] = self._all[slot] = Snapshot(node, position, slot)
                if node.tree is not None:
                    node.tree.states += 1
                return True
        return False

    def split(self, head: Node, tail: Node) -> None:
        """Gives a new head those of its tokens; `tail` has had all of them."""
        if tail.states is None:
            return
        states = tail.states
        head.states = {p: s for p, s in states.items() if p <= head.end}
        tail.states = {p: s for p, s in states.items() if p > head.end}
        for snapshot in head.states.values():
            snapshot.node = head

    def drop(self, node: Node, beyond: int = 0) -> None:
        """Gives up those of a node behind a position: of all of it, or of what was cut off."""
        for position in [p for p in node.states or () if p > beyond]:
            assert node.states is not None
            self.give_up(node.states[position])

    def least(self, policy: EvictionPolicy, tree: Tree) -> tuple[Key, Snapshot] | None:
        """What a tree's quota takes next, and its key; of equals the one nearest to the root. None pinned."""
        found = [
            (policy.key(Candidate(s, self.nbytes), 1), s.position, s.slot)  # type: ignore[arg-type]
            for s in self._all.values()
            if s.node.tree is tree and not s.node.pins
        ]
        if not found:
            return None
        key, _, slot = min(found)
        return key, self._all[slot]

    def evict(self, need: int, policy: EvictionPolicy) -> int:
        """Gives up snapshots, in the policy's order, until `need` slots became free; returns how many did.

        Those in use elsewhere or pinned stay. Every snapshot is looked at: they are few.
        """
        candidates = [
            (policy.key(Candidate(s, self.nbytes), 1), s.slot)  # type: ignore[arg-type]
            for s in self._all.values()
            if self.slots.refcount[s.slot] == 1 and not s.node.pins
        ]
        freed = 0
        # One goes at a time: its neighbour is worth more once it is gone.
        while freed < need and candidates:
            key, slot = min(candidates)
            snapshot = self._all[slot]
            now = policy.key(Candidate(snapshot, self.nbytes), 1)  # type: ignore[arg-type]
            candidates.remove((key, slot))
            if now > key:
                candidates.append((now, slot))
                continue
            self.give_up(snapshot)
            self.evicted += 1
            freed += 1
        return freed

    def give_up(self, snapshot: Snapshot) -> None:
        """Takes a snapshot out; its slot is free unless somebody uses it."""
        states, tree = snapshot.node.states, snapshot.node.tree
        assert states is not None
        del states[snapshot.position], self._all[snapshot.slot]
        if tree is not None:
            tree.states -= 1
        if self.slots.release(snapshot.slot):
            self.freed.append(snapshot.slot)

    def references(self) -> Iterator[int]:
        """The slots that snapshots hold, one entry a reference."""
        yield from self._all

    def check(self, nodes: Iterable[Node]) -> None:
        """Integrity against the nodes of the index, or a HandleError."""
        found = 0
        for node in nodes:
            for position, snapshot in (node.states or {}).items():
                found += 1
                known = self._all.get(snapshot.slot) is snapshot and snapshot.node is node
                if not known or snapshot.position != position or not node.start < position <= node.end:
                    raise HandleError(f"the snapshot at position {position} is not where it says it is")
        if found != len(self._all):
            raise HandleError(f"{len(self._all)} snapshots are counted, expected the {found} beside nodes")
