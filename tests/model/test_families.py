"""Each family against Hugging Face transformers, from its own files, dense and through the engine."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import decoder_of_hf
from tolerances import tolerance

import jaxkv
from jaxkv.errors import FormatError
from jaxkv.io.checkpoint import load_checkpoint, save_checkpoint
from jaxkv.io.configs import config_from_hf
from jaxkv.io.gguf import open_gguf, read_gguf_config, read_gguf_params
from jaxkv.io.gguf_configs import config_from_gguf
from jaxkv.io.safetensors import read_hf_directory
from jaxkv.model.config import COMPOSABLE

ATOL = tolerance("goldens_tiny")


@functools.cache
def loaded(variant: str, scratch: Path) -> jaxkv.Model:
    config, weights, _, _ = families.golden(variant)
    return jaxkv.load(families.write_hf(scratch / variant, config, weights), progress=False)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def same(a: Any, b: Any) -> None:
    """Two trees of weights, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_the_reference_equals_hugging_face(variant: str) -> None:
    """Who judges jaxkv is judged first."""
    config, weights, tokens, expected = families.golden(variant)
    logits = decoder_of_hf(weights, config_from_hf(config)).logits(tokens)
    np.testing.assert_allclose(logits, expected, atol=ATOL, rtol=0)
    assert np.ptp(expected, axis=1).min() > 1, "logits that are all alike prove nothing"


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=[pytest.mark.slow] if v in ("llama3", "qwen2") else [])
        for v in families.VARIANTS
    ],
)
def test_dense_prefill_and_decode_equal_hugging_face(variant: str, scratch: Path) -> None:
    """200 tokens: dense, in chunks that begin anywhere, and one token at a time."""
    model = loaded(variant, scratch)
    _, _, tokens, expected = families.golden(variant)
    dense = jax.jit(jaxkv.forward_dense, static_argnames="config")
    logits = dense(model.params, jnp.asarray(tokens)[None], config=model.config)[0]
    np.testing.assert_allclose(logits, expected, atol=ATOL, rtol=0)
    engine = jaxkv.Engine(model, num_pages=64, page_size=8, chunk_size=16, poison_free_pages=True)
    first = engine.prefill(tokens[:1])
    scored = engine.score(first.sequence, tokens[1:])  # chunks begin at 1, 17, 33, ...
    np.testing.assert_allclose(scored, expected[:199], atol=ATOL, rtol=0)
    result = engine.prefill(tokens[:27])
    for end in (28, 29, 30, 43, 44, 200):
        result = engine.extend(result.sequence, tokens[len(result.sequence) : end])
        np.testing.assert_allclose(result.logits, expected[end - 1], atol=ATOL, rtol=0)
    engine.check()


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "gemma3"])
def test_gguf_gives_the_very_model_of_safetensors(variant: str, scratch: Path, tmp_path: Path) -> None:
    """Norms that carry their 1, rows that are not interleaved, biases, both RoPE bases."""
    config, weights, _, _ = families.golden(variant)
    file = open_gguf(families.write_gguf(tmp_path / "model.gguf", config, weights))
    model = loaded(variant, scratch)
    found = read_gguf_config(file)
    # GGUF keeps float32, and not Gemma's scalar of queries.
    assert found == dataclasses.replace(model.config, norm_eps=found.norm_eps, query_scale=None)
    assert np.float32(found.norm_eps) == np.float32(model.config.norm_eps)
    same(read_gguf_params(file, found), model.params)


