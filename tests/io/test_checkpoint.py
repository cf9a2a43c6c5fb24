"""Checkpoints: round trip, damage refused with the reason, crashes and races leave nothing half."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_models

from jaxkv.errors import ConfigError, FormatError
from jaxkv.io import checkpoint
from jaxkv.io.checkpoint import METADATA, is_checkpoint, load_checkpoint, save_checkpoint
from jaxkv.io.models import Model, load
from jaxkv.model.params import params_digest


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return load(tiny_models.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"), progress=False)


@pytest.fixture
def saved(model, tmp_path) -> Path:
    return save_checkpoint(tmp_path / "checkpoint", model)


def refused(path: Path, match: str) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


def same(a: Model, b: Model) -> None:
    assert a.config == b.config
    for (key, x), y in zip(jax.tree.leaves_with_path(a.params), jax.tree.leaves(b.params), strict=True):
        assert x.dtype == y.dtype, key
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_round_trip(model, saved):
    again = load_checkpoint(saved)
    same(model, again)
    for field in ("name", "dtype", "weights_digest", "source", "license"):
        assert getattr(again, field) == getattr(model, field), field
    assert again.tokenizer.digest == model.tokenizer.digest
    assert again.tokenizer.template_digest == model.tokenizer.template_digest
    np.testing.assert_array_equal(again.tokenizer.encode("the x"), model.tokenizer.encode("the x"))
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def test_load_takes_a_checkpoint_directory(model, saved):
    again = load(saved, progress=False)
    assert again.weights_digest == model.weights_digest


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_without_a_tokenizer(model, tmp_path, tied):
    params = model.params.replace(unembed=None) if tied else model.params
    config = dataclasses.replace(model.config, tie_embeddings=tied)
    bare = dataclasses.replace(model, params=params, config=config, tokenizer=None)
    again = load_checkpoint(save_checkpoint(tmp_path / "c", bare))
    same(bare, again)
    assert again.tokenizer is None
    assert again.weights_digest == params_digest(params)


def test_load_in_another_dtype_rounds_once(model, saved):
    rounded = load_checkpoint(saved, dtype="bfloat16")
    assert rounded.dtype == "bfloat16"
    assert rounded.params.final_norm.dtype == np.float32
    expected = np.asarray(model.params.embed).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(rounded.params.embed), expected)
    assert rounded.weights_digest == params_digest(rounded.params) != model.weights_digest
    with pytest.raises(ConfigError, match="dtype is 'float16', expected one of float32, bfloat16"):
        load_checkpoint(saved, dtype="float16")


def test_a_bfloat16_model_is_stored_as_such(saved, tmp_path):
    rounded = load_checkpoint(saved, dtype="bfloat16")
    again = load_checkpoint(save_checkpoint(tmp_path / "b", rounded))
    assert again.dtype == "bfloat16"
    assert again.weights_digest == rounded.weights_digest


def reseal(path: Path, **changes) -> None:
    """Rewrites metadata with a digest that fits, as a forger or a faulty writer would."""
    body = {**json.loads((path / METADATA).read_text()), **changes}
    del body["digest"]
    (path / METADATA).write_text(json.dumps({"digest": checkpoint.json_digest(body), **body}))


def test_case_40_weights_that_are_not_those_of_the_metadata(saved):
    reseal(saved, weights_digest="0" * 64)
    refused(saved, "weights have digest .* expected 0000.*: the files are corrupt, remove")


def test_case_40_shapes_that_are_not_those_of_the_config(model, saved):
    wrong = dataclasses.replace(model.config, num_layers=3)
    reseal(saved, config=wrong.to_dict())
    refused(saved, "the weights cannot be read")
    typo = model.config.to_dict()
    typo["mlp_dims"] = typo.pop("mlp_dim")
    reseal(saved, config=typo)  # case 42
    refused(saved, "model config key 'mlp_dims' is unknown; did you mean 'mlp_dim'")


def test_case_40_metadata(saved):
    file = saved / METADATA
    text = file.read_text()
    body = json.loads(text)
    for damaged in (text[: len(text) // 2], "", "[]", "{}", text.replace('"digest"', '"d"')):
        file.write_text(damaged)
        refused(saved, "jaxkv.json is truncated or corrupt: remove")
    file.write_text(json.dumps({**body, "format_version": 99}))
    refused(saved, "format_version is 99, expected 3")
    for key, value in [("name", "other"), ("dtype", "bfloat16"), ("weights_digest", "0" * 64)]:
        file.write_text(json.dumps({**body, key: value}))
        refused(saved, "does not have the digest it claims")
    del body["files"], body["digest"]
    file.write_text(json.dumps({"digest": checkpoint.json_digest(body), **body}))
    refused(saved, "jaxkv.json lacks 'files': remove")
    file.unlink()
    assert not is_checkpoint(saved)
    refused(saved, "jaxkv.json cannot be read")


def test_case_40_any_file_truncated_flipped_or_missing(saved):
    files = [p for p in sorted((saved / "weights").rglob("*")) if p.is_file() and p.stat().st_size]
    assert len(files) > 3
    for file in files:
        raw = file.read_bytes()
        file.write_bytes(raw[: len(raw) // 2])
        refused(saved, f"{file.name}: has {len(raw) // 2} bytes, expected {len(raw)}: remove")
        flipped = bytearray(raw)
        flipped[len(raw) // 2] ^= 0x10
        file.write_bytes(flipped)
        refused(saved, f"{file.name}: is corrupt")
        file.unlink()
        refused(saved, f"{file.name}: cannot be read")
        file.write_bytes(raw)
    load_checkpoint(saved)


def test_an_existing_checkpoint_is_kept(model, saved, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    save_checkpoint(saved, dataclasses.replace(model, name="second"))
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == before
    other = tmp_path / "not-a-checkpoint"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match="exists and is not a jaxkv checkpoint"):
        save_checkpoint(other, model)
    assert (other / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("step", ["fsync_tree", "params_digest", "_publish"])
def test_a_save_that_fails_leaves_nothing(model, tmp_path, monkeypatch, step):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, step, fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "c", model)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_before_writing(model, tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="0 MB free, expected 0 MB for the weights"):
        save_checkpoint(tmp_path / "c", model)
    assert list(tmp_path.iterdir()) == []


def test_what_orbax_cannot_write_is_an_os_error(model, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing\nNo space left on device")

    monkeypatch.setattr(checkpoint.ocp.Checkpointer, "save", fail)
    with pytest.raises(OSError, match="RESOURCE_EXHAUSTED: Error writing No space left on device"):
        save_checkpoint(tmp_path / "c", model)
    assert list(tmp_path.iterdir()) == []


CHILD = """
    import sys, time
    from pathlib import Path
    from jaxkv.io import checkpoint
    from jaxkv.io.models import load
    model = load(sys.argv[1], progress=False)
    barrier = Path(sys.argv[3])
    def wait(aside):
        (barrier / f"{aside.name}.ready").touch()
        while not (barrier / "go").exists():
            time.sleep(0.01)
    checkpoint.fsync_tree = wait
    checkpoint.save_checkpoint(sys.argv[2], model)
    print(checkpoint.load_checkpoint(sys.argv[2]).weights_digest)
