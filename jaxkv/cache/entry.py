"""An entry of the cache outside the device: a run of tokens with its KV, and proof that it is that.

An entry stands behind its prefix: `text` holds all tokens from position 0, `kv` only those from `start`
on. Its digest covers the contract, every token and every byte of KV; whoever takes it back compares
tokens and digest.
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
class Entry:
    """Tokens start..end-1 behind their prefix, with their KV as stored on the device."""

    contract: CacheContract
    text: bytes  # tokens 0..end-1, int32
    start: int
    # Per layer group storage[L, end - start, K, 2H], and f32[L, end - start, K, 2] if it is quantized.
    kv: tuple[Block, ...]
    digest: bytes  # see `digest_of`

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
        return len(self.text) + sum(block.nbytes for block in self.kv)

    def verify(self) -> bool:
        """Whether contract, tokens and KV are those that its digest was made of."""
        return digest_of(self.contract, self.text, self.start, self.kv) == self.digest


def digest_of(contract: CacheContract, text: bytes, start: int, kv: tuple[Block, ...]) -> bytes:
    """SHA-256 over an entry's contract, tokens, place and KV, each with its length."""
    digest = hashlib.sha256(_MAGIC)
    for part in (contract.digest(), text, start.to_bytes(8, "big")):
        digest.update(len(part).to_bytes(8, "big") + part)
    for block in kv:
        header = f"{block.dtype.name}{list(block.shape)}".encode()
        digest.update(len(header).to_bytes(8, "big") + header)
        digest.update(np.ascontiguousarray(block).view(np.uint8).reshape(-1).data)
    return digest.digest()


def make_entry(contract: CacheContract, text: bytes, start: int, kv: tuple[Block, ...]) -> Entry:
    """An entry with its digest."""
    return Entry(contract, text, start, kv, digest_of(contract, text, start, kv))


def _head(entry: Entry) -> bytes:
    arrays = [[block.dtype.name, list(block.shape)] for block in entry.kv]
    return json.dumps({"start": entry.start, "digest": entry.digest.hex(), "arrays": arrays}).encode()


def pack(entry: Entry) -> list[bytes | memoryview]:
    """The entry as bytes, in parts that need not be joined."""
    parts: list[bytes | memoryview] = [_MAGIC]
    for part in (_head(entry), entry.contract.serialize(), entry.text):
        parts += [len(part).to_bytes(8, "big"), part]
    for block in entry.kv:
        parts.append(np.ascontiguousarray(block).view(np.uint8).reshape(-1).data)
    return parts


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
        kv = []
        for name, shape in head["arrays"]:
            dtype, count = np.dtype(name), int(np.prod(shape))
            kv.append(np.frombuffer(data, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError("entry is truncated or corrupt, expected a readable head and its KV") from error
    if at != len(data):
        raise FormatError(f"entry has {len(data)} bytes, expected {at}")
    entry = Entry(CacheContract.deserialize(parts[1]), parts[2], start, tuple(kv), digest)
    if _head(entry) != parts[0] or not entry.verify():
        raise FormatError("entry does not have the digest it claims, expected tokens and KV as written")
    return entry
