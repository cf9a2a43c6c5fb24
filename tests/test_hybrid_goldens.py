"""The Qwen3.5 hybrid against Hugging Face: from files, dense, in odd chunks and decoded."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from recurrent_reference import hybrid_logits
from tolerances import tolerance

import jaxkv
from jaxkv.cache.states import read_states
from jaxkv.io.checkpoint import save_checkpoint
from jaxkv.io.configs import config_from_hf

GOLDENS = Path(__file__).parent / "goldens"


@functools.cache
def golden() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(GOLDENS / "tiny_hybrid.npz") as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads((GOLDENS / "tiny_hybrid.json").read_text()), arrays


def write(folder: Path, *, nested: bool = False, **extra: np.ndarray) -> Path:
    """A model directory as it is published: the text model alone, or beside a vision tower."""
    configs, arrays = golden()
    tensors = {k: v.astype(np.float32) for k, v in arrays.items() if k.startswith(("model.", "lm_head."))}
    if nested:
        tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["mtp.fc.weight"] = np.zeros((2, 2), np.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs["nested" if nested else "text"]))
    safetensors.numpy.save_file({**tensors, **extra}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> jaxkv.Model:
    return jaxkv.load(write(tmp_path_factory.mktemp("hybrid") / "text"), progress=False)


def close(got: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), expected, atol=tolerance("goldens_tiny"), rtol=0)


def test_the_reference_equals_hugging_face(model: jaxkv.Model) -> None:
    """Who judges the engine is judged first: logits, convolution inputs and states."""
    _, arrays = golden()
    logits, states = hybrid_logits(model.params, model.config, arrays["tokens"])
    close(logits, arrays["logits"])
    for layer, (before, state) in zip(model.config.recurrent_layers, states, strict=True):
        close(before.T, arrays[f"conv.{layer}"])
        close(state, arrays[f"state.{layer}"])


def test_dense_equals_hugging_face(model: jaxkv.Model) -> None:
    _, arrays = golden()
    dense = jax.jit(jaxkv.forward_dense, static_argnames="config")
    close(dense(model.params, jnp.asarray(arrays["tokens"])[None], config=model.config)[0], arrays["logits"])


def test_odd_chunks_and_decode_equal_hugging_face(model: jaxkv.Model) -> None:
    """200 tokens: prefill, extensions of any length, single tokens; and the states they leave."""
    _, arrays = golden()
    tokens, logits = arrays["tokens"], arrays["logits"]
    engine = jaxkv.Engine(model, num_pages=64, page_size=8, chunk_size=16, poison_free_pages=True)
    result, at = engine.prefill(tokens[:67]), 67
    for count in (1, 1, 31, 50, 3, 1, 40):
        close(result.logits, logits[at - 1])
        result = engine.extend(result.sequence, tokens[at : at + count])
        at += count
    close(engine.score(result.sequence, np.append(tokens[at:], 0)), logits[at - 1 :])
    result = engine.extend(result.sequence, tokens[at:])
    close(result.logits, logits[-1])
    slot = jnp.array([result.sequence.state], jnp.int32)
    for index, layer in enumerate(model.config.recurrent_layers):
        conv, state, _ = read_states(engine._memory.pages[-1], index, slot)
        close(conv[0], arrays[f"conv.{layer}"])
        close(state[0], arrays[f"state.{layer}"])
    engine.check()


def test_a_nested_config_and_a_checkpoint_hold_the_same_model(model: jaxkv.Model, tmp_path: Path) -> None:
    nested = jaxkv.load(write(tmp_path / "nested", nested=True), progress=False)
    assert nested.weights_digest == model.weights_digest
    assert nested.config.image_token_ids == (120, 121)
    assert nested.config.rope == jaxkv.RopeConfig(theta=10_000.0, rotary_dim=4)
    save_checkpoint(tmp_path / "saved", nested)
    saved = jaxkv.load(tmp_path / "saved", progress=False)
    assert saved.config == nested.config
    assert saved.weights_digest == nested.weights_digest
    half = jaxkv.load(tmp_path / "saved", dtype="bfloat16", progress=False).params.layers[0]
    assert half.qkv.dtype == jnp.bfloat16
    assert {half.conv.dtype, half.decay_log.dtype, half.decay_bias.dtype, half.out_norm.dtype} == {
        jnp.dtype(jnp.float32)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_5_moe_text"}, "'qwen3_5_moe_text': its layers choose among experts"),
        ({"num_experts": 8}, "num_experts is 8, expected 0"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16', expected 'float32'"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types is .* expected 4 of"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is 'sliding_attention', expected 4 of"),
        ({"layer_types": ["linear_attention"] * 4}, "at least one that attends"),
        ({"linear_num_value_heads": 3}, "num_value_heads is 3, expected a multiple of num_key_heads 2"),
        ({"linear_decay": "fast"}, "linear_decay"),
    ],
)
def test_settings_of_other_maths_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(jaxkv.FormatError, match=message):
        config_from_hf({**copy.deepcopy(golden()[0]["text"]), **change})


def test_layer_types_follow_from_an_interval() -> None:
    data = copy.deepcopy(golden()[0]["text"])
    del data["layer_types"]
    assert config_from_hf(data).types == ("recurrent",) * 3 + ("global",)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", **{"model.layers.0.linear_attn.extra": np.zeros(2, np.float32)})
    with pytest.raises(jaxkv.FormatError, match=r"model.layers.0.linear_attn.extra.*qwen3_5"):
        jaxkv.load(folder, progress=False)


def test_partial_rotary_leaves_the_rest_of_a_key_bitwise_alone(model: jaxkv.Model) -> None:
    """CASE 20: a moved key differs in its rotated part only, in both forms."""
    _, arrays = golden()
    tokens = arrays["tokens"]
    engine = jaxkv.Engine(model, num_pages=64, page_size=8, chunk_size=16)
    source = engine.prefill(tokens).sequence
    pages = engine._memory.pages[0]
    slots = np.array([8 * int(row[0]) + 2 for row in source.segments[:4]], np.int32)
    moves = jaxkv.Moves(source=slots, target=slots + 320, delta=np.array([7, -3, 100, 0], np.int32))
    before = np.asarray(pages.kv)
    moved = jaxkv.relocate((pages,), (moves,), config=model.config)[0]
    after = np.asarray(moved.kv)
    for slot in slots:
        old, new = (kv[s // 8, :, s % 8] for kv, s in ((before, slot), (after, slot + 320)))
        np.testing.assert_array_equal(old[:, 4:], new[:, 4:])
    assert (before[slots[0] // 8, :, 2, :4] != after[(slots[0] + 320) // 8, :, 2, :4]).any()
