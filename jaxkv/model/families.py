"""Model families as data: what a file calls things, and which of its settings change the maths.

One `Family` row tells how Hugging Face and GGUF files of that family name hyperparameters and
tensors. A setting that would change the decoder's maths in a way we do not implement is refused by
name; nothing is ignored silently except what a row lists as harmless. A new family is a new row.

Host only: no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxkv.errors import FormatError
from jaxkv.model.config import ModelConfig

# Parts of a decoder as files store them, each [out, in]; `jaxkv.io.weights` joins them into Params.
LAYER_PARTS = ("attn_norm", "q", "k", "v", "out", "mlp_norm", "gate", "up", "down")
MODEL_PARTS = ("embed", "final_norm", "unembed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How files of one model family name things. Tensor names may hold `{i}`, the layer."""

    name: str
    hf_model_type: str
    hf_architecture: str
    hf_defaults: Mapping[str, Any]  # what the family assumes for an absent key
    hf_only: Mapping[str, tuple[Any, ...]]  # key -> the only values whose maths this decoder has
    hf_tensors: Mapping[str, str]
    hf_derived_tensors: tuple[str, ...]  # endings of computed buffers, not weights
    gguf_architecture: str
    gguf_only: Mapping[str, tuple[Any, ...]]  # key after "<architecture>." -> allowed values
    gguf_read: frozenset[str]  # keys after "<architecture>." that are read or are harmless
    gguf_tensors: Mapping[str, str]
    gguf_rope_factors: str  # tensor that divides the inverse frequencies, where present
    gguf_interleaved: bool  # q and k rows stored as (even, odd) pairs


LLAMA = Family(
    name="llama",
    hf_model_type="llama",
    hf_architecture="LlamaForCausalLM",
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
            "attention_bias": (None, False),
            "mlp_bias": (None, False),
            "hidden_act": (None, "silu", "swish"),
            "partial_rotary_factor": (None, 1.0),
            "sliding_window": (None,),
            "layer_types": (None,),
            "pretraining_tp": (None, 1),
            "quantization_config": (None,),
            "num_local_experts": (None, 0),
        }
    ),
    hf_tensors=MappingProxyType(
        {
            "embed": "model.embed_tokens.weight",
            "final_norm": "model.norm.weight",
            "unembed": "lm_head.weight",
            "attn_norm": "model.layers.{i}.input_layernorm.weight",
            "q": "model.layers.{i}.self_attn.q_proj.weight",
            "k": "model.layers.{i}.self_attn.k_proj.weight",
            "v": "model.layers.{i}.self_attn.v_proj.weight",
            "out": "model.layers.{i}.self_attn.o_proj.weight",
            "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
            "gate": "model.layers.{i}.mlp.gate_proj.weight",
            "up": "model.layers.{i}.mlp.up_proj.weight",
            "down": "model.layers.{i}.mlp.down_proj.weight",
        }
    ),
    hf_derived_tensors=("rotary_emb.inv_freq",),
    gguf_architecture="llama",
    gguf_only=MappingProxyType(
        {
            "expert_count": (0,),
            "expert_used_count": (0,),
            "attention.sliding_window": (0,),
            "attention.causal": (True,),
            "attention.clamp_kqv": (0.0,),
            "attention.max_alibi_bias": (0.0,),
            "use_parallel_residual": (False,),
            "logit_scale": (1.0,),
            "residual_scale": (1.0,),
            "embedding_scale": (1.0,),
            "rope.scaling.yarn_ext_factor": (1.0,),
        }
    ),
    gguf_read=frozenset(
        {
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "vocab_size",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "attention.layer_norm_rms_epsilon",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scale_linear",
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.attn_factor",
            "rope.scaling.finetuned",
            "rope.scaling.yarn_attn_factor",
            "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
            "tensor_data_layout",
        }
    ),
    gguf_tensors=MappingProxyType(
        {
            "embed": "token_embd.weight",
            "final_norm": "output_norm.weight",
            "unembed": "output.weight",
            "attn_norm": "blk.{i}.attn_norm.weight",
            "q": "blk.{i}.attn_q.weight",
            "k": "blk.{i}.attn_k.weight",
            "v": "blk.{i}.attn_v.weight",
            "out": "blk.{i}.attn_output.weight",
            "mlp_norm": "blk.{i}.ffn_norm.weight",
            "gate": "blk.{i}.ffn_gate.weight",
            "up": "blk.{i}.ffn_up.weight",
            "down": "blk.{i}.ffn_down.weight",
        }
    ),
    gguf_rope_factors="rope_freqs.weight",
    gguf_interleaved=True,
)

FAMILIES: tuple[Family, ...] = (LLAMA,)


def part_names(tensors: Mapping[str, str], config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields (tensor name, part) of each tensor that a file of `config` must hold.

    Lazily, because a corrupt file may claim any number of layers: stop at the first one missing.
    """
    for part in MODEL_PARTS:
        if part != "unembed" or not config.tie_embeddings:
            yield tensors[part], part
    for i in range(config.num_layers):
        for part in LAYER_PARTS:
            yield tensors[part].format(i=i), part


def part_shape(part: str, config: ModelConfig) -> tuple[int, ...]:
    """Returns the shape a file must store for `part`, [out, in] for matrices."""
    d, h = config.embed_dim, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, d),
        "unembed": (config.vocab_size, d),
        "q": (config.num_heads * h, d),
        "k": (config.num_kv_heads * h, d),
        "v": (config.num_kv_heads * h, d),
        "out": (d, config.num_heads * h),
        "gate": (config.mlp_dim, d),
        "up": (config.mlp_dim, d),
        "down": (d, config.mlp_dim),
    }
    return shapes.get(part, (d,))


def family_from_hf(data: Mapping[str, Any], where: str) -> Family:
    """Finds the family of a Hugging Face config; raises `FormatError` naming what is supported."""
    kind, names = data.get("model_type"), data.get("architectures")
    known = ", ".join(f"{f.hf_architecture} ({f.hf_model_type})" for f in FAMILIES)
    for family in FAMILIES:
        if kind == family.hf_model_type and names in (None, [], [family.hf_architecture]):
            return family
    raise FormatError(
        f"{where}: model_type is {kind!r} with architectures {names!r}, expected one of {known}"
    )


def family_from_gguf(metadata: Mapping[str, Any], where: str) -> Family:
    """Finds the family of GGUF metadata; raises `FormatError` naming what is supported."""
    found = metadata.get("general.architecture")
    for family in FAMILIES:
        if found == family.gguf_architecture:
            return family
    known = ", ".join(f"'{f.gguf_architecture}'" for f in FAMILIES)
    raise FormatError(f"{where}: general.architecture is {found!r}, expected one of {known}")
