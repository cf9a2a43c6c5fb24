"""Reads the hyperparameters of a model file into a `ModelConfig`: Hugging Face config.json or GGUF.

What each family calls things, and which of its settings are refused, is data in `model.families`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv.errors import ConfigError, FormatError
from jaxkv.model.config import ModelConfig, RopeConfig
from jaxkv.model.families import family_from_gguf, family_from_hf
from jaxkv.model.rope import inverse_frequencies
from jaxkv.typing import Float32


class _Fields:
    """Typed reads from a mapping, with one-sentence errors that name the key."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix

    def fail(self, key: str, found: Any, expected: str) -> FormatError:
        return FormatError(f"{self.where}: {self.prefix}{key} is {found!r}, expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(key, value, "a non-negative integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number: nothing that a config says in floating point may be zero or less."""
        value: Any = self.data.get(key)
        value = default if value is None else value
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value < math.inf:
            raise self.fail(key, value, "a positive finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.data.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false")
        return value

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        for key, values in allowed.items():
            if key in self.data and self.data[key] not in values:
                shown = " or ".join(repr(v) for v in values if v is not None) or "it absent"
                raise self.fail(key, self.data[key], f"{shown}: other values are not supported")


def config_from_hf(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads a Hugging Face `config.json`.

    Args:
      data: the parsed JSON object.
      where: names the file in errors.

    Raises:
      FormatError: unknown family, missing or mistyped key, or a setting whose maths is unsupported.
    """
    family = family_from_hf(data, where)
    data = {**family.hf_defaults, **data}
    fields = _Fields(data, where)
    fields.only(family.hf_only)
    heads, dim = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads, head_dim = data.get("num_key_value_heads"), data.get("head_dim")
    if head_dim is None and (heads == 0 or dim % heads):
        raise fields.fail("hidden_size", dim, f"a multiple of num_attention_heads {heads}")
    head_dim = dim // heads if head_dim is None else fields.integer("head_dim")
    eos, bos = data["eos_token_id"], data["bos_token_id"]
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    positions = fields.integer("max_position_embeddings")
    return _model_config(
        where,
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        num_layers=fields.integer("num_hidden_layers"),
        embed_dim=dim,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        max_positions=positions,
        rope=_rope_from_hf(data, where, head_dim, positions),
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=bos if bos is None else fields.integer("bos_token_id"),
        eos_token_ids=tuple(_Fields({"eos_token_id": e}, where).integer("eos_token_id") for e in eos_ids),
    )


def _rope_from_hf(data: Mapping[str, Any], where: str, head_dim: int, positions: int) -> RopeConfig:
    # transformers 5 writes rope_parameters, earlier versions rope_scaling beside rope_theta
    key = "rope_parameters" if data.get("rope_parameters") is not None else "rope_scaling"
    scaling = data.get(key)
    if scaling is not None and not isinstance(scaling, Mapping):
        raise FormatError(f"{where}: {key} is {scaling!r}, expected an object or null")
    merged = {"rope_theta": data.get("rope_theta"), **(scaling or {})}
    fields = _Fields(merged, where, f"{key}.")
    kind = merged.get("rope_type", merged.get("type", "default"))
    fields.only({"partial_rotary_factor": (None, 1.0), "truncate": (None, True)})
    theta = fields.number("rope_theta", 10_000.0)
    if theta <= 1:
        raise fields.fail("rope_theta", theta, "more than 1")
    # transformers lets the key beside the RoPE settings win over the one among them
    name = "original_max_position_embeddings"
    original = next((d[name] for d in (data, merged) if d.get(name) is not None), positions)
    fields = _Fields({**merged, name: original}, where, f"{key}.")
    values: dict[str, Any] = {"theta": theta, "rotary_dim": head_dim, "scaling": kind}
    if kind == "default":
        return _rope_config(where, values)
    if kind not in ("linear", "llama3", "yarn"):
        raise fields.fail("rope_type", kind, "one of default, linear, llama3, yarn")
    if kind != "yarn" or merged.get("factor") is not None:
        values["factor"] = fields.number("factor")
    if kind != "linear":
        values["original_max_positions"] = fields.integer("original_max_position_embeddings")
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.fail("high_freq_factor", high, f"more than low_freq_factor {low}")
        values |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        values.setdefault("factor", positions / max(values["original_max_positions"], 1))
        values["beta_fast"] = fields.number("beta_fast", 32.0)
        values["beta_slow"] = fields.number("beta_slow", 1.0)
        values["magnitude"] = _yarn_magnitude(fields, values["factor"])
    return _rope_config(where, values)


def _yarn_magnitude(fields: _Fields, factor: float) -> float:
    """YaRN's attention factor, arXiv 2309.00071 eq. 22, with DeepSeek's mscale variant."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.data.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if not (fields.data.get("mscale") and fields.data.get("mscale_all_dim")):
        return scale(1.0)
    return scale(fields.number("mscale")) / scale(fields.number("mscale_all_dim"))


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
    fields = _Fields(own, where, prefix)
    fields.only(family.gguf_only)
    heads, dim = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", dim // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.fail(key, own[key], f"the head dimension {head_dim}")
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        raise fields.fail("vocab_size", own["vocab_size"], f"the embedding's {vocab_size} rows")
    tokens = _Fields(metadata, where)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos_keys = [f"tokenizer.ggml.{k}_token_id" for k in ("eos", "eot", "eom")]
    eos = dict.fromkeys(tokens.integer(k) for k in eos_keys if k in metadata)
    positions = fields.integer("context_length")
    return _model_config(
        where,
        family=family.name,
        vocab_size=vocab_size,
        num_layers=fields.integer("block_count"),
        embed_dim=dim,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_dim=fields.integer("feed_forward_length"),
        max_positions=positions,
        rope=_rope_from_gguf(fields, head_dim, positions, rope_factors),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings=tied,
        bos_token_id=None if bos is None else tokens.integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(eos),
    )


def _rope_from_gguf(
    fields: _Fields, head_dim: int, positions: int, rope_factors: Float32 | None
) -> RopeConfig:
    data = fields.data
    theta = fields.number("rope.freq_base", 10_000.0)
    if theta <= 1:
        raise fields.fail("rope.freq_base", theta, "more than 1")
    values: dict[str, Any] = {"theta": theta, "rotary_dim": head_dim}
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
        return _rope_config(fields.where, values)
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
    plain = _rope_config(where, values)
    if np.all(factors == 1):
        return plain
    rope = _rope_config(
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


def _rope_config(where: str, values: dict[str, Any]) -> RopeConfig:
    try:
        return RopeConfig(**values)
    except ConfigError as error:
        raise FormatError(f"{where}: {error}") from error


def _model_config(where: str, **values: Any) -> ModelConfig:
    try:
        config = ModelConfig(**values)
    except ConfigError as error:
        raise FormatError(f"{where}: {error}") from error
    for name, ids in (("eos", config.eos_token_ids), ("bos", (config.bos_token_id,))):
        for i in ids:
            if i is not None and i >= config.vocab_size:
                raise FormatError(
                    f"{where}: {name} token id is {i}, expected under vocab_size {config.vocab_size}"
                )
    return config
