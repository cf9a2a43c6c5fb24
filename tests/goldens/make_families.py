"""Makes families.npz and families.json beside this script from Hugging Face transformers.

    goldens/bin/python tests/goldens/make_families.py

in the environment that make_goldens.py describes; some seconds. Neither torch nor transformers is needed to
run the tests, which read:

families.json  variant -> config.json as transformers writes it
families.npz   weights.<set>.<name> i16, random weights under their Hugging Face names, to be read as
               f32 / 128; set.<variant>, the name of the variant's set; tokens i32[200]; and
               logits.<variant> f32[200,64]
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
TOKENS, VOCAB, UNIT = 200, 64, 128
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Variant -> (set of weights, config class, model class, settings)
VARIANTS: dict[str, tuple[str, type, type, dict[str, Any]]] = {
    "llama3": (
        "llama",
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "qwen2": (
        "qwen2",
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"hidden_size": 64, "head_dim": None},
    ),
    "qwen2_window": (
        "qwen2",
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {
            "hidden_size": 64,
            "head_dim": None,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (
        "qwen3",
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    ),
    "gemma3": (
        "gemma3",
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "sliding_window": 19,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
}


def draw(name: str, shape: tuple[int, ...], family: str, rng: np.random.Generator) -> np.ndarray:
    """Random weights whose attention is peaked, in units of 1/128."""
    value = rng.standard_normal(shape)
    if "norm" in name:  # Gemma's files leave 1 out
        value = 0.3 * value + (0 if family == "gemma3" else 1)
    elif name.endswith("bias"):
        value = 0.5 * value
    else:
        value *= (4 if "embed" in name else 2) / math.sqrt(shape[-1])
    return np.round(value * UNIT).astype(np.int16)


def make() -> None:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"tokens": tokens}
    configs = {}
    sets: dict[str, dict[str, torch.Tensor]] = {}
    for variant, (family, config_class, model_class, settings) in VARIANTS.items():
        given = {key: value for key, value in {**TINY, **settings}.items() if value is not None}
        config = config_class(**copy.deepcopy(given))
        config.architectures = [model_class.__name__]
        model = model_class._from_config(config, attn_implementation="eager").float()
        if family not in sets:
            sets[family] = {}
            for name, value in model.state_dict().items():
                if config.tie_word_embeddings and "lm_head" in name:
                    continue
                drawn = draw(name, tuple(value.shape), family, rng)
                arrays[f"weights.{family}.{name}"] = drawn
                sets[family][name] = torch.from_numpy(drawn.astype(np.float32) / UNIT)
        model.load_state_dict(sets[family], strict=False)
        model.tie_weights()
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(tokens).long()[None]).logits[0]
        arrays[f"logits.{variant}"] = logits.numpy()
        arrays[f"set.{variant}"] = np.array(family)
        configs[variant] = {**config.to_dict(), "dtype": "float32"}
    np.savez_compressed(HERE / "families.npz", **arrays)
    text = json.dumps(configs, ensure_ascii=False, indent=1) + "\n"
    (HERE / "families.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    torch.manual_seed(0)
    make()
