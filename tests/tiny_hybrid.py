"""A tiny hybrid in one geometry: compiling is what its tests take, so layers and shapes are few."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny import tiny_config

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


def hybrid_params(config: jaxkv.ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> jaxkv.Params:
    """Random weights whose norms are not 1 and whose gates are not half open, so that mistakes show."""
    params = jaxkv.init_params(config, seed, dtype)
    rng = np.random.default_rng(seed + 1)

    def change(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path[-1].name
        if name.endswith("norm"):
            return jnp.asarray(1 + 0.2 * rng.standard_normal(leaf.shape), leaf.dtype)
        return leaf * {"embed": 3.0, "qkv": 1.8, "rates": 2.0, "attn_gate": 2.0}.get(name, 1.0)

    changed: jaxkv.Params = jax.tree.map_with_path(change, params)
    return changed


def hybrid_model(seed: int = 0, **changes: Any) -> jaxkv.Model:
    config = hybrid_config(**changes)
    params = hybrid_params(config, seed)
    return jaxkv.Model(
        config=config,
        params=params,
        tokenizer=None,
        name="tiny-hybrid",
        dtype="float32",
        weights_digest=jaxkv.params_digest(params),
        source="random",
    )