"""


def start_child(gguf: Path, target: Path, barrier: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(CHILD), gguf, target, barrier],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
    )


def wait_for(barrier: Path, count: int, children: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 120
    while len(list(barrier.glob("*.ready"))) < count:
        for child in children:
            assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_case_40_killed_in_the_middle_of_a_save(model, tmp_path):
    gguf = tiny_models.write_gguf(tmp_path / "tiny.gguf")
    barrier = tmp_path / "barrier"
    barrier.mkdir()
    target = tmp_path / "cache" / "checkpoint"
    child = start_child(gguf, target, barrier)
    wait_for(barrier, 1, [child])
    child.send_signal(signal.SIGKILL)
    child.communicate()
    left = list(target.parent.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".checkpoint.")
    assert not is_checkpoint(target)
    refused(target, "cannot be read")
    same(model, load_checkpoint(save_checkpoint(target, model)))  # the leftover is in nobody's way
    assert left[0].exists()
    os.utime(left[0], (0, 0))
    save_checkpoint(target, model)
    assert [p.name for p in target.parent.iterdir()] == ["checkpoint"]


def test_case_40_two_processes_saving_at_once(model, tmp_path):
    gguf = tiny_models.write_gguf(tmp_path / "tiny.gguf")
    barrier = tmp_path / "barrier"
    barrier.mkdir()
    target = tmp_path / "cache" / "checkpoint"
    children = [start_child(gguf, target, barrier) for _ in range(2)]
    wait_for(barrier, 2, children)
    (barrier / "go").touch()
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        assert out.split() == [model.weights_digest]
    assert [p.name for p in target.parent.iterdir()] == ["checkpoint"]
