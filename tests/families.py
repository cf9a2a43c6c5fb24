"""The golden models of families as files, built as their own ecosystems write them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

GOLDENS = Path(__file__).parent / "goldens"
VARIANTS = ("llama3", "qwen2", "qwen2_window", "qwen3", "gemma3")
UNIT = 128  # weights are stored as whole numbers of 1/128


@functools.cache
def golden(variant: str) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """config.json, weights f32 by their Hugging Face names, tokens and the logits of transformers."""
    config = json.loads((GOLDENS / "families.json").read_text())[variant]
    with np.load(GOLDENS / "families.npz") as file:
        head = f"weights.{file[f'set.{variant}']}."
        weights = {
            name.removeprefix(head): file[name].astype(np.float32) / UNIT
            for name in file.files
            if name.startswith(head)
        }
        return config, weights, file["tokens"], file[f"logits.{variant}"]


def write_hf(path: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """A Hugging Face directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, path / "model.safetensors")
    return path


def architecture(config: dict[str, Any]) -> str:
    return {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])


def write_gguf(path: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    """A GGUF file as llama.cpp's converter writes one: Gemma's norms with their 1, llama's pairs together."""
    arch = architecture(config)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config["num_hidden_layers"]
    )
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32("gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, value in weights.items():
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        writer.add_tensor(found, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
