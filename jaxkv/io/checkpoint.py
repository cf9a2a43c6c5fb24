"""Saves and loads converted models: an Orbax checkpoint of the weights beside one metadata file.

    <directory>/weights/       Orbax PyTree checkpoint
    <directory>/jaxkv.json     format version, config, dtype, digests, files, tokenizer, source

*Atomic*: everything is written to a sibling directory whose name starts with a dot, flushed to
disk, and renamed to its final name in one step. A process that dies before leaves only the sibling,
which no load looks at. *Checked*: metadata carries the SHA-256 of itself, of each of Orbax's files
and of the weights. A load checks the files first, because Orbax reports a damaged one from threads
that outlive the call, and the weights that came out last; together under a second for 135M float32
weights. *Concurrent*: two processes saving to one place
both write aside; the first rename wins and the second finds a complete checkpoint and keeps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxkv.errors import ConfigError, FormatError
from jaxkv.io import spread
from jaxkv.io.disk import fsync, fsync_tree, remove_stale, sha256
from jaxkv.io.tokenizer import Tokenizer, tokenizer_from_definition
from jaxkv.io.weights import dtype_of
from jaxkv.model.config import ModelConfig
from jaxkv.model.params import LayerParams, Params, abstract_params, params_digest, stays_float32
from jaxkv.model.recurrent_params import RecurrentParams
from jaxkv.parallel import to_host

FORMAT_VERSION = 3  # 2 had matrices as [in, out]
METADATA = "jaxkv.json"
_WEIGHTS = "weights"
_KEYS = ("name", "source", "license", "dtype", "config", "weights_digest", "files", "tokenizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder with its weights and tokenizer: what `load` returns and a checkpoint holds."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    name: str
    dtype: str  # of the weight matrices; norm weights are float32
    weights_digest: str  # SHA-256 of `params`, hex; differs between dtypes
    source: str  # where the weights came from, for people
    license: str | None = None


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a directory that claims to be a jaxkv checkpoint."""
    return (Path(path) / METADATA).is_file()


