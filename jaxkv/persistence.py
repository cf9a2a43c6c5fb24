"""Saving what an engine has cached, and loading as much of it as fits, most valuable first.

Part of the engine, in a file of its own. On disk an entry is a run of tokens behind its parent's; its KV is
stored by token, so that page size, pool size and what else is cached need not be those of the saver. Where
there are recurrent layers, an entry is cut behind each of its snapshots, and these are stored with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.entry import Entry, SavedState
from jaxkv.cache.radix import TOKEN_BYTES, Node, cut, text_to
from jaxkv.cache.tree import Gone
from jaxkv.errors import CapacityError, FormatError
from jaxkv.io import cache_files
from jaxkv.io.spread import is_shared, meet
from jaxkv.memory import Memory
from jaxkv.tiering import entry_of, fits, restore, restore_states

BLOCK_BYTES = 2**26  # that are read, hashed and written at once: entries are cut to pieces; a snapshot is not
_ROW = ("tree", "parent", "start", "end", "hits", "priority", "digest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSaved:
    """What `Engine.save_cache` wrote."""

    path: Path
    entries: int
    tokens: int
    snapshots: int = 0  # of recurrent layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLoaded:
    """What `Engine.load_cache` took, and what it left out, in tokens by reason."""

    entries: int
    tokens: int
    left_out: dict[str, int]
    snapshots: int = 0  # of recurrent layers
    snapshots_left_out: int = 0  # there already, with tokens that were left out, or for want of a free slot

    def __str__(self) -> str:
        left = "".join(f"; {count} tokens left out: {why}" for why, count in sorted(self.left_out.items()))
        if self.snapshots_left_out:
            left += f"; {self.snapshots_left_out} snapshots left out"
        states = f", {self.snapshots} snapshots" if self.snapshots or self.snapshots_left_out else ""
        return f"{self.tokens} tokens loaded in {self.entries} entries{states}{left}"


NO_ROOM = "no free pages"
NO_PREFIX = "the prefix was left out"
CACHED = "cached already"
QUOTA = "over the domain's quota"


def save(memory: Memory, base: CacheContract, path: str | Path) -> CacheSaved:
    """Writes everything cached under `base`, for all domains, at `path`; see `io.cache_files`.

    Raises:
      FormatError: `path` holds something else.
      OSError: it cannot be written; a cache that was there stays.
    """
    path = Path(path).absolute()
    rows: list[list[Any]] = []
    states: list[tuple[int, int, int, int]] = []  # row, position, where the operator begins, uses
    contracts: dict[str, int] = {}
    numbers: dict[int, int] = {}  # id of a node -> the row of its last piece
    blocks = tokens = 0
    token_bytes = memory.page_bytes // memory.pool.page_size
    piece = max(BLOCK_BYTES // token_bytes // memory.grid, 1) * memory.grid
    together = is_shared(memory.backend.mesh)
    with _writing(path, together) as generation:
        pending: list[Entry] = []
        limit = piece * token_bytes

        def flush() -> None:
            nonlocal blocks
            if pending:
                if generation is not None:
                    cache_files.write_block(generation, blocks, _block(pending))
                blocks += 1
                pending.clear()

        for node in _by_worth(memory, base):
            assert node.tree is not None
            assert node.tree.contract is not None
            text, contract = text_to(node), node.tree.contract
            parent = numbers.get(id(node.parent), -1)
            tree = contracts.setdefault(contract.serialize().hex(), len(contracts))
            for start, end in _pieces(node, piece):
                snapshot = (node.states or {}).get(end)
                behind = () if snapshot is None else ((end, snapshot.slot),)
                rows_here = cut(node.segments, start, end)
                run = Gone(contract, text[: TOKEN_BYTES * end], start, rows_here, behind)
                entry = entry_of(memory, run)
                if sum(e.payload for e in pending) + entry.payload > limit:
                    flush()
                pending.append(entry)
                for state in entry.states:
                    assert snapshot is not None
                    states.append((len(rows), state.position, state.begins, snapshot.hits))
                row = (tree, parent, start, end, node.hits, node.priority, entry.digest.hex())
                rows.append([blocks, *row])
                parent = len(rows) - 1
                tokens += end - start
            numbers[id(node)] = parent
        flush()
        body = {"base": base.serialize().hex(), "contracts": list(contracts), "rows": rows, "blocks": blocks}
        if states:
            body["states"] = states
        if generation is not None:
            cache_files.write_head(generation, body)
    meet(together, "process 0 saved the cache")
    return CacheSaved(path=path, entries=len(rows), tokens=tokens, snapshots=len(states))


def _pieces(node: Node, most: int) -> Iterator[tuple[int, int]]:
    """A node's positions in pieces of at most `most` tokens, none of which has a snapshot but at its end."""
    start = node.start
    for end in sorted({*(node.states or ()), node.end}):
        while start < end:
            stop = min(start + most, end)
            yield start, stop
            start = stop


