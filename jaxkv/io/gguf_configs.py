"""Reads the metadata of a GGUF file into a `ModelConfig`.

What each family calls things, and which of its settings are refused, is data in `model.families`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.errors import ConfigError, FormatError
from jaxkv.io.fields import Fields, global_every, model_config, rope_config
from jaxkv.model.config import ModelConfig, RecurrentConfig, RopeConfig
from jaxkv.model.families import Family, family_from_gguf
from jaxkv.model.rope import inverse_frequencies
from jaxkv.typing import Float32


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    rope_factors: Float32 | None = None,
    where: str = "gguf",
) -> ModelConfig:
    """Reads GGUF metadata.

    Args:
      metadata: key -> plain Python value.
      vocab_size: rows of the embedding tensor; metadata may leave it out.
      tied: whether the file has no separate output tensor.
      rope_factors: f32[head_dim/2], divisors of the inverse frequencies, where the file has them.
      where: names the file in errors.

    Raises:
      FormatError: unknown architecture, missing or mistyped key, or unsupported maths.
    """
    family = family_from_gguf(metadata, where)
    prefix = f"{family.gguf_architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    for key in own:
        if key not in family.gguf_read and key not in family.gguf_only:
            raise FormatError(f"{where}: {prefix}{key} is not supported for {family.name} models")
    fields = Fields(own, where, prefix)
    fields.only(family.gguf_only)
    heads, dim = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", dim // max(heads, 1))
    partial = family.partial_rotary != 1.0  # such a file has to say how much of a head is rotated
    rotary_dim = fields.positive("rope.dimension_count") if partial else head_dim
    for key in ("attention.value_length", *(() if partial else ("rope.dimension_count",))):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.fail(key, own[key], f"the head dimension {head_dim}")
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        raise fields.fail("vocab_size", own["vocab_size"], f"the embedding's {vocab_size} rows")
    tokens = Fields(metadata, where)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos_keys = [f"tokenizer.ggml.{k}_token_id" for k in ("eos", "eot", "eom")]
    eos = dict.fromkeys(tokens.integer(k) for k in eos_keys if k in metadata)
    positions = fields.integer("context_length")
    layers = _decoder_layers(fields)
    wide = layers in family.gguf_wide_queries and heads
    return model_config(
        where,
        **family.fixed,
        **_layers_from_gguf(fields, family, layers, head_dim),
        embed_scale=math.sqrt(dim) if family.embed_scaled else 1.0,
        query_scale=1 / math.sqrt(dim // heads) if wide and dim // heads != head_dim else None,
        family=family.name,
        vocab_size=vocab_size,
        num_layers=layers,
        embed_dim=dim,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("feed_forward_length"),
        max_positions=positions,
        rope=_rope_from_gguf(fields, rotary_dim, positions, rope_factors),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings=tied,
        bos_token_id=None if bos is None else tokens.integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(eos),
        image_token_ids=_image_tokens(metadata, family),
    )


def _decoder_layers(fields: Fields) -> int:
    """Layers of the decoder: blocks but those of a head that predicts several tokens, which stand last."""
    blocks, further = fields.integer("block_count"), fields.integer("nextn_predict_layers", 0)
    if further and further >= blocks:
        raise fields.fail("nextn_predict_layers", further, f"less than block_count {blocks}")
    return blocks - further


def _image_tokens(metadata: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Ids of tokens that stand for what is no text: a GGUF file has only their place in its vocabulary."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not family.gguf_image_tokens or not isinstance(tokens, list):
        return ()
    return tuple(tokens.index(text) for text in family.gguf_image_tokens if text in tokens)


def _layers_from_gguf(fields: Fields, family: Family, count: int, head_dim: int) -> dict[str, Any]:
    """Layer types, window and the local layers' rotation, where some layers are local; shape of recurrent
    ones."""
    if family.recurrent:
        return _recurrent_from_gguf(fields, count)
    if not family.gguf_global_every or not fields.integer("attention.sliding_window", 0):
        return {}
    pattern = fields.data.get("attention.sliding_window_pattern", family.gguf_global_every)
    if isinstance(pattern, list):  # one flag a layer
        if len(pattern) != count:
            raise fields.fail("attention.sliding_window_pattern", pattern, f"{count} entries or a number")
        types = tuple("local" if local else "global" for local in pattern)
    else:
        key = "attention.sliding_window_pattern"
        types = global_every(fields.positive(key) if key in fields.data else pattern, count)
    if "local" not in types:
        return {}
    theta = fields.number("rope.freq_base_swa", family.gguf_local_theta)
    return {
        "layer_types": types,
        "window": fields.positive("attention.sliding_window"),
        "rope_local": rope_config(fields.where, {"theta": theta, "rotary_dim": head_dim}),
    }


def _recurrent_from_gguf(fields: Fields, count: int) -> dict[str, Any]:
    """Layer types and shape of recurrent layers, in the words that GGUF has for state-space models."""
    listed = fields.data.get("attention.recurrent_layers")
    if listed is None:
        key = "full_attention_interval"
        step = fields.positive(key) if key in fields.data else 4
        flags = [bool((i + 1) % step) for i in range(count)]
    else:
        blocks = fields.integer("block_count")
        if (
            not isinstance(listed, list)
            or len(listed) != blocks
            or any(flag not in (0, 1) for flag in listed)
        ):
            raise fields.fail("attention.recurrent_layers", listed, f"{blocks} of true and false")
        flags = [bool(flag) for flag in listed[:count]]
    if not any(flags):
        return {}
    heads, inner = fields.positive("ssm.time_step_rank"), fields.positive("ssm.inner_size")
    if inner % heads:
        raise fields.fail("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank {heads}")
    try:
        shape = RecurrentConfig(
            num_key_heads=fields.positive("ssm.group_count"),
            num_value_heads=heads,
            key_dim=fields.positive("ssm.state_size"),
            value_dim=inner // heads,
            conv_width=fields.positive("ssm.conv_kernel"),
        )
    except ConfigError as error:
        raise FormatError(f"{fields.where}: {error}") from error
    return {"layer_types": tuple("recurrent" if flag else "global" for flag in flags), "recurrent": shape}


def _rope_from_gguf(
    fields: Fields, rotary_dim: int, positions: int, rope_factors: Float32 | None
) -> RopeConfig:
    data = fields.data
    theta = fields.number("rope.freq_base", 10_000.0)
    if theta <= 1:
        raise fields.fail("rope.freq_base", theta, "more than 1")
    values: dict[str, Any] = {"theta": theta, "rotary_dim": rotary_dim}
    kind = data.get("rope.scaling.type", "linear" if "rope.scale_linear" in data else "none")
    if kind not in ("none", "linear", "yarn"):
        raise fields.fail("rope.scaling.type", kind, "one of none, linear, yarn")
    if kind != "none":
        key = "rope.scaling.factor" if "rope.scaling.factor" in data else "rope.scale_linear"
        values.update(scaling=kind, factor=fields.number(key))
    if kind == "yarn":
        # llama.cpp multiplies the file's factor by YaRN's own recommendation
        scale = 0.1 * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0
        attn = fields.number("rope.scaling.yarn_attn_factor", 1.0)
        values.update(
            original_max_positions=fields.integer("rope.scaling.original_context_length", positions),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            magnitude=scale * attn * fields.number("rope.scaling.attn_factor", 1.0),
        )
    elif fields.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise fields.fail("rope.scaling.attn_factor", data["rope.scaling.attn_factor"], "1.0")
    if rope_factors is None:
        return rope_config(fields.where, values)
    if kind != "none":
        raise fields.fail("rope.scaling.type", kind, "none beside a tensor of rope factors")
    return _llama3_from_factors(fields.where, values, rope_factors)


def _llama3_from_factors(where: str, values: dict[str, Any], factors: Float32) -> RopeConfig:
    """Recovers the llama3 scaling from the divisors that its GGUF stores instead of its parameters.

    Only the published parameters (low 1, high 4, 8,192 original positions) with any factor are
    recognised; the divisors are then recomputed and must agree to float32.
    """
    half = values["rotary_dim"] // 2
    if factors.shape != (half,) or not np.all(np.isfinite(factors)) or np.any(factors <= 0):
        raise FormatError(
            f"{where}: rope factors have shape {list(factors.shape)}, expected {half} positive finite numbers"
        )
    plain = rope_config(where, values)
    if np.all(factors == 1):
        return plain
    rope = rope_config(
        where,
        {
            **values,
            "scaling": "llama3",
            "factor": float(factors.max()),
            "original_max_positions": 8192,
        },
    )
    expected = inverse_frequencies(plain) / inverse_frequencies(rope)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise FormatError(
            f"{where}: rope factors are not those of llama3 scaling with low_freq_factor 1, "
            "high_freq_factor 4 and 8192 original positions, the only ones supported"
        )
    return rope
