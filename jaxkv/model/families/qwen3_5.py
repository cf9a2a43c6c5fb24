"""Qwen3.5 and 3.6: gated DeltaNet layers; each fourth layer attends, gated, with partial rotary positions."""

from __future__ import annotations

from types import MappingProxyType

from jaxkv.model.families.base import Family
from jaxkv.model.families.common import GGUF_ONLY, GGUF_READ, GGUF_TENSORS, HF_ONLY, HF_TENSORS

_MIXER = "model.layers.{i}.linear_attn."

QWEN3_5 = Family(
    name="qwen3_5",
    hf_names=(
        ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ),
    hf_nested=MappingProxyType({"qwen3_5": "text_config"}),
    hf_outer=frozenset(
        {
            "text_config",
            "vision_config",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
            "language_model_only",
        }
    ),
    # Text has three equal positions, for which M-RoPE is ordinary RoPE; what stands for an image has not.
    hf_image_tokens=("image_token_id", "video_token_id"),
    hf_defaults=MappingProxyType(
        {
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "full_attention_interval": 4,
        }
    ),
    hf_only=MappingProxyType(
        {
            **{key: values for key, values in HF_ONLY.items() if key != "partial_rotary_factor"},
            "hidden_act": (None, "silu", "swish"),
            "attention_bias": (None, False),
            "attn_output_gate": (None, True),
            "mamba_ssm_dtype": (None, "float32"),
            "num_experts": (None, 0),
            "mlp_only_layers": (None, []),
        }
    ),
    hf_read=frozenset(
        {
            "partial_rotary_factor",
            "layer_types",
            "full_attention_interval",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            # of a further head that predicts several tokens, which is not read
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
        }
    ),
    hf_rope_read=frozenset({"mrope_section", "mrope_interleaved"}),
    hf_tensors=MappingProxyType(
        {
            **HF_TENSORS,
            "mix_qkv": _MIXER + "in_proj_qkv.weight",
            "mix_gate": _MIXER + "in_proj_z.weight",
            "mix_beta": _MIXER + "in_proj_b.weight",
            "mix_decay": _MIXER + "in_proj_a.weight",
            "mix_conv": _MIXER + "conv1d.weight",
            "decay_log": _MIXER + "A_log",
            "decay_bias": _MIXER + "dt_bias",
            "mix_norm": _MIXER + "norm.weight",
            "mix_out": _MIXER + "out_proj.weight",
        }
    ),
    hf_renames=(("model.language_model.", "model."),),
    hf_ignored=("model.visual.", "mtp."),
    hf_derived_tensors=("rotary_emb.inv_freq",),
    gguf_architecture="qwen35",
    gguf_only=MappingProxyType({**GGUF_ONLY, "attention.sliding_window": (0,)}),
    gguf_read=GGUF_READ
    | {
        "full_attention_interval",
        "attention.recurrent_layers",
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.inner_size",
        "rope.dimension_sections",  # of M-RoPE, which is ordinary RoPE for text
        "nextn_predict_layers",  # layers behind the decoder's, of the head that predicts several tokens
    },
    gguf_tensors=MappingProxyType(
        {
            **GGUF_TENSORS,
            "mlp_norm": "blk.{i}.post_attention_norm.weight",
            "mix_qkv": "blk.{i}.attn_qkv.weight",
            "mix_gate": "blk.{i}.attn_gate.weight",
            "mix_beta": "blk.{i}.ssm_beta.weight",
            "mix_decay": "blk.{i}.ssm_alpha.weight",
            "mix_conv": "blk.{i}.ssm_conv1d.weight",
            "decay_log": "blk.{i}.ssm_a",
            "decay_bias": "blk.{i}.ssm_dt.bias",
            "mix_norm": "blk.{i}.ssm_norm.weight",
            "mix_out": "blk.{i}.ssm_out.weight",
        }
    ),
    gguf_rope_factors="rope_freqs.weight",
    gguf_interleaved=False,
    gguf_image_tokens=("<|image_pad|>", "<|video_pad|>"),
    fixed=MappingProxyType({"qk_norm": True, "attention_gate": True}),
    norm_offset=1.0,
    partial_rotary=0.25,
    recurrent=True,
)