def _writing(path: Path, together: bool) -> contextlib.AbstractContextManager[Path | None]:
    """Where to write. On a mesh of several processes all gather a block and the first one writes it."""
    if together and jax.process_index():
        return contextlib.nullcontext()
    return cache_files.new_generation(path)


def _by_worth(memory: Memory, base: CacheContract) -> Iterator[Node]:
    """Nodes under `base`, what the policy would keep longest first, parents before children."""
    heap: list[Any] = []

    def add(node: Node) -> None:
        key = memory.eviction.key(node, memory.page_bytes)
        heapq.heappush(heap, (tuple(-k for k in key), len(heap), id(node), node))

    for tree in memory.index.trees():
        contract = tree.contract
        if contract is not None and base.within(contract.domain, scope=contract.scope) == contract:
            for node in tree.top.children.values():
                add(node)
    while heap:
        node = heapq.heappop(heap)[-1]
        yield node
        for child in node.children.values():
            add(child)


def _block(entries: list[Entry]) -> cache_files.Tree:
    kv = zip(*(e.kv for e in entries), strict=True)
    states = zip(*(state.arrays for e in entries for state in e.states), strict=True)
    return {
        "tokens": np.concatenate([np.frombuffer(e.run, np.int32) for e in entries]),
        **{f"kv{number}": np.concatenate(blocks, axis=1) for number, blocks in enumerate(kv)},
        **{f"state{number}": np.stack(arrays) for number, arrays in enumerate(states)},
    }


def load(memory: Memory, base: CacheContract, path: str | Path) -> CacheLoaded:
    """Loads what fits into free pages, in the file's order; nothing that is cached goes for it.

    Every file's digest is compared before anything is loaded, every entry's tokens and KV before it is
    used.

    Raises:
      FormatError: not a cache, partial, corrupt or of another version; says which.
      ContractError: saved under another contract; names the first field that differs.
    """
    generation, body = cache_files.read_head(Path(path).absolute())
    try:
        saved = CacheContract.deserialize(bytes.fromhex(body["base"]))
        contracts = [CacheContract.deserialize(bytes.fromhex(text)) for text in body["contracts"]]
        rows = [
            dict(zip(_ROW, row[1:], strict=True)) | {"block": row[0], "states": []} for row in body["rows"]
        ]
        for row, *state in body.get("states", []):
            rows[row]["states"].append(tuple(int(number) for number in state))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FormatError(
            f"{generation}: its head is not readable ({error}): save the cache again"
        ) from error
    base.within(saved.domain, scope=saved.scope).require(saved)
    for contract in contracts:
        base.within(contract.domain, scope=contract.scope).require(contract)
    nodes: dict[int, Node] = {}
    left: Counter[str] = Counter()
    before = len(memory.states.snapshots) if memory.states else 0
    for number in range(int(body["blocks"])):
        inside = [i for i, row in enumerate(rows) if row["block"] == number]
        wanted = [i for i in inside if rows[i]["parent"] < 0 or _reachable(rows[i], inside, nodes)]
        if not wanted or not memory.pool.free_count:
            for i in inside:
                left[NO_PREFIX if memory.pool.free_count else NO_ROOM] += rows[i]["end"] - rows[i]["start"]
            continue
        block = cache_files.read_block(generation, number)
        at = state = 0
        for i in inside:
            row = rows[i]
            count = row["end"] - row["start"]
            part, behind = slice(at, at + count), range(state, state + len(row["states"]))
            at, state = at + count, behind.stop
            why = _take(memory, contracts[row["tree"]], row, i, block, part, behind, nodes)
            if why:
                left[why] += count
    loaded = [i for i in nodes if not rows[i].get("cached")]
    for i in sorted(loaded, reverse=True):  # what was worth most is again the one used last
        memory.index.renew(nodes[i])
    tokens = sum(rows[i]["end"] - rows[i]["start"] for i in loaded)
    snapshots = len(memory.states.snapshots) - before if memory.states else 0
    return CacheLoaded(
        entries=len(loaded),
        tokens=tokens,
        left_out=dict(left),
        snapshots=snapshots,
        snapshots_left_out=sum(len(row["states"]) for row in rows) - snapshots,
    )


