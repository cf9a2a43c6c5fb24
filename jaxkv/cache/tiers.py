"""Where evicted entries go: host memory, and a directory behind it. Least recently used goes first.

A tier finds an entry by the digest of its contract and its prefix, and by its first token (chunk). Before
anything is used, the prefix's tokens are compared and the digest is checked: what fails is dropped and
counted. Contracts differ between domains and salts, so tiers separate them as the index does. A domain's
quota holds in each tier: what goes for it is the domain's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.entry import Entry, merged, pack, unpack
from jaxkv.cache.radix import TOKEN_BYTES
from jaxkv.cache.shares import ROOT_BYTES, Key, Root, Shares
from jaxkv.errors import FormatError


def key_of(root: bytes, text: bytes, at: int, grid: int) -> Key:
    """What an entry behind text[:at] that begins as text[at:] does is found under."""
    digest = hashlib.sha256(root)
    digest.update(at.to_bytes(8, "big"))
    digest.update(memoryview(text)[: TOKEN_BYTES * (at + grid)])
    return digest.digest()


class HostTier:
    """Entries in host memory, at most `capacity` bytes of tokens, KV and states."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.shares = Shares()
        self._entries: dict[Key, Entry] = {}

    @property
    def bytes(self) -> int:
        """What all entries take."""
        return self.shares.bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """The entry under a key, which is now the one used last."""
        entry = self._entries.get(key)
        if entry is not None:
            self.shares.use(key)
        return entry

    def put(self, key: Key, entry: Entry, quota: int | None = None) -> list[tuple[Key, Entry]]:
        """Takes an entry; returns those that had to go for it, maybe itself: its domain's own first.

        `quota`: bytes of KV and states that its contract may have here.
        """
        if entry.nbytes > self.capacity or (quota is not None and entry.payload > quota):
            return [(key, entry)]
        self.drop(key)
        self._entries[key] = entry
        root = entry.contract.digest()
        self.shares.add(key, root, entry.nbytes, entry.payload)
        displaced = self.enforce(root, quota)
        while self.bytes > self.capacity:
            displaced.append(self._take(self.shares.oldest()))
        return displaced

    def enforce(self, root: Root, quota: int | None) -> list[tuple[Key, Entry]]:
        """Brings a contract within its quota; returns what went."""
        return [self._take(key) for key in self.shares.over(root, quota)]

    def _take(self, key: Key) -> tuple[Key, Entry]:
        entry = self._entries[key]
        self.drop(key)
        return key, entry

    def drop(self, key: Key) -> None:
        """Forgets an entry, if it is there."""
        self._entries.pop(key, None)
        self.shares.remove(key)

    def forget(self, root: Root) -> None:
        """Forgets everything under a contract."""
        for key in self.shares.of(root):
            self.drop(key)

    def entries(self) -> list[Entry]:
        """Everything."""
        return list(self._entries.values())


class DiskTier:
    """Entries as files of a directory, at most `capacity` bytes; they outlive the process.

    A file is written aside and renamed; it carries its contract, its tokens and the digest of all, and is
    removed if it does not hold what it claims. Engines may share a directory. A file's name has the
    contract's digest and what counts towards a quota, so that neither is read from the file.
    """

    def __init__(self, directory: str | Path, capacity: int) -> None:
        self.directory = Path(directory).absolute()
        self.capacity = capacity
        self.corrupt = 0
        self.shares = Shares()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files: dict[Key, Path] = {}
        found = []
        for file in self.directory.glob("*.kv"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                status, parts = file.stat(), file.stem.split("-")
                root, key = (bytes.fromhex(part) for part in parts[:2])
                payload = int(parts[2]) if len(parts) > 2 else status.st_size  # of an older release
                found.append((status.st_mtime_ns, key, root, payload, file, status.st_size))
        for _, key, root, payload, file, size in sorted(found):
            self.drop(key)  # another engine's, older
            self._files[key] = file
            self.shares.add(key, root, size, payload)
        self._shrink()

    @property
    def bytes(self) -> int:
        """What all files take."""
        return self.shares.bytes

    def __len__(self) -> int:
        return len(self._files)

    def get(self, key: Key) -> Entry | None:
        """The entry under a key, read and verified; one that is damaged is removed."""
        file = self._files.get(key)
        if file is None:
            return None
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
        self.shares.use(key)
        return entry

    def put(self, key: Key, entry: Entry, quota: int | None = None) -> None:
        """Writes an entry, if there is room for it at all; the oldest go for it, its domain's own first.

        `quota`: bytes of KV and states that its contract may have here.
        """
        parts, root = pack(entry), entry.contract.digest()
        size = sum(len(part) for part in parts)
        if size > self.capacity or (quota is not None and entry.payload > quota):
            return
        name = f"{root[:ROOT_BYTES].hex()}-{key.hex()}-{entry.payload}"
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
        self._files[key] = file
        self.shares.add(key, root, size, entry.payload)
        self.enforce(root, quota)
        self._shrink()

    def enforce(self, root: Root, quota: int | None) -> None:
        """Brings a contract within its quota."""
        for key in self.shares.over(root, quota):
            self.drop(key)

    def drop(self, key: Key) -> None:
        """Removes an entry, if it is there."""
        file = self._files.pop(key, None)
        self.shares.remove(key)
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()

    def forget(self, root: Root) -> None:
        """Removes everything under a contract."""
        for key in self.shares.of(root):
            self.drop(key)

    def _shrink(self) -> None:
        while self.bytes > self.capacity and len(self):
            self.drop(self.shares.oldest())


class Tiers:
    """Both tiers as one: what the host gives up goes to the disk."""

    def __init__(
        self,
        host: HostTier | None,
        disk: DiskTier | None,
        grid: int,
        quota_of: Callable[[CacheContract], int | None] = lambda _: None,
    ) -> None:
        """`quota_of`: bytes of KV and states that a contract may have in each tier."""
        self.quota_of = quota_of
        self.host = host
        self.disk = disk
        self.grid = grid
        self.counts: Counter[str] = Counter()

    def put(self, entry: Entry) -> None:
        """Keeps an evicted entry. One that is a beginning of what is kept already is not kept again.

        Snapshots of both are kept, where one begins with the other.
        """
        key = key_of(entry.contract.digest(), entry.text, entry.start, self.grid)
        kept = self.host.get(key) if self.host is not None else None
        if kept is not None and (both := merged(kept, entry)) is not None:
            if both is kept:
                return
            entry = both
        self.counts["spilled"] += 1
        self.counts["spilled_tokens"] += entry.end - entry.start
        quota = self.quota_of(entry.contract)
        displaced = self.host.put(key, entry, quota) if self.host is not None else [(key, entry)]
        self._to_disk(displaced)

    def _to_disk(self, entries: list[tuple[Key, Entry]]) -> None:
        if self.disk is not None:
            for key, entry in entries:
                self.disk.put(key, entry, self.quota_of(entry.contract))

    def enforce(self, contract: CacheContract) -> None:
        """Brings a contract within its quota in both tiers."""
        root, quota = contract.digest(), self.quota_of(contract)
        if self.host is not None:
            self._to_disk(self.host.enforce(root, quota))
        if self.disk is not None:
            self.disk.enforce(root, quota)

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
