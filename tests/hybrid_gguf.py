"""A Qwen3.5 hybrid as a GGUF file, with what llama.cpp's converter changes done head by head in loops.

Tensor names and keys are those of the `gguf` package. Nothing here is imported from jaxkv.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray
ARCHITECTURE = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN35]


def in_tiled_order(rows: Array, config: dict[str, Any], width: int, before: int = 0) -> Array:
    """Rows behind `before`, `width` for each value head: each key head's first, then each one's second."""
    key_heads = config["linear_num_key_heads"]
    per = config["linear_num_value_heads"] // key_heads
    parts = [rows[:before]]
    for j in range(per):
        for key_head in range(key_heads):
            start = before + (key_head * per + j) * width
            parts.append(rows[start : start + width])
    return np.concatenate(parts)


def converted(name: str, value: Array, config: dict[str, Any]) -> tuple[str, Array]:
    """The name that gguf's table knows, and what the file stores."""
    value = np.asarray(value, np.float32)
    width = config["linear_value_head_dim"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith("in_proj_qkv.weight"):
        return name, in_tiled_order(value, config, width, keys)
    if name.endswith("in_proj_z.weight"):
        return name, in_tiled_order(value, config, width)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        return name, in_tiled_order(value, config, 1)
    if name.endswith("A_log"):
        return name, -np.exp(in_tiled_order(value, config, 1))
    if name.endswith("dt_bias"):
        return name.replace("dt_bias", "dt_proj.bias"), in_tiled_order(value, config, 1)
    if name.endswith("conv1d.weight"):
        return name, in_tiled_order(value[:, 0], config, width, keys)
    if name.endswith("out_proj.weight"):
        return name, in_tiled_order(value.T, config, width).T
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return name, value + 1
    return name, value


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters of a text model's config.json."""
    rope = config["rope_parameters"]
    rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
    values = {
        gguf.Keys.LLM.BLOCK_COUNT: config["num_hidden_layers"],
        gguf.Keys.LLM.CONTEXT_LENGTH: config["max_position_embeddings"],
        gguf.Keys.LLM.EMBEDDING_LENGTH: config["hidden_size"],
        gguf.Keys.LLM.FEED_FORWARD_LENGTH: config["intermediate_size"],
        gguf.Keys.LLM.VOCAB_SIZE: config["vocab_size"],
        gguf.Keys.LLM.FULL_ATTENTION_INTERVAL: config["layer_types"].index("full_attention") + 1,
        gguf.Keys.Attention.HEAD_COUNT: config["num_attention_heads"],
        gguf.Keys.Attention.HEAD_COUNT_KV: config["num_key_value_heads"],
        gguf.Keys.Attention.KEY_LENGTH: config["head_dim"],
        gguf.Keys.Attention.VALUE_LENGTH: config["head_dim"],
        gguf.Keys.Attention.LAYERNORM_RMS_EPS: config["rms_norm_eps"],
        gguf.Keys.Rope.DIMENSION_COUNT: rotated,
        gguf.Keys.Rope.DIMENSION_SECTIONS: [*rope["mrope_section"], 0],
        gguf.Keys.Rope.FREQ_BASE: float(rope["rope_theta"]),
        gguf.Keys.SSM.CONV_KERNEL: config["linear_conv_kernel_dim"],
        gguf.Keys.SSM.STATE_SIZE: config["linear_key_head_dim"],
        gguf.Keys.SSM.GROUP_COUNT: config["linear_num_key_heads"],
        gguf.Keys.SSM.TIME_STEP_RANK: config["linear_num_value_heads"],
        gguf.Keys.SSM.INNER_SIZE: config["linear_num_value_heads"] * config["linear_value_head_dim"],
    }
    named = {key.format(arch=ARCHITECTURE): value for key, value in values.items()}
    for key in ("bos", "eos"):
        named[f"tokenizer.ggml.{key}_token_id"] = config[f"{key}_token_id"]
    return named


def write(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, Array],
    *,
    changes: dict[str, Any] | None = None,
    tensors: dict[str, Array] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str = ARCHITECTURE,
) -> Path:
    """Writes a file from Hugging Face weights.

    `changes`: further or other metadata, None takes a key away. `tensors`: further or other tensors by their
    GGUF names. `types`: GGUF name -> how a tensor is quantized.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config["num_hidden_layers"])
    stored = {}
    for name, value in weights.items():
        known, value = converted(name, value, config)
        found = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert found, name
        stored[found] = value
    stored |= tensors or {}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata(config), **(changes or {})}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, value in stored.items():
        kind = (types or {}).get(name)
        value = np.ascontiguousarray(value, np.float32)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
