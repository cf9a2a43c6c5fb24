"""GGUF files of the Qwen3.5 hybrid: the weights that safetensors give, and the logits of two peers."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import gguf
import hybrid_gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from families import write_hf
from test_gguf import damaged_loads_or_is_refused
from tolerances import tolerance

import jaxkv

GOLDENS = Path(__file__).parents[1] / "goldens"
PEERS = ("equal", "more")  # of hybrid_gguf.npz
VARIANTS = ("tiny", *PEERS)


@functools.cache
def golden(variant: str) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """config.json, weights f32 by their Hugging Face names, tokens, and logits by who computed them."""
    if variant == "tiny":
        config = json.loads((GOLDENS / "tiny_hybrid.json").read_text())["text"]
        with np.load(GOLDENS / "tiny_hybrid.npz") as file:
            names = [name for name in file.files if name.startswith(("model.", "lm_head."))]
            weights = {name: file[name].astype(np.float32) for name in names}
            return config, weights, file["tokens"], {"transformers": file["logits"]}
    config = json.loads((GOLDENS / "hybrid_gguf.json").read_text())[variant]
    with np.load(GOLDENS / "hybrid_gguf.npz") as file:
        head = f"weights.{variant}."
        weights = {
            name.removeprefix(head): file[name].astype(np.float32)
            for name in file.files
            if name.startswith(head)
        }
        logits = {peer: file[f"{peer}.{variant}"] for peer in ("transformers", "llama.cpp")}
        return config, weights, file["tokens"], logits


def written(folder: Path, variant: str = "tiny", **options: Any) -> Path:
    config, weights, _, _ = golden(variant)
    return hybrid_gguf.write(folder / "model.gguf", config, weights, **options)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(variant: str, tmp_path_factory: pytest.TempPathFactory) -> jaxkv.Model:
    return jaxkv.load(written(tmp_path_factory.mktemp(variant), variant), progress=False)


def test_a_file_holds_the_model_that_safetensors_hold(
    variant: str, model: jaxkv.Model, tmp_path: Path
) -> None:
    config, weights, _, _ = golden(variant)
    other = jaxkv.load(write_hf(tmp_path / "hf", config, weights), progress=False)
    assert model.config.norm_eps == pytest.approx(other.config.norm_eps, rel=1e-6)  # float32 in the file
    assert dataclasses.replace(model.config, norm_eps=other.config.norm_eps) == other.config
    leaves = jax.tree.leaves(other.params)
    for (path, found), expected in zip(jax.tree.leaves_with_path(model.params), leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if name.endswith(("decay_log", "attn_norm", "mlp_norm", "q_norm", "k_norm", "final_norm")):
            # log of an exponential, and 1 + w of what the file rounded: float32 rounds each once.
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_logits_are_those_of_transformers_and_of_llama_cpp(variant: str, model: jaxkv.Model) -> None:
    """Three value heads for each key head, whose order is not its own inverse, and one for each."""
    _, _, tokens, logits = golden(variant)
    dense = jax.jit(jaxkv.forward_dense, static_argnames="config")
    found = np.asarray(dense(model.params, jnp.asarray(tokens)[None], config=model.config)[0])
    np.testing.assert_allclose(found, logits["transformers"], atol=tolerance("goldens_tiny"), rtol=0)
    for peer in logits.values():
        np.testing.assert_allclose(found, peer, atol=tolerance("goldens_tiny"), rtol=0)
        assert (found.argmax(-1) == peer.argmax(-1)).all()


def test_chunks_and_decode_through_an_engine(tmp_path: Path) -> None:
    _, _, tokens, logits = golden("more")
    model = jaxkv.load(written(tmp_path, "more"), progress=False)
    engine = jaxkv.Engine(model, num_pages=32, page_size=8, chunk_size=16)
    result, at = engine.prefill(tokens[:33]), 33
    for count in (1, 16, 1):
        np.testing.assert_allclose(
            result.logits, logits["transformers"][at - 1], atol=tolerance("goldens_tiny"), rtol=0
        )
        result = engine.extend(result.sequence, tokens[at : at + count])
        at += count
    np.testing.assert_allclose(
        result.logits, logits["transformers"][at - 1], atol=tolerance("goldens_tiny"), rtol=0
    )


def test_quantized_tensors_are_reordered_after_they_are_dequantized(tmp_path: Path) -> None:
    """Rows of 32 values, whatever their order; columns of the output projection after the blocks are."""
    config, weights, _, _ = golden("more")
    names = [f"blk.0.{part}.weight" for part in ("attn_qkv", "attn_gate", "ssm_out", "ssm_beta")]
    kind = gguf.GGMLQuantizationType.Q8_0
    found = jaxkv.load(written(tmp_path, "more", types=dict.fromkeys(names, kind)), progress=False)
    prefix = "model.layers.0.linear_attn."
    for part, leaf in (
        ("in_proj_qkv", np.asarray(found.params.layers[0].qkv)),
        ("in_proj_z", np.asarray(found.params.layers[0].gate).reshape(-1, 32)),
        ("in_proj_b", np.asarray(found.params.layers[0].rates)[0]),
    ):
        exact = weights[f"{prefix}{part}.weight"]
        np.testing.assert_array_equal(leaf, gguf.dequantize(gguf.quantize(exact, kind), kind), err_msg=part)
    # A block of the output projection holds 32 columns in the file's order, two value heads of it.
    heads = [0, 3, 1, 4, 2, 5]
    exact = weights[f"{prefix}out_proj.weight"].reshape(32, 6, 16)
    rounded = gguf.dequantize(gguf.quantize(exact[:, heads].reshape(32, 96), kind), kind).reshape(32, 6, 16)
    leaf = np.asarray(found.params.layers[0].out)
    for place, head in enumerate(heads):
        np.testing.assert_array_equal(leaf[:, head], rounded[:, place])
    assert config["linear_num_value_heads"] == 6


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    """They stand behind the decoder's and are counted among its blocks; mtp.* of a directory is the same."""
    further = {
        "blk.4.attn_norm.weight": np.ones(48, np.float32),
        "blk.4.nextn.eh_proj.weight": np.ones((48, 96), np.float32),
    }
    plain = jaxkv.load(written(tmp_path), progress=False)
    path = written(
        tmp_path, tensors=further, changes={"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    )
    found = jaxkv.load(path, progress=False)
    assert found.config == plain.config
    assert found.weights_digest == plain.weights_digest
    with pytest.raises(
        jaxkv.FormatError, match=r"'blk\.4\.attn_norm\.weight' is not one a qwen3_5 model has"
    ):
        jaxkv.load(written(tmp_path, tensors=further), progress=False)


def test_which_layers_are_recurrent_is_an_interval_or_a_list(tmp_path: Path) -> None:
    interval = "qwen35.full_attention_interval"
    types = ("recurrent", "recurrent", "global", "recurrent")
    flags = {"qwen35.attention.recurrent_layers": [True, True, False, True]}
    listed = jaxkv.load(written(tmp_path, changes={interval: None, **flags}), progress=False)
    assert listed.config.types == types
    # Without either each fourth layer attends: then this file lacks the tensors of that layer.
    with pytest.raises(jaxkv.FormatError, match=r"'blk\.2\.attn_qkv\.weight' is missing"):
        jaxkv.load(written(tmp_path, changes={interval: None}), progress=False)


def test_tokens_of_images_are_known_by_their_text(tmp_path: Path) -> None:
    words = tiny_models.bpe_metadata("qwen35")
    changes = {
        **words,
        "tokenizer.ggml.tokens": [
            *words["tokenizer.ggml.tokens"][:125],
            "ab",
            "<|image_pad|>",
            "<|video_pad|>",
        ],
        "tokenizer.ggml.token_type": [*words["tokenizer.ggml.token_type"][:126], 3, 3],
        "tokenizer.ggml.merges": ["a b"],
    }
    model = jaxkv.load(written(tmp_path, changes=changes), progress=False)
    assert model.config.image_token_ids == (126, 127)
    engine = jaxkv.Engine(model, num_pages=8, page_size=8)
    with pytest.raises(jaxkv.TokenError, match=r"tokens\[1\] is 127, which stands for an image"):
        engine.prefill([3, 127])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 8}, "qwen35.expert_count is 8, expected 0"),
        ({"attention.sliding_window": 128}, "qwen35.attention.sliding_window is 128, expected 0"),
        ({"attention.scale": 0.5}, "qwen35.attention.scale is not supported for qwen3_5"),
        ({"ssm.dt_b_c_rms": True}, "qwen35.ssm.dt_b_c_rms is not supported for qwen3_5"),
        ({"ssm.group_count": None}, "qwen35.ssm.group_count is None, expected a non-negative integer"),
        ({"ssm.group_count": 3}, "num_value_heads is 4, expected a multiple of num_key_heads 3"),
        ({"ssm.inner_size": 47}, "ssm.inner_size is 47, expected a multiple of ssm.time_step_rank 4"),
        ({"ssm.conv_kernel": 1}, "recurrent.conv_width is 1, expected at least 2"),
        ({"ssm.conv_kernel": 3}, r"'blk.0.ssm_conv1d.weight' has shape \[112, 4\], expected \[112, 3\]"),
        ({"rope.dimension_count": None}, "rope.dimension_count is None, expected a non-negative integer"),
        ({"rope.dimension_count": 3}, "rope.rotary_dim is 3, expected a positive even number"),
        ({"rope.dimension_count": 18}, "rope.rotary_dim is 18, expected at most head_dim 16"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers is 4, expected less than block_count 4"),
        ({"attention.recurrent_layers": [True]}, "recurrent_layers is .*, expected 4 of true and false"),
        ({"attention.recurrent_layers": [True] * 4}, "at least one that attends"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0, expected a positive integer"),
        ({"block_count": 2**32 - 1}, "tensor 'blk.4.attn_norm.weight' is missing"),
        ({"attention.value_length": 12}, "attention.value_length is 12, expected the head dimension 16"),
    ],
)
def test_settings_that_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    named = {f"qwen35.{key}": value for key, value in changes.items()}
    with pytest.raises(jaxkv.FormatError, match=message) as error:
        jaxkv.load(written(tmp_path, changes=named), progress=False)
    assert "\n" not in str(error.value)