def test_gguf_files_of_gemma_3_scale_queries_as_their_readers_do(tmp_path: Path) -> None:
    """By the head's size, but for the 62 layers of the 27B model: there by the width of the heads."""
    config, weights, _, _ = families.golden("gemma3")
    metadata = open_gguf(families.write_gguf(tmp_path / "model.gguf", config, weights)).metadata
    wide = {**metadata, "gemma3.block_count": 62, "gemma3.embedding_length": 96}
    found = config_from_gguf(wide, vocab_size=64, tied=True)
    assert found.query_scale == pytest.approx((96 / 4) ** -0.5)
    assert found.types.count("global") == 62 // 3
    plain = {k: v for k, v in metadata.items() if "sliding" not in k}
    assert config_from_gguf(plain, vocab_size=64, tied=True).layer_types == ()
    six = {k: v for k, v in metadata.items() if "pattern" not in k} | {"gemma3.block_count": 12}
    assert config_from_gguf(six, vocab_size=64, tied=True).types.count("global") == 2
    listed = {**metadata, "gemma3.attention.sliding_window_pattern": [True, False, False, True]}
    assert config_from_gguf(listed, vocab_size=64, tied=True).groups[0].layers == (1, 2)
    for changes, match in (
        ({"gemma3.attention.sliding_window_pattern": [True]}, "sliding_window_pattern is"),
        ({"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"gemma3.attention.temperature": 1.0}, "gemma3.attention.temperature is not supported"),
    ):
        with pytest.raises(FormatError, match=match):
            config_from_gguf({**metadata, **changes}, vocab_size=64, tied=True)


def test_the_text_of_gemma_3_is_read_from_its_multimodal_files(scratch: Path, tmp_path: Path) -> None:
    config, weights, _, _ = families.golden("gemma3")
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {k: v for k, v in config.items() if k not in ("architectures", "eos_token_id")},
        "vision_config": {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 256,
        "eos_token_id": [2, 5],
    }
    model = loaded("gemma3", scratch)
    for head in ("language_model.model.", "model.language_model."):
        moved = {name.replace("model.", head, 1): value for name, value in weights.items()}
        moved["vision_tower.vision_model.embeddings.patch_embedding.weight"] = np.ones((2, 2), np.float32)
        path = families.write_hf(tmp_path / head, outer, moved)
        found, params, _ = read_hf_directory(path)
        assert found == dataclasses.replace(model.config, eos_token_ids=(2, 5))
        same(params, model.params)
    with pytest.raises(FormatError, match="text_config is None, expected an object"):
        config_from_hf({**outer, "text_config": None})
    with pytest.raises(FormatError, match="audio_config is"):
        config_from_hf({**outer, "audio_config": {}})


@pytest.mark.parametrize("variant", ["qwen2", "gemma3"])
def test_a_converted_checkpoint_keeps_what_sets_a_family_apart(
    variant: str, scratch: Path, tmp_path: Path
) -> None:
    model = loaded(variant, scratch)
    again = load_checkpoint(save_checkpoint(tmp_path / "saved", model))
    assert again.config == model.config
    assert again.weights_digest == model.weights_digest
    same(again.params, model.params)
    half = load_checkpoint(tmp_path / "saved", dtype="bfloat16").params.layers[0]
    assert half.qkv.dtype == jnp.bfloat16
    assert half.attn_norm.dtype == jnp.float32
    assert half.qkv_bias is None or half.qkv_bias.dtype == jnp.float32


def test_sizes_count_what_a_family_adds(scratch: Path) -> None:
    for variant in families.VARIANTS:
        model = loaded(variant, scratch)
        leaves = [model.params.layers, model.params.final_norm]
        assert model.config.body_params == sum(x.size for x in jax.tree.leaves(leaves))
        assert model.config.relocation == (COMPOSABLE,) * model.config.num_layers


def test_layer_groups_hold_their_layers_windows_and_rotations(scratch: Path) -> None:
    """CASE 19: one base for local layers, another for global ones."""
    config = loaded("gemma3", scratch).config
    by_name = {group.name: group for group in config.groups}
    assert list(by_name) == ["global", "local"]
    assert (by_name["global"].layers, by_name["local"].layers) == ((2,), (0, 1, 3))
    assert (by_name["global"].window, by_name["local"].window) == (0, 19)
    assert by_name["global"].rope.theta == 1_000_000.0
    assert (by_name["local"].rope.theta, by_name["local"].rope.scaling) == (10_000.0, "default")
    window = loaded("qwen2_window", scratch).config
    assert [(g.layers, g.window) for g in window.groups] == [((0,), 0), ((1,), 21)]


GEMMA = {k: v for k, v in families.golden("gemma3")[0].items() if k != "rope_parameters"}
QWEN2 = families.golden("qwen2")[0]


def test_older_files_say_the_same_in_other_words() -> None:
    """Before transformers 5: rope_local_base_freq, rope_scaling for global layers, a pattern for types."""
    expected = config_from_hf(families.golden("gemma3")[0])
    old = {**GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": None}
    assert config_from_hf({**old, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}) == expected
    sparse = {k: v for k, v in QWEN2.items() if k != "layer_types"}
    assert config_from_hf(sparse) == config_from_hf(QWEN2)
    every = config_from_hf({**GEMMA, "layer_types": None, "sliding_window_pattern": 1})
    assert (every.layer_types, every.rope_local) == ((), None)


@pytest.mark.parametrize(
    ("base", "changes", "match"),
    [
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', expected 'gelu_pytorch_tanh'"),
        (GEMMA, {"layer_types": ["chunked_attention"] * 4}, "layer_types is 'chunked_attention', expected 4"),
        (GEMMA, {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\], expected 4 of"),
        (GEMMA, {"sliding_window": 0}, "sliding_window is 0, expected a positive integer"),
        (GEMMA, {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters has 'rope_theta', expected full"),
        (GEMMA, {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        (QWEN2, {"attention_bias": False}, "attention_bias is False, expected True"),
        (QWEN2, {"use_mrope": True}, "use_mrope is True"),
        (QWEN2, {"use_sliding_window": None}, "use_sliding_window is None, expected true or false"),
        (
            QWEN2,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "use_sliding_window is False, expected true beside sliding layers",
        ),
        (QWEN2, {"residual_multiplier": 0.5}, "residual_multiplier is 0.5, expected it absent"),
        (QWEN2, {"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic', expected .*: dynamic NTK"),
        (QWEN2, {"rope_parameters": {"rope_type": "longrope"}}, "'longrope', expected .*: LongRoPE"),
        (QWEN2, {"rope_parameters": {"rope_type": "mrope"}}, "'mrope', expected .*: M-RoPE"),
        (QWEN2, {"rope_parameters": {"mrope_section": [2, 3, 3]}}, "rope_parameters.mrope_section is"),
    ],
)
def test_what_is_refused_by_name(base: dict[str, Any], changes: dict[str, Any], match: str) -> None:
    """CASE 23: files whose positions do not compose are not loaded, and say why."""
    with pytest.raises(FormatError, match=match):
        config_from_hf({**base, **changes})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ("local", "globl")}, "layer_types has 'globl'.*did you mean 'global'"),
        ({"layer_types": ("local",)}, "layer_types has 1 entries, expected num_layers 2"),
        ({"layer_types": ("local", "global")}, "window is 0, expected a positive number"),
        ({"window": 4}, "window or rope_local is set, expected a local layer"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"embed_scale": 0.0}, "embed_scale is 0.0"),
        ({"query_scale": float("inf")}, "query_scale is inf"),
    ],
)
def test_a_model_config_refuses_what_does_not_go_together(changes: dict[str, Any], match: str) -> None:
    from tiny import tiny_config

    with pytest.raises(jaxkv.ConfigError, match=match):
        tiny_config(**changes)
