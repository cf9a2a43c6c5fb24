"""Hugging Face directories: one file or shards, every float type, damage refused."""

from __future__ import annotations

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny_models

from jaxkv.errors import FormatError
from jaxkv.io.models import load
from jaxkv.io.safetensors import read_hf_directory


@pytest.fixture
def directory(tmp_path):
    return tiny_models.write_hf(tmp_path / "model")


def refused(directory, match):
    with pytest.raises(FormatError, match=match) as caught:
        read_hf_directory(directory)
    assert "\n" not in str(caught.value)


def test_weights(directory):
    weights = tiny_models.hf_weights()
    config, params, tokenizer = read_hf_directory(directory)
    assert tokenizer is None
    assert config.num_layers == len(params.layers) == 2
    for layer in range(2):
        for name, expected in tiny_models.expected_leaves(weights, layer).items():
            np.testing.assert_array_equal(getattr(params.layers[layer], name), expected, name)
    np.testing.assert_array_equal(params.unembed, weights["lm_head.weight"])


def test_case_21_same_weights_as_gguf(directory, tmp_path):
    ours = load(directory, progress=False)
    gguf = load(tiny_models.write_gguf(tmp_path / "same.gguf"), progress=False)
    assert gguf.weights_digest == ours.weights_digest
    assert gguf.config.rope == ours.config.rope


def test_shards_equal_one_file(directory, tmp_path):
    sharded = tiny_models.write_hf(tmp_path / "sharded", shards=3)
    one, three = load(directory, progress=False), load(sharded, progress=False)
    assert one.weights_digest == three.weights_digest


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float_types(tmp_path, stored, dtype):
    weights = {n: w.astype(stored) for n, w in tiny_models.hf_weights().items()}
    _, params, _ = read_hf_directory(tiny_models.write_hf(tmp_path / "m", weights=weights), dtype=dtype)
    embed = weights["model.embed_tokens.weight"].astype(np.float32).astype(params.embed.dtype)
    np.testing.assert_array_equal(np.asarray(params.embed), embed)
    assert params.embed.dtype.name == dtype
    assert params.final_norm.dtype == np.float32


def test_tied_weights_may_be_stored_or_not(tmp_path):
    config = {**tiny_models.CONFIG, "tie_word_embeddings": True}
    weights = tiny_models.hf_weights()
    stored = tiny_models.write_hf(tmp_path / "a", config=config, weights=weights)
    del weights["lm_head.weight"]
    absent = tiny_models.write_hf(tmp_path / "b", config=config, weights=weights)
    a, b = load(stored, progress=False), load(absent, progress=False)
    assert a.params.unembed is None
    assert a.weights_digest == b.weights_digest


def test_computed_buffers_of_old_checkpoints_are_ignored(tmp_path):
    weights = tiny_models.hf_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    read_hf_directory(tiny_models.write_hf(tmp_path / "m", weights=weights))


def test_generation_config_decides_where_to_stop(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_hf_directory(directory)[0].eos_token_ids == (2, 7)


def test_missing_files(directory):
    (directory / "model.safetensors").unlink()
    refused(directory, "has neither model.safetensors nor model.safetensors.index.json")
    (directory / "config.json").unlink()
    refused(directory, "config.json: is missing, expected a Hugging Face model directory")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff"])
def test_damaged_config(directory, text):
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    refused(directory, "config.json: is (not valid JSON|a list|a str)")


def test_damaged_shards(tmp_path):
    directory = tiny_models.write_hf(tmp_path / "m", shards=2)
    index = directory / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace("lm_head.weight", "lm_head.wait"))
    refused(directory, "tensor 'lm_head.wait' is missing")
    index.write_text(good.replace("model-00001", "../model-00001"))
    refused(directory, "leaves the directory")
    index.write_text("{}")
    refused(directory, "has neither")
    index.write_text('{"weight_map": 3}')
    refused(directory, "weight_map is missing")
    index.write_text(good)
    (directory / "model-00002-of-00002.safetensors").unlink()
    refused(directory, "shard model-00002-of-00002.safetensors is missing")


def test_wrong_tensors(tmp_path):
    weights = tiny_models.hf_weights()
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {n: w for n, w in weights.items() if n != name}
    refused(tiny_models.write_hf(tmp_path / "a", weights=missing), f"'{name}' is missing")
    wrong = {**weights, name: weights[name].T.copy()}
    refused(tiny_models.write_hf(tmp_path / "b", weights=wrong), r"\[32, 64\], expected \[64, 32\]")
    extra = {**weights, "model.layers.0.self_attn.q_proj.bias": np.zeros(48, np.float32)}
    refused(tiny_models.write_hf(tmp_path / "c", weights=extra), "q_proj.bias' is not one")
    integer = {**weights, name: weights[name].astype(np.int8)}
    refused(tiny_models.write_hf(tmp_path / "d", weights=integer), "has type I8, expected one of F32")


def test_truncated_and_flipped_safetensors(directory):
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    for i in range(20):
        file.write_bytes(raw[: len(raw) * i // 20])
        refused(directory, "not a whole safetensors file|cannot be read")
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(raw[:8], "little")
    outcomes = set()
    for offset in [*range(12), *rng.integers(12, header, 150)]:
        damaged = bytearray(raw)
        damaged[offset] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            read_hf_directory(directory)
            outcomes.add("loaded")
        except FormatError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_load_takes_a_directory(directory):
    model = load(directory, progress=False)
    assert (model.name, model.dtype, model.source) == ("model", "float32", str(directory))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model.params))
    assert json.loads(json.dumps(model.config.to_dict()))["num_heads"] == 6


def test_mapped_file_may_go_away_after_the_load(directory):
    model = load(directory, progress=False)
    before = np.asarray(model.params.embed).copy()
    safetensors.numpy.save_file(
        {n: w * 0 for n, w in tiny_models.hf_weights().items()}, directory / "model.safetensors"
    )
    np.testing.assert_array_equal(model.params.embed, before)
