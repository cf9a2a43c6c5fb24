"""GGUF files: weights and configuration come out right; damaged files end in one sentence."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from gguf import GGMLQuantizationType as Q

from jaxkv.errors import ConfigError, FormatError
from jaxkv.io.gguf import open_gguf, read_gguf_config, read_gguf_params
from jaxkv.io.models import load
from jaxkv.io.tokenizer import tokenizer_from_gguf
from jaxkv.model.rope import rope_angles, rotate


def read(path: Path, dtype: str = "float32"):
    file = open_gguf(path)
    config = read_gguf_config(file)
    return config, read_gguf_params(file, config, dtype=dtype)


@pytest.fixture
def path(tmp_path):
    return tiny_models.write_gguf(tmp_path / "tiny.gguf")


def test_header_agrees_with_the_gguf_package(path):
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert mine.type == tensor.tensor_type
        np.testing.assert_array_equal(mine.rows(0, mine.shape[0]), tensor.data)


def test_config(path):
    config = read_gguf_config(open_gguf(path))
    c = tiny_models.CONFIG
    assert (config.vocab_size, config.num_layers) == (c["vocab_size"], c["num_hidden_layers"])
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert (config.embed_dim, config.mlp_dim, config.max_positions) == (32, 64, 128)
    assert config.rope.theta == 10_000.0
    assert config.rope.rotary_dim == 8
    assert math.isclose(config.norm_eps, 1e-5, rel_tol=1e-6)
    assert (config.tie_embeddings, config.bos_token_id, config.eos_token_ids) == (False, 1, (2,))


def test_weights_equal_those_of_the_huggingface_layout(path):
    weights = tiny_models.hf_weights()
    _, params = read(path)
    for layer in range(2):
        for name, expected in tiny_models.expected_leaves(weights, layer).items():
            np.testing.assert_array_equal(getattr(params.layers[layer], name), expected, name)
    np.testing.assert_array_equal(params.embed, weights["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.unembed, weights["lm_head.weight"])
    np.testing.assert_array_equal(params.final_norm, weights["model.norm.weight"])


def test_case_21_both_rotary_layouts_against_float64(path):
    """Rotating pairs (2i, 2i+1) of the stored rows = rotating halves of the permuted rows."""
    file = open_gguf(path)
    config = read_gguf_config(file)
    params = read_gguf_params(file, config)
    rng = np.random.default_rng(0)
    x, positions = rng.standard_normal((5, config.embed_dim)), np.array([0, 1, 17, 100, 127])
    h = config.head_dim
    stored = file.tensors["blk.1.attn_q.weight"].rows(0, config.num_heads * h).astype(np.float64)
    pairs = (x @ stored.T).reshape(5, config.num_heads, h // 2, 2)
    frequency = config.rope.theta ** (-np.arange(h // 2, dtype=np.float64) / (h // 2))
    turn = np.exp(1j * positions[:, None, None] * frequency)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    group = config.group_size
    q = x @ np.asarray(params.layers[1].qkv, np.float64)[:, :group].reshape(-1, config.embed_dim).T
    q = q.reshape(5, config.num_heads, h)
    half_split = (q[..., : h // 2] + 1j * q[..., h // 2 :]) * turn
    np.testing.assert_allclose(half_split, turned, rtol=1e-12, atol=1e-12)
    cos, sin = rope_angles(positions.astype(np.int32), config.rope, 127)
    ours = np.asarray(rotate(q.astype(np.float32), cos[:, None], sin[:, None]))
    np.testing.assert_allclose(ours[..., : h // 2], turned.real, atol=1e-5)
    np.testing.assert_allclose(ours[..., h // 2 :], turned.imag, atol=1e-5)


def test_tied_when_there_is_no_output_tensor(tmp_path):
    tensors = tiny_models.gguf_weights(tiny_models.hf_weights())
    del tensors["output.weight"]
    config, params = read(tiny_models.write_gguf(tmp_path / "t.gguf", tensors=tensors))
    assert config.tie_embeddings
    assert params.unembed is None


def test_bfloat16_rounds_each_weight_once_and_keeps_norms(path):
    _, exact = read(path)
    _, rounded = read(path, "bfloat16")
    for (key, a), b in zip(jax.tree.leaves_with_path(exact), jax.tree.leaves(rounded), strict=True):
        norm = jax.tree_util.keystr(key).endswith("norm")
        assert b.dtype == (np.float32 if norm else ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(a).astype(b.dtype), np.asarray(b))


def test_unknown_dtype_names_the_nearest(path):
    with pytest.raises(ConfigError, match=r"'bfloat', .* did you mean 'bfloat16'"):
        read(path, "bfloat")


QUANTIZED = [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]


@pytest.mark.parametrize("kind", QUANTIZED, ids=[q.name for q in QUANTIZED])
def test_every_tensor_type_equals_the_package_dequantization(tmp_path, kind):
    tensors = tiny_models.gguf_weights(tiny_models.hf_weights())
    names = [n for n in tensors if "norm" not in n]
    names = [n for n in names if tensors[n].shape[1] % 32 == 0]
    path = tiny_models.write_gguf(tmp_path / "q.gguf", tensors=tensors, types=dict.fromkeys(names, kind))
    file = open_gguf(path)
    for name in names:
        expected = gguf.dequantize(gguf.quantize(tensors[name], kind), kind)
        rows = tensors[name].shape[0]
        np.testing.assert_array_equal(file.tensors[name].rows(0, rows), expected)
        np.testing.assert_array_equal(file.tensors[name].rows(3, rows - 1), expected[3:-1])
    read(path)


def test_quantized_norm_weights_are_read_whole(tmp_path):
    tensors = tiny_models.gguf_weights(tiny_models.hf_weights())
    path = tiny_models.write_gguf(tmp_path / "q.gguf", tensors=tensors, types={"output_norm.weight": Q.Q8_0})
    expected = gguf.dequantize(gguf.quantize(tensors["output_norm.weight"], Q.Q8_0), Q.Q8_0)
    np.testing.assert_array_equal(read(path)[1].final_norm, expected)


# Damage: one sentence that names what was found


def refused(path: Path, match: str) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        load(path, progress=False)
    assert "\n" not in str(caught.value)


def test_case_41_not_a_gguf(tmp_path):
    for content in (b"", b"GG", b"PK\x03\x04" + bytes(100), b"GGUF", b"GGUF\x03\0\0\0"):
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        refused(path, "magic is" if content[:4] != b"GGUF" else "truncated")


def test_case_41_versions(path):
    raw = bytearray(path.read_bytes())
    raw[4:8] = (4).to_bytes(4, "little")
    path.write_bytes(raw)
    refused(path, "version is 4, expected 2 or 3")
    raw[4:8] = (3).to_bytes(4, "big")
    path.write_bytes(raw)
    refused(path, "big-endian")


@pytest.mark.parametrize("architecture", ["gemma2", "phi3", "mamba"])
def test_case_41_architecture(tmp_path, architecture):
    path = tiny_models.write_gguf(tmp_path / "x.gguf", architecture=architecture)
    refused(path, f"general.architecture is '{architecture}', expected one of 'llama'")


def test_case_41_missing_unexpected_and_misshapen_tensors(tmp_path):
    good = tiny_models.gguf_weights(tiny_models.hf_weights())
    path = tmp_path / "x.gguf"
    for name in ("blk.1.ffn_up.weight", "token_embd.weight", "output_norm.weight"):
        tiny_models.write_gguf(path, tensors={n: t for n, t in good.items() if n != name})
        refused(path, f"tensor '{name}' is missing")
    extra = {**good, "blk.0.attn_q.bias": np.zeros(48, np.float32)}
    tiny_models.write_gguf(path, tensors=extra)
    refused(path, r"tensor 'blk.0.attn_q.bias' is not one .* did you mean 'blk.0.attn_q.weight'")
    tiny_models.write_gguf(path, tensors={**good, "blk.0.ffn_up.weight": np.zeros((63, 32), "f4")})
    refused(path, r"'blk.0.ffn_up.weight' has shape \[63, 32\], expected \[64, 32\]")


def test_case_41_tensor_types_that_cannot_be_dequantized(tmp_path):
    good = tiny_models.gguf_weights(tiny_models.hf_weights())
    path = tmp_path / "x.gguf"
    tiny_models.write_gguf(path, tensors={**good, "blk.0.ffn_up.weight": np.ones((64, 32), "i1")})
    refused(path, "'blk.0.ffn_up.weight' has type I8, which the gguf package cannot dequantize")


def test_weights_that_are_not_finite(tmp_path):
    good = tiny_models.gguf_weights(tiny_models.hf_weights())
    good["blk.0.ffn_up.weight"][3, 3] = np.nan
    refused(tiny_models.write_gguf(tmp_path / "x.gguf", tensors=good), "not finite")


def test_a_claimed_number_of_layers_does_not_cost_time(tmp_path):
    metadata = {**tiny_models.gguf_metadata(), "llama.block_count": 2**32 - 1}
    refused(tiny_models.write_gguf(tmp_path / "x.gguf", metadata), "tensor 'blk.2.attn_norm.weight'")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\]"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, expected the head dim"),
        ({"llama.vocab_size": 99}, "vocab_size is 99, expected the embedding's 264"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.freq_base": 0.0}, "rope.freq_base is 0.0"),
        ({"llama.attention.head_count": 5}, "num_heads is 5"),
        ({"llama.context_length": 0}, "max_positions is 0"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos token id is 9999"),
        ({"split.count": 3}, "split.count is 3"),
        ({"general.alignment": 33}, "general.alignment is 33"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
    ],
)
def test_settings_that_are_refused_by_name(tmp_path, changes, match):
    metadata = {**tiny_models.gguf_metadata(), **tiny_models.bpe_metadata(), **changes}
    refused(tiny_models.write_gguf(tmp_path / "x.gguf", metadata), match)


def damaged_loads_or_is_refused(path: Path) -> bool:
    try:
        file = open_gguf(path)
        config = read_gguf_config(file)
        tokenizer_from_gguf(file.metadata)
        read_gguf_params(file, config)
    except FormatError:
        return False
    return True


def test_truncation_anywhere_is_refused(path, tmp_path):
    """CASE 41."""
    raw = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for i in range(50):
        cut.write_bytes(raw[: len(raw) * i // 50])
        assert not damaged_loads_or_is_refused(cut), i
    header = open_gguf(path).metadata
    for size in range(0, 4000, 37):  # densely through the header
        cut.write_bytes(raw[:size])
        assert not damaged_loads_or_is_refused(cut), (size, len(header))


def test_flipped_bytes_are_refused_or_load(path, tmp_path):
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    end_of_header = raw.rfind(b".weight") + 64
    offsets = [*range(0, 80), *rng.integers(0, end_of_header, 250), *rng.integers(0, len(raw), 30)]
    flipped = tmp_path / "flipped.gguf"
    outcomes = set()
    for offset in offsets:
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[offset] ^= mask
            flipped.write_bytes(damaged)
            outcomes.add(damaged_loads_or_is_refused(flipped))
    assert outcomes == {True, False}


def test_unreadable_paths(tmp_path, path):
    with pytest.raises(FormatError, match="cannot be read"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(FormatError, match="cannot be read"):
        open_gguf(tmp_path)
    shutil.copy(path, tmp_path / "copy.gguf")
    assert load(tmp_path / "copy.gguf", progress=False).name == "copy"
