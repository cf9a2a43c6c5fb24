"""What a tier holds of whom: keys in order of use, with their bytes, in all and by contract."""

from __future__ import annotations

import collections
from collections.abc import Iterator

Key = bytes
Root = bytes  # a contract's digest
ROOT_BYTES = 16  # of a contract's digest: what a file's name holds of it


class Shares:
    """Bookkeeping of one tier. All operations but `over` and `forget` are O(1)."""

    def __init__(self) -> None:
        self.bytes = 0
        # Owner, bytes that the tier stores, and bytes of KV and states, which a quota counts.
        self._all: collections.OrderedDict[Key, tuple[bytes, int, int]] = collections.OrderedDict()
        self._own: dict[bytes, collections.OrderedDict[Key, None]] = {}
        self._payload: collections.Counter[bytes] = collections.Counter()

    def __len__(self) -> int:
        return len(self._all)

    def payload(self, root: Root) -> int:
        """Bytes of KV and states under a contract's digest."""
        return self._payload[root[:ROOT_BYTES]]

    def add(self, key: Key, root: Root, nbytes: int, payload: int) -> None:
        """Notes a key that is not there yet, as the one used last."""
        owner = root[:ROOT_BYTES]
        self._all[key] = owner, nbytes, payload
        self._own.setdefault(owner, collections.OrderedDict())[key] = None
        self._payload[owner] += payload
        self.bytes += nbytes

    def use(self, key: Key) -> None:
        """Makes a key the one used last."""
        self._all.move_to_end(key)
        self._own[self._all[key][0]].move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forgets a key, if it is there."""
        found = self._all.pop(key, None)
        if found is None:
            return
        owner, nbytes, payload = found
        self.bytes -= nbytes
        self._payload[owner] -= payload
        del self._own[owner][key]
        if not self._own[owner]:
            del self._own[owner], self._payload[owner]

    def oldest(self) -> Key:
        """The key used longest ago."""
        return next(iter(self._all))

    def of(self, root: Root) -> list[Key]:
        """Keys under a contract's digest, used longest ago first."""
        return list(self._own.get(root[:ROOT_BYTES], ()))

    def over(self, root: Root, quota: int | None) -> Iterator[Key]:
        """Keys of a contract that have to go, oldest first. The caller removes each before the next."""
        while quota is not None and self.payload(root) > quota:
            yield next(iter(self._own[root[:ROOT_BYTES]]))