def save_checkpoint(path: str | Path, model: Model) -> Path:
    """Writes `model` at `path`, a directory that must not exist or must hold a checkpoint already.

    An existing checkpoint is kept, not replaced: remove it first to write another. Weights on a mesh of
    several processes are saved by all of them, each its own shards, at a path that all of them see.

    Returns:
      `path`.

    Raises:
      FormatError: `path` exists and is not a checkpoint.
      OSError: the disk is full or the parent cannot be written; nothing is left behind.
    """
    path = Path(path).absolute()
    together = spread.is_spread(model.params)
    if together and jax.process_index():
        return spread.follow(path, lambda aside: _write_weights(aside / _WEIGHTS, model.params, together))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent, f".{path.name}.*.partial")
    # Orbax reports a full disk from threads that outlive the call, so it is asked for beforehand
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        text = f"{free / 1e6:.0f} MB free, expected {needed / 1e6:.0f} MB for the weights"
        raise OSError(errno.ENOSPC, text, str(path.parent))
    mark = spread.MARK if together else f"{os.getpid()}-{secrets.token_hex(4)}"
    aside = path.parent / f".{path.name}.{mark}.partial"
    aside.mkdir()
    try:
        spread.meet(together, "process 0 made room for a checkpoint")
        _write_weights(aside / _WEIGHTS, model.params, together)
        body = {
            "format_version": FORMAT_VERSION,
            "name": model.name,
            "source": model.source,
            "license": model.license,
            "dtype": np.dtype(model.params.embed.dtype).name,
            "config": model.config.to_dict(),
            "weights_digest": model.weights_digest if together else params_digest(model.params),
            "files": manifest(aside / _WEIGHTS),
            "tokenizer": None if model.tokenizer is None else model.tokenizer.definition(),
        }
        text = json.dumps({"digest": json_digest(body), **body}, ensure_ascii=False, indent=1)
        (aside / METADATA).write_text(text, encoding="utf-8")
        fsync_tree(aside)
        _publish(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    spread.meet(together, "process 0 finished a checkpoint")
    return path


def load_checkpoint(path: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None) -> Model:
    """Loads a checkpoint and checks it whole.

    Args:
      path: a directory written by `save_checkpoint`.
      dtype: converts the matrices to this; None keeps the stored dtype.
      mesh: reads every device's own shards, whatever mesh they were saved from.

    Raises:
      ConfigError: `dtype` is unknown.
      FormatError: partial, corrupt, or of another format version; the message says which.
    """
    path = Path(path).absolute()
    target = None if dtype is None else dtype_of(dtype)
    body = _read_metadata(path)
    try:
        config = ModelConfig.from_dict(body["config"])
        stored = dtype_of(body["dtype"])
    except ConfigError as error:
        raise FormatError(f"{path}: {METADATA}: {error}") from error
    check_files(path / _WEIGHTS, body["files"], _remedy(path))
    expected = abstract_params(config, stored)
    tree = _to_tree(expected)
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    if mesh is not None:
        expected = spread.converted(expected, target)
        tree, how = _to_tree(expected), spread.restore_args(_to_tree, expected, config, mesh)
    try:
        with checkpointer(spread.is_shared(mesh)) as reader:
            arguments = ocp.args.PyTreeRestore(tree, restore_args=how)
            tree = reader.restore(path / _WEIGHTS, args=arguments)
    except Exception as error:  # Orbax and TensorStore raise whatever their layer raises
        reason = " ".join(str(error).split())[:200]
        raise FormatError(f"{path}: the weights cannot be read ({reason}): {_remedy(path)}") from error
    params = _from_tree(tree, config)
    for (key, leaf), want in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(expected), strict=True):
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise FormatError(
                f"{path}: weights{jax.tree_util.keystr(key)} is {leaf.dtype}{list(leaf.shape)}, "
                f"expected {want.dtype}{list(want.shape)}"
            )
    # What was converted while it was read has a digest of its own; what lies on other processes too is not
    # gathered to be compared: the files' digests were.
    as_saved = mesh is None or (target in (None, stored) and not spread.is_spread(params))
    digest = params_digest(params) if as_saved else body["weights_digest"]
    if digest != body["weights_digest"]:
        raise FormatError(
            f"{path}: weights have digest {digest[:12]}, expected {body['weights_digest'][:12]}: "
            f"the files are corrupt, {_remedy(path)}"
        )
    final = params if mesh is not None else None
    del params
    if final is None:
        final = _place(tree, config, target)
    if target is not None and target != stored:
        digest = params_digest(final, to_host)
    definition = body["tokenizer"]
    return Model(
        config=config,
        params=final,
        tokenizer=None if definition is None else tokenizer_from_definition(definition, str(path)),
        name=body["name"],
        dtype=dtype or body["dtype"],
        weights_digest=digest,
        source=body["source"],
        license=body["license"],
    )


