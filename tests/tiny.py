"""One tiny model in one geometry: engines of equal shapes share compiled steps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import jaxkv

VOCAB, NUM_PAGES, PAGE_SIZE, CHUNK = 97, 64, 8, 32


def tiny_config(**changes: Any) -> jaxkv.ModelConfig:
    """A two-layer decoder with three query heads to each of two KV heads."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_layers": 2,
        "embed_dim": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "mlp_dim": 64,
        "max_positions": 512,
        "rope": jaxkv.RopeConfig(theta=10_000.0, rotary_dim=16),
    }
    return jaxkv.ModelConfig(**{**values, **changes})


def sharp_params(config: jaxkv.ModelConfig, seed: int = 0, dtype: Any = np.float32) -> jaxkv.Params:
    """Random weights whose attention is peaked, whose norms are not 1 and whose gates are not half open."""
    params = jaxkv.init_params(config, seed, dtype)
    rng = np.random.default_rng(seed + 1)

    def change(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path[-1].name
        if name.endswith("norm"):
            return jax.numpy.asarray(1 + 0.2 * rng.standard_normal(leaf.shape), leaf.dtype)
        return leaf * {"embed": 3.0, "qkv": 1.8, "rates": 2.0, "attn_gate": 2.0}.get(name, 1.0)

    changed: jaxkv.Params = jax.tree.map_with_path(change, params)
    return changed


def make_model(config: jaxkv.ModelConfig, seed: int = 0) -> jaxkv.Model:
    params = sharp_params(config, seed)
    return jaxkv.Model(
        config=config,
        params=params,
        tokenizer=None,
        name="tiny",
        dtype="float32",
        weights_digest=jaxkv.params_digest(params),
        source="random",
    )
