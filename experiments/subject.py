"""The model under test, a named one or a tiny random one of any family, and the engine that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from experiments.config import TINY_MODEL
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError, nearest
from jaxkv.io.models import Model, load
from jaxkv.model.config import ModelConfig, RopeConfig
from jaxkv.model.sharding import DATA
from jaxkv.parallel import as_mesh, parse_mesh
from jaxkv.replicas import Replicas

# "tiny-random-<family>": what sets the family apart, in the proportions of its published models.
TINY_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama3": {
            "rope": RopeConfig(
                theta=500_000.0,
                rotary_dim=16,
                scaling="llama3",
                factor=8.0,
                original_max_positions=1024,
            ),
        },
        "qwen2": {"family": "qwen2", "qkv_bias": True, "rope": RopeConfig(theta=1e6, rotary_dim=16)},
        "qwen3": {"family": "qwen3", "qk_norm": True, "rope": RopeConfig(theta=1e6, rotary_dim=16)},
        "gemma3": {
            "family": "gemma3",
            "num_layers": 6,
            "layer_types": ("local",) * 5 + ("global",),
            "window": 64,
            "rope": RopeConfig(theta=1e6, rotary_dim=16, scaling="linear", factor=8.0),
            "rope_local": RopeConfig(theta=10_000.0, rotary_dim=16),
            "qk_norm": True,
            "post_norms": True,
            "activation": "gelu_tanh",
            "embed_scale": 32**0.5,
        },
    }
)


class SubjectConfig(Protocol):
    """What of an experiment's config says which model it is about."""

    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def seed(self) -> int: ...


def load_subject(config: SubjectConfig) -> Model:
    """Loads `config.model`: anything `jaxkv.load` takes, "tiny-random", or "tiny-random-<family>".

    Raises:
      FetchError, FormatError, ConfigError: as `jaxkv.load`.
    """
    if config.model == TINY_MODEL or config.model.startswith(f"{TINY_MODEL}-"):
        return tiny_model(config.seed, config.dtype, config.model.removeprefix(TINY_MODEL).removeprefix("-"))
    return load(config.model, dtype=config.dtype)


def mesh_of(text: str, *, replicas: bool) -> Any:
    """The mesh that `config.mesh` describes over this process's own devices, None for one device.

    Raises:
      ConfigError: a bad mesh, or one of several replicas where there is work for one.
    """
    import jax

    if not text:
        return None
    try:
        mesh = as_mesh(parse_mesh(text, jax.local_devices()))
    except ConfigError as error:
        raise ConfigError(f"config.{error}") from None
    count = 1 if mesh is None else mesh.shape.get(DATA, 1)
    if count > 1 and not replicas:
        raise ConfigError(
            f"config.mesh is '{text}', expected one replica: this experiment works on one case at a time; "
            "several processes (--num_processes) share its cases"
        )
    return mesh


def make_engine(model: Model, mesh: str, **options: Any) -> Engine | Replicas:
    """An engine, or on a mesh with several replicas all of them."""
    found = mesh_of(mesh, replicas=True)
    if found is not None and found.shape.get(DATA, 1) > 1:
        return Replicas(model, mesh=found, **options)
    return Engine(model, mesh=found, **options)


def tiny_model(seed: int = 0, dtype: str = "float32", family: str = "") -> Model:
    """Random weights, two layers or so, that read UTF-8 bytes: runs everything, knows nothing.

    Raises:
      ConfigError: an unknown family; "" is a plain Llama.
    """
    import jax.numpy as jnp

    from jaxkv.model.params import init_params, params_digest

    if family and family not in TINY_FAMILIES:
        names = [f"{TINY_MODEL}-{name}" for name in TINY_FAMILIES]
        name = f"{TINY_MODEL}-{family}"
        raise ConfigError(f"model is '{name}', expected one of {', '.join(names)}{nearest(name, names)}")
    values: dict[str, Any] = {
        "vocab_size": 256,
        "num_layers": 2,
        "embed_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "mlp_dim": 64,
        "max_positions": 8192,
        "rope": RopeConfig(rotary_dim=16),
        "tie_embeddings": True,
    }
    config = ModelConfig(**{**values, **TINY_FAMILIES.get(family, {})})
    params = init_params(config, seed, jnp.dtype(dtype))
    return Model(
        config=config,
        params=params,
        tokenizer=None,
        name=f"{TINY_MODEL}-{family}" if family else TINY_MODEL,
        dtype=dtype,
        weights_digest=params_digest(params),
        source=f"random weights, seed {seed}",
    )