def manifest(directory: Path) -> dict[str, list[Any]]:
    """Relative path -> [size, SHA-256] of every file under `directory`."""
    return {
        file.relative_to(directory).as_posix(): [file.stat().st_size, sha256(file)]
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def check_files(directory: Path, expected: dict[str, list[Any]], remedy: str) -> None:
    """Raises a FormatError, ending in `remedy`, unless every file is as `manifest` saw it."""
    for name, (size, digest) in expected.items():
        file = directory / name
        try:
            found = file.stat().st_size
            same = found == size and sha256(file) == digest
        except OSError as error:
            raise FormatError(f"{file}: cannot be read ({error.strerror or error}), {remedy}") from error
        if found != size:
            raise FormatError(f"{file}: has {found} bytes, expected {size}: {remedy}")
        if not same:
            raise FormatError(f"{file}: is corrupt, expected SHA-256 {digest[:12]}: {remedy}")


def _write_weights(path: Path, params: Params, together: bool = False) -> None:
    try:
        with checkpointer(together) as writer:
            writer.save(path, args=ocp.args.PyTreeSave(_to_tree(params)))
    except OSError:
        raise
    except Exception as error:  # TensorStore turns what the disk says into its own errors
        reason = " ".join(str(error).split())[:200]
        raise OSError(errno.EIO, f"the weights cannot be written ({reason})", str(path)) from error


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        body = json.loads((path / METADATA).read_text(encoding="utf-8"))
        claimed = body.pop("digest")
        version = body["format_version"]
    except OSError as error:
        raise FormatError(f"{path}: {METADATA} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"{path}: {METADATA} is truncated or corrupt: {_remedy(path)}") from error
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path}: format_version is {version!r}, expected {FORMAT_VERSION}: {_remedy(path)}"
        )
    if claimed != json_digest(body):
        raise FormatError(
            f"{path}: {METADATA} does not have the digest it claims: it is corrupt, {_remedy(path)}"
        )
    for key in _KEYS:
        if key not in body:
            raise FormatError(f"{path}: {METADATA} lacks '{key}': {_remedy(path)}")
    result: dict[str, Any] = body
    return result


def _remedy(path: Path) -> str:
    return f"remove {path} and convert the model again"


def json_digest(body: dict[str, Any]) -> str:
    """SHA-256 of a JSON-serializable mapping in one canonical form, hex."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _to_tree(params: Params) -> dict[str, Any]:
    """Plain nested dicts, so that what is on disk does not depend on our classes."""
    tree = {"embed": params.embed, "final_norm": params.final_norm}
    if params.unembed is not None:
        tree["unembed"] = params.unembed
    layers = {
        f"{i:04d}": {
            f.name: getattr(layer, f.name)
            for f in dataclasses.fields(layer)
            if getattr(layer, f.name) is not None
        }
        for i, layer in enumerate(params.layers)
    }
    return {**tree, "layers": layers}


def _from_tree(tree: dict[str, Any], config: ModelConfig) -> Params:
    made = (RecurrentParams if kind == "recurrent" else LayerParams for kind in config.types)
    layers = tuple(make(**tree["layers"][f"{i:04d}"]) for i, make in enumerate(made))
    return Params(
        embed=tree["embed"],
        layers=layers,
        final_norm=tree["final_norm"],
        unembed=tree.get("unembed"),
    )


def _place(tree: dict[str, Any], config: ModelConfig, target: np.dtype[Any] | None) -> Params:
    """Moves leaves to the device one by one, dropping each host copy, so the peak is one model."""

    def move(node: dict[str, Any]) -> dict[str, Any]:
        moved: dict[str, Any] = {}
        for key in list(node):
            value = node.pop(key)
            if isinstance(value, dict):
                moved[key] = move(value)
            elif target is None or stays_float32(key):
                moved[key] = jax.device_put(value)
            else:
                moved[key] = jax.device_put(value.astype(target))
        return moved

    return _from_tree(move(tree), config)


def _alone() -> ocp.options.MultiprocessingOptions:
    """Each process saves and loads for itself: no barrier that others would have to join."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"jaxkv{index}"
    )


@contextlib.contextmanager
def checkpointer(together: bool = False) -> Iterator[ocp.Checkpointer]:
    """An Orbax checkpointer; its warnings are about its own options and hidden, errors raise.

    `together`: all processes save or load at once, each its own shards.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    who = ocp.options.MultiprocessingOptions() if together else _alone()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=who)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            with ocp.Checkpointer(handler, multiprocessing_options=who) as checkpointer:
                yield checkpointer
        finally:
            logger.setLevel(level)


def _publish(aside: Path, path: Path) -> None:
    try:
        os.rename(aside, path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        if not is_checkpoint(path):
            raise FormatError(f"{path}: exists and is not a jaxkv checkpoint") from error
        return  # another process finished first: its checkpoint is as good as ours
    fsync(path.parent)
