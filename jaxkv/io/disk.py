"""Durable writes and leftovers: what downloading and converting a model share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path

_STALE_SECONDS = 24 * 3600


def fsync(path: str | Path) -> None:
    """Flushes a file or directory to the disk."""
    if os.name != "posix" and os.path.isdir(path):
        return  # only POSIX opens directories
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(directory: str | Path) -> None:
    """Flushes every file and directory under `directory`, children first."""
    for root, _, files in os.walk(directory, topdown=False):
        for name in files:
            fsync(os.path.join(root, name))
        fsync(root)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, hex."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def bytes_under(directory: str | Path) -> int:
    """Returns the size of all files under `directory`, which may be changing."""
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(root, name))
    return total


def remove_stale(parent: Path, pattern: str) -> None:
    """Removes directories that a killed process left a day or more ago; a live one's is younger."""
    for leftover in parent.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
