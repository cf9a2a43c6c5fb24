"""A tiny hybrid in one geometry: compiling is what its tests take, so layers and shapes are few."""

from __future__ import annotations

from typing import Any

from tiny import make_model, tiny_config

import jaxkv

CHUNK = 16  # steps have 16 tokens or 1
SHAPE = jaxkv.RecurrentConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4)


def hybrid_config(**changes: Any) -> jaxkv.ModelConfig:
    """Three layers, the middle one attends; partial rotary, gated attention, normed queries and keys."""
    values: dict[str, Any] = {
        "family": "qwen3_5",
        "num_layers": 3,
        "layer_types": ("recurrent", "global", "recurrent"),
        "rope": jaxkv.RopeConfig(theta=10_000.0, rotary_dim=4),
        "qk_norm": True,
        "attention_gate": True,
        "recurrent": SHAPE,
    }
    return tiny_config(**{**values, **changes})


def hybrid_model(seed: int = 0, **changes: Any) -> jaxkv.Model:
    return make_model(hybrid_config(**changes), seed)
