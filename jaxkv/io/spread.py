"""Checkpoints of weights that lie on a mesh: each device reads, and each process writes, its own shards.

What is on disk does not depend on the mesh: a checkpoint from one loads onto any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxkv.model.config import ModelConfig
from jaxkv.model.params import Params, stays_float32
from jaxkv.model.sharding import field_name
from jaxkv.parallel import weight_shardings
from jaxkv.processes import wait_for_all

MARK = "together"  # in the name of what several processes write aside


def is_spread(params: Params) -> bool:
    """Whether other processes hold a part of the weights."""
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(params))


def is_shared(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of several processes."""
    return mesh is not None and bool(mesh.is_multi_process)


def meet(together: bool, what: str) -> None:
    """Waits for the other processes if they take part."""
    if together:
        wait_for_all(what)


def follow(path: Path, write: Callable[[Path], None]) -> Path:
    """The part of all processes but the first in a save: writes where the first made room."""
    meet(True, "process 0 made room for a checkpoint")
    write(path.parent / f".{path.name}.{MARK}.partial")
    meet(True, "process 0 finished a checkpoint")
    return path


def converted(expected: Params, target: np.dtype[Any] | None) -> Params:
    """Shapes of the weights with matrices in `target`; the small ones stay float32."""

    def of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        keep = target is None or stays_float32(field_name(path))
        return leaf if keep else jax.ShapeDtypeStruct(leaf.shape, target)

    found: Params = jax.tree.map_with_path(of, expected)
    return found


def restore_args(
    to_tree: Callable[[Any], dict[str, Any]], expected: Params, config: ModelConfig, mesh: Mesh
) -> Any:
    """How Orbax is to read each weight: its dtype, and which part of it each device holds."""
    args = jax.tree.map(
        lambda leaf, where: ocp.ArrayRestoreArgs(
            dtype=leaf.dtype, sharding=where, global_shape=leaf.shape, strict=True
        ),
        expected,
        weight_shardings(expected, config, mesh),
    )
    return to_tree(args)
