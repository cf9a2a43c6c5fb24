"""Weights saved from one mesh, loaded onto others: every device reads its own shards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from on_mesh import EVEN, UNEVEN, mesh_of, model_of

import jaxkv
from jaxkv.io.checkpoint import load_checkpoint, save_checkpoint
from jaxkv.parallel import place_model, weight_shardings


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_a_checkpoint_goes_from_any_mesh_to_any_other(shape: dict[str, int], tmp_path: Path) -> None:
    model = model_of(**shape)
    save_checkpoint(tmp_path / "four", place_model(model, mesh_of(4)))
    save_checkpoint(tmp_path / "one", model)
    for path in ("four", "one"):
        for size in (2, 8, None):
            mesh = mesh_of(size) if size else None
            loaded = load_checkpoint(tmp_path / path, mesh=mesh)
            assert loaded.weights_digest == model.weights_digest
            for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(model.params), strict=True):
                np.testing.assert_array_equal(a, b)
            if mesh is not None:
                require_places(loaded, mesh)


def require_places(model: jaxkv.Model, mesh: jax.sharding.Mesh) -> None:
    wanted = weight_shardings(model.params, model.config, mesh)
    for leaf, where in zip(jax.tree.leaves(model.params), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == where


def test_matrices_are_converted_while_they_are_read(tmp_path: Path) -> None:
    model = model_of(**EVEN)
    save_checkpoint(tmp_path / "model", model)
    spread = jaxkv.load(tmp_path / "model", dtype="bfloat16", mesh="model:8", progress=False)
    alone = jaxkv.load(tmp_path / "model", dtype="bfloat16", progress=False)
    assert spread.weights_digest == alone.weights_digest != model.weights_digest
    assert spread.params.embed.dtype == jax.numpy.bfloat16
    assert spread.params.final_norm.dtype == jax.numpy.float32
    require_places(spread, mesh_of(8))
    for a, b in zip(jax.tree.leaves(spread.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_damaged_checkpoint_is_refused_on_a_mesh_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", model_of(**EVEN))
    files = sorted((f for f in (tmp_path / "model" / "weights").rglob("*") if f.is_file()), key=size_of)
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 1
    files[-1].write_bytes(data)
    with pytest.raises(jaxkv.FormatError, match="is corrupt"):
        load_checkpoint(tmp_path / "model", mesh=mesh_of(4))
    shutil.rmtree(tmp_path / "model" / "weights")
    with pytest.raises(jaxkv.FormatError, match="cannot be read"):
        load_checkpoint(tmp_path / "model", mesh=mesh_of(4))


def size_of(path: Any) -> int:
    return int(path.stat().st_size)
