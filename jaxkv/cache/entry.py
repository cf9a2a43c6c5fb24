"""An entry of the cache outside the device: a run of tokens with its KV, and proof that it is that.

An entry stands behind its prefix: `text` holds all tokens from position 0, `kv` only those from `start`
on. With it go the snapshots of recurrent layers behind its tokens. Its digest covers the contract, every
token and every byte of KV and states; whoever takes it back compares tokens and digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.radix import TOKEN_BYTES
from jaxkv.errors import FormatError
from jaxkv.typing import Int32

_MAGIC = b"jaxkv.entry.1\n"
Block = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class SavedState:
    """A snapshot outside the device: the state of all recurrent layers behind `position` tokens."""

    position: int
    begins: int  # position behind which its operator begins; -1 where it has none
    # conv storage[Lr, C, k-1], state f32[Lr, Hv, Dk, Dv], and f32[Lr, Hv, Dk, Dk] if operators are kept.
    arrays: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(array.nbytes for array in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """Tokens start..end-1 behind their prefix, with their KV as stored on the device."""

    contract: CacheContract
    text: bytes  # tokens 0..end-1, int32
    start: int
    # Per layer group storage[L, end - start, K, 2H], and f32[L, end - start, K, 2] if it is quantized.
    kv: tuple[Block, ...]
    digest: bytes  # see `digest_of`
    states: tuple[SavedState, ...] = ()  # behind tokens start+1..end, by position

    @property
    def end(self) -> int:
        return len(self.text) // TOKEN_BYTES

    @property
    def tokens(self) -> Int32:
        """All tokens, i32[end]."""
        return np.frombuffer(self.text, np.int32)

    @property
    def run(self) -> bytes:
        """The tokens that it holds KV of."""
        return self.text[TOKEN_BYTES * self.start :]

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return len(self.text) + self.payload

    @property
    def payload(self) -> int:
        """Bytes of its KV and states: what a quota counts."""
        return sum(block.nbytes for block in self.kv) + sum(state.nbytes for state in self.states)

    def verify(self) -> bool:
        """Whether contract, tokens, KV and states are those that its digest was made of."""
        return digest_of(self.contract, self.text, self.start, self.kv, self.states) == self.digest


def digest_of(
    contract: CacheContract,
    text: bytes,
    start: int,
    kv: tuple[Block, ...],
    states: tuple[SavedState, ...] = (),
) -> bytes:
    """SHA-256 over an entry's contract, tokens, place, KV and states, each with its length."""
    digest = hashlib.sha256(_MAGIC)
    for part in (contract.digest(), text, start.to_bytes(8, "big")):
        digest.update(len(part).to_bytes(8, "big") + part)
    for block in kv:
        _digest_block(digest, block)
    for state in states:
        place = f"state {state.position} {state.begins} {len(state.arrays)}".encode()
        digest.update(len(place).to_bytes(8, "big") + place)
        for block in state.arrays:
            _digest_block(digest, block)
    return digest.digest()


def _digest_block(digest: Any, block: Block) -> None:
    header = f"{block.dtype.name}{list(block.shape)}".encode()
    digest.update(len(header).to_bytes(8, "big") + header)
    digest.update(_raw(block))


def _raw(block: Block) -> memoryview:
    return np.ascontiguousarray(block).view(np.uint8).reshape(-1).data


def make_entry(
    contract: CacheContract,
    text: bytes,
    start: int,
    kv: tuple[Block, ...],
    states: tuple[SavedState, ...] = (),
) -> Entry:
    """An entry with its digest."""
    return Entry(contract, text, start, kv, digest_of(contract, text, start, kv, states), states)


def merged(one: Entry, other: Entry) -> Entry | None:
    """Two entries as one with the states of both, if one begins with the other, prefix included; or None."""
    longer, shorter = (one, other) if one.end >= other.end else (other, one)
    if longer.start != shorter.start or not longer.text.startswith(shorter.text):
        return None
    known = {state.position: state for state in (*shorter.states, *longer.states)}
    if len(known) == len(longer.states):
        return longer
    states = tuple(known[position] for position in sorted(known))
    return make_entry(longer.contract, longer.text, longer.start, longer.kv, states)


def _forms(blocks: tuple[Block, ...]) -> list[list[Any]]:
    return [[block.dtype.name, list(block.shape)] for block in blocks]


def _head(entry: Entry) -> bytes:
    head = {"start": entry.start, "digest": entry.digest.hex(), "arrays": _forms(entry.kv)}
    if entry.states:
        head["states"] = [[s.position, s.begins, _forms(s.arrays)] for s in entry.states]
    return json.dumps(head).encode()


def pack(entry: Entry) -> list[bytes | memoryview]:
    """The entry as bytes, in parts that need not be joined."""
    parts: list[bytes | memoryview] = [_MAGIC]
    for part in (_head(entry), entry.contract.serialize(), entry.text):
        parts += [len(part).to_bytes(8, "big"), part]
    blocks = [*entry.kv, *(block for state in entry.states for block in state.arrays)]
    return [*parts, *map(_raw, blocks)]


def unpack(data: bytes) -> Entry:
    """Reads what `pack` wrote and checks its digest; a FormatError says what is wrong otherwise."""
    if not data.startswith(_MAGIC):
        raise FormatError(f"entry starts with {data[: len(_MAGIC)]!r}, expected {_MAGIC!r}")
    at, parts = len(_MAGIC), []
    for _ in range(3):
        size = int.from_bytes(data[at : at + 8], "big")
        if at + 8 + size > len(data):
            raise FormatError(f"entry has {len(data)} bytes, expected at least {at + 8 + size}")
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    try:
        head = json.loads(parts[0])
        start, digest = int(head["start"]), bytes.fromhex(head["digest"])

        def take(forms: Any) -> tuple[Block, ...]:
            nonlocal at
            found = []
            for name, shape in forms:
                dtype, count = np.dtype(name), int(np.prod(shape))
                found.append(np.frombuffer(data, dtype, count, at).reshape(shape))
                at += count * dtype.itemsize
            return tuple(found)

        kv = take(head["arrays"])
        places = head.get("states", [])
        states = tuple(SavedState(int(p), int(begins), take(forms)) for p, begins, forms in places)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError("entry is truncated or corrupt, expected a readable head and its KV") from error
    if at != len(data):
        raise FormatError(f"entry has {len(data)} bytes, expected {at}")
    entry = Entry(CacheContract.deserialize(parts[1]), parts[2], start, kv, digest, states)
    if _head(entry) != parts[0] or not entry.verify():
        raise FormatError("entry does not have the digest it claims, expected tokens and KV as written")
    return entry
