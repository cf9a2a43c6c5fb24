"""Training of tiny models: what it writes loads again, and what it reads follows from the seed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import jaxkv
from experiments import train_tiny
from experiments.train_config import defaults, resolve
from experiments.train_tiny import batches, split
from experiments.workloads.corpus import Corpus
from jaxkv.errors import ConfigError

TEXT = Corpus.of("text", "the quick brown fox jumps over the lazy dog. " * 200)


def read_curve(tmp_path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((tmp_path / "run" / "loss.csv").read_text().splitlines()))


@pytest.mark.slow
def test_a_run_leaves_a_model_its_curve_and_its_config(tmp_path: Path) -> None:
    config = defaults(name="tiny", kind="plain", smoke=True, num_layers=2)
    result = train_tiny.run(config, tmp_path / "run", given=("num_layers",))
    assert (result.finished, result.failed) == (1, 0)
    model = jaxkv.load(tmp_path / "run" / "model", progress=False)
    document = json.loads((tmp_path / "run" / "config.json").read_text())
    assert model.weights_digest == document["model"]["weights_digest"]
    assert model.config == resolve(config, ("num_layers",)).model_config()
    rows = read_curve(tmp_path)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert [bool(row["held_out"]) for row in rows] == [False, True, False, True]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    again = train_tiny.run(config, tmp_path / "run", given=("num_layers",))  # nothing is done twice
    assert again.finished == 1
    assert read_curve(tmp_path) == rows


def test_held_out_text_is_never_trained_on() -> None:
    settings = resolve({"length": 16, "held_out": 3, "batch": 5})
    text, rows = split(TEXT, settings)
    whole = np.frombuffer(TEXT.text.encode(), np.uint8)
    assert len(text) == int(len(whole) * 0.95)
    np.testing.assert_array_equal(rows[-1], whole[-17:])
    np.testing.assert_array_equal(rows[0], whole[len(text) : len(text) + 17])
    first, second = (next(batches(text, settings)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.shape == (5, 17)
    with pytest.raises(ConfigError, match=r"config\.length is 900, expected fewer than the 450 bytes"):
        split(TEXT, resolve({"length": 900}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "hybird"}, "did you mean 'hybrid'"),
        ({"steps": 0}, "config.steps is 0, expected at least 1"),
        ({"learning_rate": 0.0}, "config.learning_rate is 0.0, expected more than 0"),
        ({"embed_dim": 100}, "config.embed_dim is 100, expected a multiple of 8 × num_heads 4"),
        ({"stepz": 3}, "config key 'stepz' is unknown"),
    ],
)
def test_bad_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(values)


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("hybrid", ("recurrent", "recurrent", "recurrent", "global")),
        ("sliding", ("local", "local", "local", "global")),
        ("plain", ("global",) * 4),
    ],
)
def test_kinds_differ_in_their_layers(kind: str, types: tuple[str, ...]) -> None:
    assert resolve({"kind": kind}).model_config().types == types
