"""Reads a Hugging Face config.json into a `ModelConfig`; `gguf_configs` does it for GGUF.

What each family calls things, and which of its settings are refused, is data in `model.families`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxkv.errors import ConfigError, FormatError
from jaxkv.io.fields import Fields, global_every, model_config, rope_config
from jaxkv.model.config import REFUSED_ROPES, ROPE_SCALINGS, ModelConfig, RecurrentConfig, RopeConfig
from jaxkv.model.families import HF_COMMON, Family, family_from_hf

_HF_LAYER_TYPES = {"full_attention": "global", "sliding_attention": "local"}
_HF_ROPE_KEYS = frozenset(
    {
        "rope_theta",
        "rope_type",
        "type",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "partial_rotary_factor",
        "truncate",
        "finetuned",
    }
)


def config_from_hf(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads a Hugging Face `config.json`.

    Args:
      data: the parsed JSON object.
      where: names the file in errors.

    Raises:
      FormatError: unknown family, missing or mistyped key, or a setting whose maths is unsupported.
    """
    family = family_from_hf(data, where)
    images = Fields(data, where)
    data = _text_part(data, family, where)
    data = {**family.hf_defaults, **data}
    fields = Fields(data, where)
    fields.only(family.hf_only)
    fields.known(HF_COMMON | family.hf_read | family.hf_only.keys(), family.name)
    heads, dim = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads, head_dim = data.get("num_key_value_heads"), data.get("head_dim")
    if head_dim is None and (heads == 0 or dim % heads):
        raise fields.fail("hidden_size", dim, f"a multiple of num_attention_heads {heads}")
    head_dim = dim // heads if head_dim is None else fields.integer("head_dim")
    eos, bos = data["eos_token_id"], data["bos_token_id"]
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    positions = fields.integer("max_position_embeddings")
    layers = fields.integer("num_hidden_layers")
    scalar = fields.number(family.query_scalar) if family.query_scalar else head_dim
    types = _layers_from_hf(fields, family, layers)
    ropes = _ropes_from_hf(data, family, where, head_dim, positions)
    if not types:
        ropes.pop("rope_local", None)
    return model_config(
        where,
        **family.fixed,
        **types,
        **ropes,
        embed_scale=math.sqrt(dim) if family.embed_scaled else 1.0,
        query_scale=None if scalar == head_dim else 1 / math.sqrt(scalar),
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        num_layers=layers,
        embed_dim=dim,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        mlp_dim=fields.integer("intermediate_size"),
        max_positions=positions,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=bos if bos is None else fields.integer("bos_token_id"),
        eos_token_ids=tuple(Fields({"eos_token_id": e}, where).integer("eos_token_id") for e in eos_ids),
        image_token_ids=tuple(images.integer(k) for k in family.hf_image_tokens if k in images.data),
    )


def _text_part(data: Mapping[str, Any], family: Family, where: str) -> Mapping[str, Any]:
    """The text model's settings, where the file has them under a key of their own."""
    key = family.hf_nested.get(data.get("model_type", ""))
    if key is None:
        return data
    fields = Fields(data, where)
    inner = data.get(key)
    if not isinstance(inner, Mapping):
        raise fields.fail(key, inner, "an object")
    fields.known(HF_COMMON | family.hf_outer, family.name)
    # Special tokens are the whole model's; generation stops at those of the outer object.
    shared = {k: data[k] for k in ("bos_token_id", "eos_token_id") if data.get(k) is not None}
    tied = {k: data[k] for k in ("tie_word_embeddings",) if data.get(k) is not None}
    return {**tied, **inner, **shared}


def _layers_from_hf(fields: Fields, family: Family, count: int) -> dict[str, Any]:
    """Layer types and window, where some layers are local; layer types and shape of recurrent ones."""
    if family.recurrent:
        return _recurrent_from_hf(fields, count)
    if not family.window_key:
        return {}
    windowed = not family.window_switch or fields.flag(family.window_switch)
    listed = fields.data.get("layer_types")
    if listed is not None:
        expected = f"{count} of {', '.join(_HF_LAYER_TYPES)}"
        if not isinstance(listed, list) or len(listed) != count:
            raise fields.fail("layer_types", listed, expected)
        for kind in listed:
            if kind not in _HF_LAYER_TYPES:
                raise fields.fail("layer_types", kind, expected)
        types = tuple(_HF_LAYER_TYPES[kind] for kind in listed)
    elif windowed and family.global_every:
        types = global_every(fields.positive(family.global_every), count)
    else:
        first = fields.integer(family.local_from) if windowed else count
        types = tuple("local" if i >= first else "global" for i in range(count))
    if "local" not in types:
        return {}
    if not windowed:
        raise fields.fail(family.window_switch, False, "true beside sliding layers")
    return {"layer_types": types, "window": fields.positive(family.window_key)}


