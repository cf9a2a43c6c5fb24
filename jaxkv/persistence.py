"""Saving what an engine has cached, and loading as much of it as fits, most valuable first.

Part of the engine, in a file of its own. On disk an entry is a run of tokens behind its parent's; its KV is
stored by token, so that page size, pool size and what else is cached need not be those of the saver.
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
from jaxkv.cache.entry import Entry
from jaxkv.cache.radix import TOKEN_BYTES, Node, cut, text_to
from jaxkv.cache.retention import Gone
from jaxkv.errors import CapacityError, FormatError
from jaxkv.io import cache_files
from jaxkv.io.spread import is_shared, meet
from jaxkv.memory import Memory
from jaxkv.tiering import entry_of, restore
from jaxkv.transfer import shapes

BLOCK_BYTES = 2**26  # of KV that are read, hashed and written at once; an entry is cut to pieces of this
_ROW = ("tree", "parent", "start", "end", "hits", "priority", "digest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSaved:
    """What `Engine.save_cache` wrote."""

    path: Path
    entries: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLoaded:
    """What `Engine.load_cache` took, and what it left out, in tokens by reason."""

    entries: int
    tokens: int
    left_out: dict[str, int]

    def __str__(self) -> str:
        left = "".join(f"; {count} tokens left out: {why}" for why, count in sorted(self.left_out.items()))
        return f"{self.tokens} tokens loaded in {self.entries} entries{left}"


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
    contracts: dict[str, int] = {}
    numbers: dict[int, int] = {}  # id of a node -> the row of its last piece
    blocks = tokens = 0
    token_bytes = memory.page_bytes // memory.pool.page_size
    piece = max(BLOCK_BYTES // token_bytes // memory.grid, 1) * memory.grid
    together = is_shared(memory.backend.mesh)
    with _writing(path, together) as generation:
        pending: list[Entry] = []

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
            for start in range(node.start, node.end, piece):
                end = min(start + piece, node.end)
                run = Gone(contract, text[: TOKEN_BYTES * end], start, cut(node.segments, start, end))
                if sum(e.end - e.start for e in pending) + end - start > piece:
                    flush()
                entry = entry_of(memory, run)
                pending.append(entry)
                row = (tree, parent, start, end, node.hits, node.priority, entry.digest.hex())
                rows.append([blocks, *row])
                parent = len(rows) - 1
                tokens += end - start
            numbers[id(node)] = parent
        flush()
        body = {"base": base.serialize().hex(), "contracts": list(contracts), "rows": rows, "blocks": blocks}
        if generation is not None:
            cache_files.write_head(generation, body)
    meet(together, "process 0 saved the cache")
    return CacheSaved(path=path, entries=len(rows), tokens=tokens)


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
    blocks = range(len(entries[0].kv))
    return {
        "tokens": np.concatenate([np.frombuffer(e.run, np.int32) for e in entries]),
        **{f"kv{g}": np.concatenate([e.kv[g] for e in entries], axis=1) for g in blocks},
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
        rows = [dict(zip(_ROW, row[1:], strict=True)) | {"block": row[0]} for row in body["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{generation}: its head is not readable ({error}): save the cache again"
        ) from error
    base.within(saved.domain, scope=saved.scope).require(saved)
    for contract in contracts:
        base.within(contract.domain, scope=contract.scope).require(contract)
    nodes: dict[int, Node] = {}
    left: Counter[str] = Counter()
    for number in range(int(body["blocks"])):
        inside = [i for i, row in enumerate(rows) if row["block"] == number]
        wanted = [i for i in inside if rows[i]["parent"] < 0 or _reachable(rows[i], inside, nodes)]
        if not wanted or not memory.pool.free_count:
            for i in inside:
                left[NO_PREFIX if memory.pool.free_count else NO_ROOM] += rows[i]["end"] - rows[i]["start"]
            continue
        block = cache_files.read_block(generation, number)
        at = 0
        for i in inside:
            row = rows[i]
            count = row["end"] - row["start"]
            part = slice(at, at + count)
            at += count
            why = _take(memory, contracts[row["tree"]], row, i, block, part, nodes)
            if why:
                left[why] += count
    loaded = [i for i in nodes if not rows[i].get("cached")]
    for i in sorted(loaded, reverse=True):  # what was worth most is again the one used last
        memory.index.renew(nodes[i])
    tokens = sum(rows[i]["end"] - rows[i]["start"] for i in loaded)
    return CacheLoaded(entries=len(loaded), tokens=tokens, left_out=dict(left))


def _reachable(row: dict[str, Any], inside: list[int], nodes: dict[int, Node]) -> bool:
    return row["parent"] in nodes or row["parent"] >= inside[0]


def _take(
    memory: Memory,
    contract: CacheContract,
    row: dict[str, Any],
    number: int,
    block: cache_files.Tree,
    part: slice,
    nodes: dict[int, Node],
) -> str:
    """Loads one row; returns why it was left out, or "" when it was not."""
    parent = nodes.get(row["parent"])
    if row["parent"] >= 0 and (parent is None or parent.parent is None):
        return NO_PREFIX
    expected = shapes(memory.pages, row["end"] - row["start"])
    before = b"" if parent is None else text_to(parent)[: TOKEN_BYTES * row["start"]]
    text = before + np.ascontiguousarray(block["tokens"][part]).tobytes()
    kv = tuple(np.ascontiguousarray(block[f"kv{g}"][:, part]) for g in range(len(expected)))
    entry = Entry(contract, text, row["start"], kv, bytes.fromhex(row["digest"]))
    if entry.end != row["end"] or not entry.verify():
        raise FormatError(f"entry {number} does not have the digest it claims: save the cache again")
    if tuple(b.shape for b in kv) != expected:
        raise FormatError(f"entry {number} has KV of another shape than the model's: save the cache again")
    match = memory.index.match(contract.digest(), entry.tokens)
    try:
        if match.length == entry.end:
            found = memory.index.node_at(contract.digest(), entry.tokens)
            if found is not None:
                nodes[number] = found
            row["cached"] = True
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
        memory.release(match.pages)
    node = memory.index.node_at(contract.digest(), entry.tokens)
    if node is None:
        return QUOTA
    node.hits, node.priority = max(node.hits, row["hits"]), max(node.priority, row["priority"])
    nodes[number] = node
    return ""


def _rest(entry: Entry, start: int) -> Entry:
    kv = tuple(np.ascontiguousarray(block[:, start - entry.start :]) for block in entry.kv)
    return dataclasses.replace(entry, start=start, kv=kv)
