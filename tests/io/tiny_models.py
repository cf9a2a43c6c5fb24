"""Small model files for the tests of jaxkv.io, built as their own ecosystems write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def hf_weights(seed: int = 0, config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """Random float32 weights under their Hugging Face names, [out, in]."""
    c, rng = config, np.random.default_rng(seed)
    d, f, h = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], d),
        "model.norm.weight": (d,),
        "lm_head.weight": (c["vocab_size"], d),
    }
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            f"{p}input_layernorm.weight": (d,),
            f"{p}self_attn.q_proj.weight": (c["num_attention_heads"] * h, d),
            f"{p}self_attn.k_proj.weight": (c["num_key_value_heads"] * h, d),
            f"{p}self_attn.v_proj.weight": (c["num_key_value_heads"] * h, d),
            f"{p}self_attn.o_proj.weight": (d, c["num_attention_heads"] * h),
            f"{p}post_attention_layernorm.weight": (d,),
            f"{p}mlp.gate_proj.weight": (f, d),
            f"{p}mlp.up_proj.weight": (f, d),
            f"{p}mlp.down_proj.weight": (d, f),
        }
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF stores q and k of llama models: feature i beside feature i + H/2."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_weights(weights: dict[str, np.ndarray], config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """The same weights under their GGUF names, q and k interleaved."""
    result = {}
    for name, value in weights.items():
        if "q_proj" in name:
            value = interleave(value, config["num_attention_heads"])
        if "k_proj" in name:
            value = interleave(value, config["num_key_value_heads"])
        for hf, ggml in GGUF_NAMES.items():
            name = name.replace(hf, ggml)
        result[name] = value
    return result


def byte_tokens() -> list[str]:
    """The 256 byte characters of GPT-2's byte-level alphabet, in the tokenizers library's order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def bpe_metadata(pre: str = "smollm") -> dict[str, Any]:
    """A byte-level BPE vocabulary of 264: 4 special tokens, 256 bytes, 4 merges."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    tokens = [*special, *byte_tokens(), *("".join(m.split()) for m in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * 260,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT,
    }


def gguf_metadata(config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """Hyperparameters as llama.cpp's converter writes them."""
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.vocab_size": config["vocab_size"],
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a GGUF with the gguf package; tensors named in `types` are quantized to that type."""
    metadata = {**gguf_metadata(), **bpe_metadata()} if metadata is None else metadata
    tensors = gguf_weights(hf_weights()) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf(
    path: Path,
    *,
    config: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    shards: int = 1,
) -> Path:
    """Writes a Hugging Face directory, in one file or in shards with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    weights = hf_weights() if weights is None else weights
    if shards == 1:
        safetensors.numpy.save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: weights[n] for n in names[i::shards]}
        safetensors.numpy.save_file(part, path / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def expected_leaves(weights: dict[str, np.ndarray], layer: int = 0) -> dict[str, np.ndarray]:
    """The leaves of one layer, [out, in], assembled the slow and obvious way."""
    c = CONFIG
    n, k, h, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["hidden_size"]
    p = f"model.layers.{layer}."
    q = weights[f"{p}self_attn.q_proj.weight"].reshape(n, h, d)
    key = weights[f"{p}self_attn.k_proj.weight"].reshape(k, h, d)
    value = weights[f"{p}self_attn.v_proj.weight"].reshape(k, h, d)
    group = n // k
    qkv = np.stack(
        [np.concatenate([q[i * group : (i + 1) * group], key[i : i + 1], value[i : i + 1]]) for i in range(k)]
    )
    return {
        "attn_norm": weights[f"{p}input_layernorm.weight"],
        "qkv": qkv,
        "out": weights[f"{p}self_attn.o_proj.weight"].reshape(d, n, h),
        "mlp_norm": weights[f"{p}post_attention_layernorm.weight"],
        "gate_up": np.stack([weights[f"{p}mlp.gate_proj.weight"], weights[f"{p}mlp.up_proj.weight"]]),
        "down": weights[f"{p}mlp.down_proj.weight"],
    }
