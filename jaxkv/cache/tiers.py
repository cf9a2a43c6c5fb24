"""Where evicted entries go: host memory, and a directory behind it. Least recently used goes first.

A tier finds an entry by the digest of its contract and its prefix, and by its first token (chunk). Before
anything is used, the prefix's tokens are compared and the digest is checked: what fails is dropped and
counted. Contracts differ between domains and salts, so tiers separate them as the index does.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import secrets
from collections import Counter
from pathlib import Path

from jaxkv.cache.entry import Entry, pack, unpack
from jaxkv.cache.radix import TOKEN_BYTES
from jaxkv.errors import FormatError

Key = bytes


def key_of(root: bytes, text: bytes, at: int, grid: int) -> Key:
    """What an entry behind text[:at] that begins as text[at:] does is found under."""
    digest = hashlib.sha256(root)
    digest.update(at.to_bytes(8, "big"))
    digest.update(memoryview(text)[: TOKEN_BYTES * (at + grid)])
    return digest.digest()


class HostTier:
    """Entries in host memory, at most `capacity` bytes of tokens and KV."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self._entries: collections.OrderedDict[Key, Entry] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """The entry under a key, which is now the one used last."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Key, entry: Entry) -> list[tuple[Key, Entry]]:
        """Takes an entry; returns those that had to go for it, maybe itself."""
        if entry.nbytes > self.capacity:
            return [(key, entry)]
        self.drop(key)
        self._entries[key] = entry
        self.bytes += entry.nbytes
        displaced = []
        while self.bytes > self.capacity:
            oldest, gone = self._entries.popitem(last=False)
            self.bytes -= gone.nbytes
            displaced.append((oldest, gone))
        return displaced

    def drop(self, key: Key) -> None:
        """Forgets an entry, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.nbytes

    def forget(self, root: bytes) -> None:
        """Forgets everything under a contract."""
        for key in [k for k, e in self._entries.items() if e.contract.digest() == root]:
            self.drop(key)

    def entries(self) -> list[Entry]:
        """Everything, used last first."""
        return list(reversed(self._entries.values()))


class DiskTier:
    """Entries as files of a directory, at most `capacity` bytes; they outlive the process.

    A file is written aside and renamed; it carries its contract, its tokens and the digest of all, and is
    removed if it does not hold what it claims. Engines may share a directory.
    """

    def __init__(self, directory: str | Path, capacity: int) -> None:
        self.directory = Path(directory).absolute()
        self.capacity = capacity
        self.corrupt = 0
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files: collections.OrderedDict[Key, tuple[Path, int]] = collections.OrderedDict()
        found = []
        for file in self.directory.glob("*.kv"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                status = file.stat()
                found.append(
                    (status.st_mtime_ns, bytes.fromhex(file.stem.split("-")[1]), file, status.st_size)
                )
        for _, key, file, size in sorted(found):
            self._files[key] = file, size
        self.bytes = sum(size for _, size in self._files.values())
        self._shrink()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, key: Key) -> Entry | None:
        """The entry under a key, read and verified; one that is damaged is removed."""
        known = self._files.get(key)
        if known is None:
            return None
        file, _ = known
        try:
            entry = unpack(file.read_bytes())
            os.utime(file)
        except FileNotFoundError:
            self.drop(key)  # another engine's eviction
            return None
        except (OSError, FormatError):
            self.corrupt += 1
            self.drop(key)
            return None
        self._files.move_to_end(key)
        return entry

    def put(self, key: Key, entry: Entry) -> None:
        """Writes an entry, if there is room for it at all; the oldest go for it."""
        parts = pack(entry)
        size = sum(len(part) for part in parts)
        if size > self.capacity:
            return
        # The contract's digest is in the name, so that a contract can be forgotten without reading.
        name = f"{entry.contract.digest().hex()[:32]}-{key.hex()}"
        aside = self.directory / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
                sink.writelines(parts)
            self.drop(key)
            file = self.directory / f"{name}.kv"
            os.replace(aside, file)
        except OSError:  # a full disk costs a cache entry, nothing else
            with contextlib.suppress(OSError):
                aside.unlink()
            return
        self._files[key] = file, size
        self.bytes += size
        self._shrink()

    def drop(self, key: Key) -> None:
        """Removes an entry, if it is there."""
        known = self._files.pop(key, None)
        if known is not None:
            self.bytes -= known[1]
            with contextlib.suppress(OSError):
                known[0].unlink()

    def forget(self, root: bytes) -> None:
        """Removes everything under a contract."""
        prefix = root.hex()[:32]
        for key in [k for k, (file, _) in self._files.items() if file.name.startswith(prefix)]:
            self.drop(key)

    def _shrink(self) -> None:
        while self.bytes > self.capacity and self._files:
            self.drop(next(iter(self._files)))


class Tiers:
    """Both tiers as one: what the host gives up goes to the disk."""

    def __init__(self, host: HostTier | None, disk: DiskTier | None, grid: int) -> None:
        self.host = host
        self.disk = disk
        self.grid = grid
        self.counts: Counter[str] = Counter()

    def put(self, entry: Entry) -> None:
        """Keeps an evicted entry. One that is a beginning of what is kept already is not kept again."""
        key = key_of(entry.contract.digest(), entry.text, entry.start, self.grid)
        kept = self.host.get(key) if self.host is not None else None
        if kept is not None and kept.run.startswith(entry.run):
            return
        self.counts["spilled"] += 1
        self.counts["spilled_tokens"] += entry.end - entry.start
        displaced = self.host.put(key, entry) if self.host is not None else [(key, entry)]
        if self.disk is not None:
            for other, gone in displaced:
                self.disk.put(other, gone)

    def find(self, root: bytes, text: bytes, at: int) -> Entry | None:
        """A verified entry that goes on from position `at` of a text as the text does, or None."""
        if TOKEN_BYTES * (at + self.grid) > len(text):
            return None
        key = key_of(root, text, at, self.grid)
        for tier in (self.host, self.disk):
            entry = tier.get(key) if tier is not None else None
            if entry is None:
                continue
            same = entry.start == at and entry.text[: TOKEN_BYTES * at] == text[: TOKEN_BYTES * at]
            if same and entry.contract.digest() == root and (tier is self.disk or entry.verify()):
                return entry
            self.counts["refused"] += 1
            assert tier is not None
            tier.drop(key)
        return None

    def forget(self, root: bytes) -> None:
        """Forgets everything under a contract."""
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.forget(root)
