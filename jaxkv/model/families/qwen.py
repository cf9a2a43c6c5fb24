"""Qwen2, Qwen2.5 (queries, keys and values have a bias) and Qwen3 (queries and keys are normalized)."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from jaxkv.model.families.base import Family
from jaxkv.model.families.common import GGUF_ONLY, GGUF_READ, GGUF_TENSORS, HF_ONLY, HF_TENSORS

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_READ = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
# llama.cpp reads neither for these architectures: a file that has them was made for something else.
_GGUF_ONLY = MappingProxyType({**GGUF_ONLY, "attention.sliding_window": (0,)})

QWEN2 = Family(
    name="qwen2",
    hf_names=(("qwen2", "Qwen2ForCausalLM"),),
    hf_defaults=MappingProxyType(_DEFAULTS),
    hf_only=MappingProxyType(
        {
            **HF_ONLY,
            "hidden_act": (None, "silu", "swish"),
            "attention_bias": (None, True),
            "mlp_bias": (None, False),
            "use_mrope": (None, False),
        }
    ),
    hf_read=_READ,
    hf_tensors=HF_TENSORS,
    hf_derived_tensors=("rotary_emb.inv_freq",),
    gguf_architecture="qwen2",
    gguf_only=_GGUF_ONLY,
    gguf_read=GGUF_READ,
    gguf_tensors=GGUF_TENSORS,
    gguf_rope_factors="rope_freqs.weight",
    gguf_interleaved=False,
    fixed=MappingProxyType({"qkv_bias": True}),
    window_key="sliding_window",
    window_switch="use_sliding_window",
    local_from="max_window_layers",
)

QWEN3 = dataclasses.replace(
    QWEN2,
    name="qwen3",
    hf_names=(("qwen3", "Qwen3ForCausalLM"),),
    hf_defaults=MappingProxyType({**_DEFAULTS, "head_dim": 128}),
    hf_only=MappingProxyType(
        {
            **HF_ONLY,
            "hidden_act": (None, "silu", "swish"),
            "attention_bias": (None, False),
            "mlp_bias": (None, False),
        }
    ),
    gguf_architecture="qwen3",
    fixed=MappingProxyType({"qk_norm": True}),
)