def test_tensors_that_are_refused_by_name(tmp_path: Path) -> None:
    for tensors, message in (
        ({"blk.0.ssm_a": np.array([-1, -2, 0, -3])}, "'blk.0.ssm_a' holds -?0.0, expected negative numbers"),
        ({"blk.0.ssm_a": np.array([-1, -2, np.nan, -3])}, "'blk.0.ssm_a' holds nan, expected negative"),
        ({"blk.0.ssm_a": -np.ones(3)}, r"'blk.0.ssm_a' has shape \[3\], expected \[4\]"),
        ({"blk.0.ssm_d.weight": np.ones(4)}, "'blk.0.ssm_d.weight' is not one a qwen3_5 model has"),
        ({"blk.2.attn_qkv.weight": np.ones((4, 4))}, "'blk.2.attn_qkv.weight' is not one a qwen3_5 model"),
        ({"blk.0.attn_qkv.weight": np.ones((111, 48))}, r"'blk.0.attn_qkv.weight' has shape \[111, 48\]"),
    ):
        with pytest.raises(jaxkv.FormatError, match=message):
            jaxkv.load(written(tmp_path, tensors=tensors), progress=False)


def test_flipped_bytes_are_refused_or_load(tmp_path: Path) -> None:
    raw, rng = written(tmp_path, "equal").read_bytes(), np.random.default_rng(0)
    end_of_header = raw.rfind(b".weight") + 64
    flipped, outcomes = tmp_path / "flipped.gguf", set()
    for offset in rng.integers(0, end_of_header, 300):
        damaged = bytearray(raw)
        damaged[offset] ^= int(rng.choice([0x01, 0x80, 0xFF]))
        flipped.write_bytes(damaged)
        outcomes.add(damaged_loads_or_is_refused(flipped))
    assert outcomes == {True, False}


def test_models_with_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(jaxkv.FormatError, match="'qwen35moe': its layers choose among experts"):
        jaxkv.load(written(tmp_path, architecture="qwen35moe"), progress=False)
