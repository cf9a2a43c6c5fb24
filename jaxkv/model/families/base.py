"""What a row of the table of families says, and which tensors a file of a family must hold.

Host only: no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv.model.config import ModelConfig, RecurrentConfig

# Parts of a decoder as files store them, matrices as [out, in]; `jaxkv.io.weights` joins them into Params.
LAYER_PARTS = ("attn_norm", "q", "k", "v", "out", "mlp_norm", "gate", "up", "down")
MODEL_PARTS = ("embed", "final_norm", "unembed")
BIAS_PARTS = ("q_bias", "k_bias", "v_bias")
HEAD_NORM_PARTS = ("q_norm", "k_norm")
POST_NORM_PARTS = ("post_attn_norm", "post_mlp_norm")
MLP_PARTS = ("mlp_norm", "gate", "up", "down")
RECURRENT_PARTS = (
    "mix_qkv",
    "mix_gate",
    "mix_beta",
    "mix_decay",
    "mix_conv",
    "decay_log",
    "decay_bias",
    "mix_norm",
    "mix_out",
)


def _nothing() -> Any:
    return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How files of one model family name things. Tensor names may hold `{i}`, the layer.

    A key of a config.json that a row does not name is refused, unless its value is null: a setting that
    would change the maths must never be passed over.
    """

    name: str
    hf_names: tuple[tuple[str, str], ...]  # (model_type, architecture)
    hf_nested: Mapping[str, str] = _nothing()  # model_type -> key under which the text config stands
    hf_outer: frozenset[str] = frozenset()  # keys beside that one which text does not need
    hf_defaults: Mapping[str, Any]  # what the family assumes for an absent key
    hf_only: Mapping[str, tuple[Any, ...]]  # key -> the only values whose maths this decoder has
    hf_read: frozenset[str] = frozenset()  # further keys that are read or are harmless
    hf_tensors: Mapping[str, str]
    hf_renames: tuple[tuple[str, str], ...] = ()  # beginnings of tensor names, and what they stand for
    hf_ignored: tuple[str, ...] = ()  # beginnings of tensor names that text does not need
    hf_derived_tensors: tuple[str, ...]  # endings of computed buffers, not weights
    gguf_architecture: str
    gguf_only: Mapping[str, tuple[Any, ...]]  # key after "<architecture>." -> allowed values
    gguf_read: frozenset[str]  # keys after "<architecture>." that are read or are harmless
    gguf_tensors: Mapping[str, str]
    gguf_rope_factors: str  # tensor that divides the inverse frequencies, where present
    gguf_interleaved: bool  # q and k rows stored as (even, odd) pairs
    fixed: Mapping[str, Any] = _nothing()  # fields of `ModelConfig` that every model of the family has
    embed_scaled: bool = False  # embedded tokens are multiplied by sqrt(embed_dim)
    norm_offset: float = 0.0  # what Hugging Face files leave out of norm weights
    query_scalar: str = ""  # HF key of s in the query's factor 1/sqrt(s); head_dim where ""
    gguf_wide_queries: frozenset[int] = frozenset()  # numbers of layers where s is embed_dim / num_heads
    window_key: str = ""  # HF key of the local layers' window; "" for a family without any
    window_switch: str = ""  # HF key that must be true for the window to apply
    local_from: str = ""  # HF key of the first local layer, where layer_types is absent
    global_every: str = ""  # HF key of n: each n-th layer is global, where layer_types is absent
    local_theta: str = ""  # HF key of the RoPE base of local layers, which no scaling applies to
    gguf_global_every: int = 0  # default of n in GGUF files with a window
    hf_image_tokens: tuple[str, ...] = ()  # outer keys of token ids that stand for what is no text
    hf_rope_read: frozenset[str] = frozenset()  # further keys of the RoPE settings that are harmless for text
    partial_rotary: float = 1.0  # share of a head that is rotated, where the file does not say
    recurrent: bool = False  # has gated DeltaNet layers
    gguf_local_theta: float = 0.0  # RoPE base of local layers in GGUF files that do not say
    gguf_image_tokens: tuple[str, ...] = ()  # as hf_image_tokens, by their text in the vocabulary


def layer_parts(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Parts that a file must hold for a layer."""
    # Not by `types`: a corrupt file may claim any number of layers.
    if config.layer_types and config.layer_types[layer] == "recurrent":
        return ("attn_norm", *RECURRENT_PARTS, *MLP_PARTS)
    return (
        *LAYER_PARTS,
        *(BIAS_PARTS if config.qkv_bias else ()),
        *(HEAD_NORM_PARTS if config.qk_norm else ()),
        *(POST_NORM_PARTS if config.post_norms else ()),
    )


def part_names(tensors: Mapping[str, str], config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields (tensor name, part) of each tensor that a file of `config` must hold.

    Lazily, because a corrupt file may claim any number of layers: stop at the first one missing.
    """
    for part in MODEL_PARTS:
        if part != "unembed" or not config.tie_embeddings:
            yield tensors[part], part
    for i in range(config.num_layers):
        for part in layer_parts(config, i):
            yield tensors[part].format(i=i), part


def part_shape(part: str, config: ModelConfig) -> tuple[int, ...]:
    """Returns the shape a file must store for `part`, [out, in] for matrices."""
    d, h = config.embed_dim, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, d),
        "unembed": (config.vocab_size, d),
        "q": (config.num_heads * h * (2 if config.attention_gate else 1), d),
        "k": (config.num_kv_heads * h, d),
        "v": (config.num_kv_heads * h, d),
        "q_bias": (config.num_heads * h,),
        "k_bias": (config.num_kv_heads * h,),
        "v_bias": (config.num_kv_heads * h,),
        "q_norm": (h,),
        "k_norm": (h,),
        "out": (d, config.num_heads * h),
        "gate": (config.mlp_dim, d),
        "up": (config.mlp_dim, d),
        "down": (d, config.mlp_dim),
        **(_recurrent_shapes(config.recurrent, d) if config.recurrent else {}),
    }
    return shapes.get(part, (d,))


def _recurrent_shapes(shape: RecurrentConfig, d: int) -> dict[str, tuple[int, ...]]:
    heads, values = shape.num_value_heads, shape.num_value_heads * shape.value_dim
    return {
        "mix_qkv": (shape.channels, d),
        "mix_gate": (values, d),
        "mix_beta": (heads, d),
        "mix_decay": (heads, d),
        "mix_conv": (shape.channels, 1, shape.conv_width),
        "decay_log": (heads,),
        "decay_bias": (heads,),
        "mix_norm": (shape.value_dim,),
        "mix_out": (d, values),
    }
