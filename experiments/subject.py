"""The model under test: a named one, or a tiny random one that needs no network."""

from __future__ import annotations

from typing import Protocol

from experiments.config import TINY_MODEL
from jaxkv.io.models import Model, load
from jaxkv.model.config import ModelConfig, RopeConfig


class SubjectConfig(Protocol):
    """What of an experiment's config says which model it is about."""

    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def seed(self) -> int: ...


def load_subject(config: SubjectConfig) -> Model:
    """Loads `config.model`: anything `jaxkv.load` takes, or "tiny-random".

    Raises:
      FetchError, FormatError, ConfigError: as `jaxkv.load`.
    """
    if config.model == TINY_MODEL:
        return tiny_model(config.seed, config.dtype)
    return load(config.model, dtype=config.dtype)


def tiny_model(seed: int = 0, dtype: str = "float32") -> Model:
    """Two layers of random weights that read UTF-8 bytes: runs everything, knows nothing."""
    import jax.numpy as jnp

    from jaxkv.model.params import init_params, params_digest

    config = ModelConfig(
        vocab_size=256,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=64,
        max_positions=8192,
        rope=RopeConfig(rotary_dim=16),
        tie_embeddings=True,
    )
    params = init_params(config, seed, jnp.dtype(dtype))
    return Model(
        config=config,
        params=params,
        tokenizer=None,
        name=TINY_MODEL,
        dtype=dtype,
        weights_digest=params_digest(params),
        source=f"random weights, seed {seed}",
    )