def _recurrent_from_hf(fields: Fields, count: int) -> dict[str, Any]:
    listed = fields.data.get("layer_types")
    known = {"linear_attention": "recurrent", "full_attention": "global"}
    if listed is None:
        step = fields.positive("full_attention_interval")
        listed = ["linear_attention" if (i + 1) % step else "full_attention" for i in range(count)]
    elif not isinstance(listed, list) or len(listed) != count:
        raise fields.fail("layer_types", listed, f"{count} of {', '.join(known)}")
    for kind in listed:
        if kind not in known:
            raise fields.fail("layer_types", kind, f"{count} of {', '.join(known)}")
    if "linear_attention" not in listed:
        return {}
    names = {
        "num_key_heads": "linear_num_key_heads",
        "num_value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
    }
    values = {name: fields.positive(key) for name, key in names.items()}
    try:
        shape = RecurrentConfig(**values)
    except ConfigError as error:
        raise FormatError(f"{fields.where}: {error}") from error
    return {"layer_types": tuple(known[kind] for kind in listed), "recurrent": shape}


def _ropes_from_hf(
    data: Mapping[str, Any], family: Family, where: str, head_dim: int, positions: int
) -> dict[str, RopeConfig | None]:
    """`rope`, and `rope_local` where local layers turn at a base of their own."""
    if not family.local_theta:
        return {"rope": _rope_from_hf(data, where, head_dim, positions, family)}
    shared: dict[str, Any] = dict(data)
    local = {"rope_theta": data[family.local_theta]}
    by_type = data.get("rope_parameters")
    if by_type is not None:  # transformers 5 writes one set for each type of layer
        for key in by_type if isinstance(by_type, Mapping) else (by_type,):
            if key not in _HF_LAYER_TYPES:
                raise FormatError(
                    f"{where}: rope_parameters has {key!r}, expected {' and '.join(_HF_LAYER_TYPES)}"
                )
        shared["rope_parameters"] = by_type.get("full_attention")
        local["rope_parameters"] = by_type.get("sliding_attention")
    rope = _rope_from_hf(shared, where, head_dim, positions)
    return {"rope": rope, "rope_local": _rope_from_hf(local, where, head_dim, positions)}


def _rope_from_hf(
    data: Mapping[str, Any], where: str, head_dim: int, positions: int, family: Family | None = None
) -> RopeConfig:
    # transformers 5 writes rope_parameters, earlier versions rope_scaling beside rope_theta
    key = "rope_parameters" if data.get("rope_parameters") is not None else "rope_scaling"
    scaling = data.get(key)
    if scaling is not None and not isinstance(scaling, Mapping):
        raise FormatError(f"{where}: {key} is {scaling!r}, expected an object or null")
    merged = {"rope_theta": data.get("rope_theta"), **(scaling or {})}
    fields = Fields(merged, where, f"{key}.")
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind in REFUSED_ROPES:
        raise fields.fail("rope_type", kind, f"one of {', '.join(ROPE_SCALINGS)}: {REFUSED_ROPES[kind]}")
    partial = 1.0 if family is None else family.partial_rotary
    if partial == 1.0:
        fields.only({"partial_rotary_factor": (None, 1.0)})
    fields.only({"truncate": (None, True)})
    fields.known(_HF_ROPE_KEYS | (family.hf_rope_read if family else frozenset()), "RoPE")
    theta = fields.number("rope_theta", 10_000.0)
    if theta <= 1:
        raise fields.fail("rope_theta", theta, "more than 1")
    # transformers lets the key beside the RoPE settings win over the one among them
    name = "original_max_position_embeddings"
    original = next((d[name] for d in (data, merged) if d.get(name) is not None), positions)
    fields = Fields({**merged, name: original}, where, f"{key}.")
    if partial != 1.0:
        factor = "partial_rotary_factor"
        set_here = [place[factor] for place in (data, merged) if place.get(factor) is not None]
        partial = Fields({factor: [partial, *set_here][-1]}, where).number(factor)
    values: dict[str, Any] = {"theta": theta, "rotary_dim": int(head_dim * partial), "scaling": kind}
    if kind == "default":
        return rope_config(where, values)
    if kind not in ROPE_SCALINGS:
        raise fields.fail("rope_type", kind, f"one of {', '.join(ROPE_SCALINGS)}")
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
    return rope_config(where, values)


def _yarn_magnitude(fields: Fields, factor: float) -> float:
    """YaRN's attention factor, arXiv 2309.00071 eq. 22, with DeepSeek's mscale variant."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.data.get("attention_factor") is not None:
        return fields.number("attention_factor")
    if not (fields.data.get("mscale") and fields.data.get("mscale_all_dim")):
        return scale(1.0)
    return scale(fields.number("mscale")) / scale(fields.number("mscale_all_dim"))