def _reachable(row: dict[str, Any], inside: list[int], nodes: dict[int, Node]) -> bool:
    return row["parent"] in nodes or row["parent"] >= inside[0]


def _take(
    memory: Memory,
    contract: CacheContract,
    row: dict[str, Any],
    number: int,
    block: cache_files.Tree,
    part: slice,
    behind: range,
    nodes: dict[int, Node],
) -> str:
    """Loads one row; returns why it was left out, or "" when it was not."""
    parent = nodes.get(row["parent"])
    if row["parent"] >= 0 and (parent is None or parent.parent is None):
        return NO_PREFIX
    before = b"" if parent is None else text_to(parent)[: TOKEN_BYTES * row["start"]]
    text = before + np.ascontiguousarray(block["tokens"][part]).tobytes()
    kv = tuple(np.ascontiguousarray(array[:, part]) for array in _numbered(block, "kv"))
    states = tuple(
        SavedState(position, begins, tuple(array[at] for array in _numbered(block, "state")))
        for (position, begins, _), at in zip(row["states"], behind, strict=True)
    )
    entry = Entry(contract, text, row["start"], kv, bytes.fromhex(row["digest"]), states)
    if entry.end != row["end"] or not entry.verify():
        raise FormatError(f"entry {number} does not have the digest it claims: save the cache again")
    if not fits(memory, entry):
        raise FormatError(f"entry {number} has KV of another shape than the model's: save the cache again")
    match = memory.index.match(contract.digest(), entry.tokens)
    try:
        if match.length == entry.end:
            found = memory.index.node_at(contract.digest(), entry.tokens)
            if found is not None:
                nodes[number] = found
            row["cached"] = True
            restore_states(memory, entry, evict=False)
            return CACHED
        if match.length < entry.start:
            return NO_PREFIX
        if match.length > entry.start:  # a part of it is there already
            entry = _rest(entry, match.length)
        try:
            restore(memory, match, entry, evict=False)
        except CapacityError:
            return NO_ROOM
    finally:
        memory.let_match_go(match)
    node = memory.index.node_at(contract.digest(), entry.tokens)
    if node is None:
        return QUOTA
    node.hits, node.priority = max(node.hits, row["hits"]), max(node.priority, row["priority"])
    for position, _, hits in row["states"]:
        if (snapshot := (node.states or {}).get(position)) is not None:
            snapshot.hits = max(snapshot.hits, hits)
    nodes[number] = node
    return ""


def _numbered(block: cache_files.Tree, name: str) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """The arrays name0, name1 and so on."""
    return [block[f"{name}{i}"] for i in range(sum(key.startswith(name) for key in block))]


def _rest(entry: Entry, start: int) -> Entry:
    kv = tuple(np.ascontiguousarray(block[:, start - entry.start :]) for block in entry.kv)
    return dataclasses.replace(entry, start=start, kv=kv)
