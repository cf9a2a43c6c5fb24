"""Llama 2 and 3, and what is built like them."""

from __future__ import annotations

from types import MappingProxyType

from jaxkv.model.families.base import Family
from jaxkv.model.families.common import GGUF_ONLY, GGUF_READ, GGUF_TENSORS, HF_ONLY, HF_TENSORS

LLAMA = Family(
    name="llama",
    hf_names=(("llama", "LlamaForCausalLM"),),
    hf_defaults=MappingProxyType(
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    ),
    hf_only=MappingProxyType(
        {
            **HF_ONLY,
            "attention_bias": (None, False),
            "mlp_bias": (None, False),
            "hidden_act": (None, "silu", "swish"),
            "sliding_window": (None,),
            "layer_types": (None,),
            "pretraining_tp": (None, 1),
            "num_local_experts": (None, 0),
            "rope_interleaved": (None, False),
        }
    ),
    hf_read=frozenset({"is_llama_config"}),
    hf_tensors=HF_TENSORS,
    hf_derived_tensors=("rotary_emb.inv_freq",),
    gguf_architecture="llama",
    gguf_only=MappingProxyType({**GGUF_ONLY, "attention.sliding_window": (0,)}),
    gguf_read=GGUF_READ,
    gguf_tensors=GGUF_TENSORS,
    gguf_rope_factors="rope_freqs.weight",
    gguf_interleaved=True,
)
