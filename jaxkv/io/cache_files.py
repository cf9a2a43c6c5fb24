"""A saved cache on disk: whole or not at all, and replaced without a moment in which there is none.

    <directory>/CURRENT              the name of the generation that counts
    <directory>/<generation>/cache.json    format, contracts, entries, digests of all files
    <directory>/<generation>/blocks/000000 Orbax checkpoints of tokens and KV

A save writes a new generation, flushes it, and then replaces `CURRENT` by one rename. A process that dies
before leaves the old generation in force; what it left behind is removed by the next save. Saves take
turns by a lock that dies with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxkv.errors import FormatError
from jaxkv.io.checkpoint import check_files, checkpointer, json_digest, manifest
from jaxkv.io.disk import fsync, fsync_tree

FORMAT_VERSION = 1
HEAD, POINTER, BLOCKS, LOCK = "cache.json", "CURRENT", "blocks", ".lock"
Tree = dict[str, np.ndarray[Any, np.dtype[Any]]]


def is_cache(path: Path) -> bool:
    """Whether `path` claims to be a saved cache."""
    return (path / POINTER).is_file()


@contextlib.contextmanager
def new_generation(path: Path) -> Iterator[Path]:
    """A directory to write a cache into; it counts once the block ends without an error.

    Raises:
      FormatError: `path` exists and holds something else.
      OSError: it cannot be written; what was there before stays.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_cache(path) and any(not f.name.startswith((".", "generation-")) for f in path.iterdir()):
        raise FormatError(f"{path}: exists and is not a saved cache, expected one or an empty place")
    with _locked(path / LOCK):
        keep = (path / POINTER).read_text().strip() if is_cache(path) else ""
        for old in path.glob("generation-*"):
            if old.name != keep:  # of a process that died
                shutil.rmtree(old, ignore_errors=True)
        name = f"generation-{secrets.token_hex(8)}"
        try:
            (path / name / BLOCKS).mkdir(parents=True)
            yield path / name
            fsync_tree(path / name)
            pointer = path / f".{POINTER}.{secrets.token_hex(4)}"
            pointer.write_text(name)
            fsync(pointer)
            os.replace(pointer, path / POINTER)
            fsync(path)
        except BaseException:
            shutil.rmtree(path / name, ignore_errors=True)
            raise
        if keep:
            shutil.rmtree(path / keep, ignore_errors=True)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not POSIX: one saver at a time is up to the user
        yield
        return
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_block(generation: Path, number: int, tree: Tree) -> None:
    """Writes one block of arrays."""
    with checkpointer() as writer:
        writer.save(generation / BLOCKS / f"{number:06d}", args=ocp.args.PyTreeSave(tree))


def write_head(generation: Path, body: dict[str, Any]) -> None:
    """Writes what describes the blocks; the last thing of a generation."""
    body = {"format_version": FORMAT_VERSION, **body, "files": manifest(generation / BLOCKS)}
    text = json.dumps({"digest": json_digest(body), **body})
    (generation / HEAD).write_text(text, encoding="utf-8")


def read_head(path: Path) -> tuple[Path, dict[str, Any]]:
    """The generation in force and its head, checked, with every file's digest compared.

    Raises:
      FormatError: not a cache, partial, corrupt or of another version; says which.
    """
    try:
        generation = path / (path / POINTER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: {POINTER} cannot be read, expected a saved cache") from error
    if generation.parent != path or not generation.name.startswith("generation-"):
        raise FormatError(f"{path}: {POINTER} names no generation: {_REMEDY}")
    try:
        body = json.loads((generation / HEAD).read_text(encoding="utf-8"))
        claimed, version = body.pop("digest"), body["format_version"]
    except OSError as error:
        raise FormatError(f"{generation}: {HEAD} cannot be read: {_REMEDY}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"{generation}: {HEAD} is truncated or corrupt: {_REMEDY}") from error
    if version != FORMAT_VERSION:
        raise FormatError(f"{path}: format_version is {version!r}, expected {FORMAT_VERSION}: {_REMEDY}")
    if claimed != json_digest(body):
        raise FormatError(f"{generation}: {HEAD} does not have the digest it claims: {_REMEDY}")
    check_files(generation / BLOCKS, body["files"], _REMEDY)
    return generation, body


def read_block(generation: Path, number: int) -> Tree:
    """Reads one block as NumPy arrays."""
    directory = generation / BLOCKS / f"{number:06d}"
    try:
        with checkpointer() as reader:
            known = reader.metadata(directory).item_metadata.tree
            restore = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in known}
            tree: Tree = reader.restore(directory, args=ocp.args.PyTreeRestore(restore_args=restore))
    except Exception as error:  # Orbax and TensorStore raise whatever their layer raises
        reason = " ".join(str(error).split())[:200]
        raise FormatError(f"{directory}: cannot be read ({reason}): {_REMEDY}") from error
    return tree


_REMEDY = "save the cache again"
