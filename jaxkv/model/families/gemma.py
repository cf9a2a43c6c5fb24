"""Gemma 3, text: local and global layers with two RoPE bases, norms before and after, GeGLU."""

from __future__ import annotations

from types import MappingProxyType

from jaxkv.model.families.base import Family
from jaxkv.model.families.common import GGUF_ONLY, GGUF_READ, GGUF_TENSORS, HF_ONLY, HF_TENSORS

GEMMA3 = Family(
    name="gemma3",
    hf_names=(
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
    ),
    hf_nested=MappingProxyType({"gemma3": "text_config"}),
    hf_outer=frozenset(
        {
            "text_config",
            "vision_config",
            "boi_token_index",
            "eoi_token_index",
            "image_token_index",
            "mm_tokens_per_image",
        }
    ),
    hf_defaults=MappingProxyType(
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        }
    ),
    hf_only=MappingProxyType(
        {
            **HF_ONLY,
            "hidden_activation": (None, "gelu_pytorch_tanh"),
            "hidden_act": (None, "gelu_pytorch_tanh"),
            "attention_bias": (None, False),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        }
    ),
    hf_read=frozenset(
        {
            "rope_local_base_freq",
            "query_pre_attn_scalar",
            "sliding_window",
            "sliding_window_pattern",
            "_sliding_window_pattern",
            "layer_types",
        }
    ),
    hf_tensors=MappingProxyType(
        {
            **HF_TENSORS,
            "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
            "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
            "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
        }
    ),
    hf_renames=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    hf_ignored=(
        "vision_tower.",
        "model.vision_tower.",
        "multi_modal_projector.",
        "model.multi_modal_projector.",
    ),
    hf_derived_tensors=("rotary_emb.inv_freq", "rotary_emb_local.inv_freq"),
    gguf_architecture="gemma3",
    gguf_only=MappingProxyType(
        {**GGUF_ONLY, "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,)}
    ),
    gguf_read=GGUF_READ
    | {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "mm.tokens_per_image",
    },
    gguf_tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            "post_attn_norm": "blk.{i}.post_attention_norm.weight",
            "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
        }
    ),
    gguf_rope_factors="rope_freqs.weight",
    gguf_interleaved=False,
    fixed=MappingProxyType({"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"}),
    embed_scaled=True,
    norm_offset=1.0,
    query_scalar="query_pre_attn_scalar",
    # GGUF files do not carry the scalar: readers know the 27B model by its layers.
    gguf_wide_queries=frozenset({62}),
    window_key="sliding_window",
    global_every="sliding_window_pattern",
    local_theta="rope_local_base_freq",
    gguf_global_every=6,
    gguf_local_theta=10_000.0,
)
