"""Weights of a recurrent layer (gated DeltaNet), `[out, in]`, with logical axis names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxkv.model.config import ModelConfig
from jaxkv.typing import Array, Float32

# Small parameters that stay float32 whatever the dtype of the matrices is.
FLOAT32_NAMES = ("conv", "decay_log", "decay_bias")


@struct.dataclass(kw_only=True)
class RecurrentParams:
    attn_norm: Array  # f32[D], of the mixer's input; named as that of a layer that attends
    qkv: Array  # [C, D], queries and keys of Hk heads, then values of Hv heads
    gate: Array  # [Hv, Dv, D], of the output
    rates: Array  # [2, Hv, D], write strength, then decay
    conv: Array  # f32[C, k], the last column for the token itself
    decay_log: Array  # f32[Hv], logarithm of the decay's speed
    decay_bias: Array  # f32[Hv]
    out_norm: Array  # f32[Dv]
    out: Array  # [D, Hv, Dv]
    mlp_norm: Array  # f32[D]
    gate_up: Array  # [2, F, D]
    down: Array  # [D, F]


RECURRENT_AXES = {
    "attn_norm": ("embed",),
    "qkv": ("channels", "embed"),
    "gate": ("value_heads", "value_dim", "embed"),
    "rates": ("rates", "value_heads", "embed"),
    "conv": ("channels", "taps"),
    "decay_log": ("value_heads",),
    "decay_bias": ("value_heads",),
    "out_norm": ("value_dim",),
    "out": ("embed", "value_heads", "value_dim"),
    "mlp_norm": ("embed",),
    "gate_up": ("gate_up", "mlp", "embed"),
    "down": ("embed", "mlp"),
}


def abstract_recurrent(config: ModelConfig, dtype: Any) -> RecurrentParams:
    """Shapes and dtypes of one recurrent layer of `config`."""
    shape = config.recurrent
    assert shape is not None
    d, f, heads = config.embed_dim, config.mlp_dim, shape.num_value_heads

    def w(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype)

    def f32(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.float32)

    return RecurrentParams(
        attn_norm=f32(d),
        qkv=w(shape.channels, d),
        gate=w(heads, shape.value_dim, d),
        rates=w(2, heads, d),
        conv=f32(shape.channels, shape.conv_width),
        decay_log=f32(heads),
        decay_bias=f32(heads),
        out_norm=f32(shape.value_dim),
        out=w(d, heads, shape.value_dim),
        mlp_norm=f32(d),
        gate_up=w(2, f, d),
        down=w(d, f),
    )


def init_small(rng: np.random.Generator) -> dict[str, Callable[[tuple[int, ...]], Float32]]:
    """How the parameters that are no matrices begin: name -> values of a shape.

    Decays are spread as in Mamba-2 (Dao and Gu, arXiv 2405.21060): speeds 1 to 16 and steps 0.001 to 0.1,
    so that a state remembers from a few tokens to a thousand.
    """

    def steps(shape: tuple[int, ...]) -> Float32:
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
        return np.asarray(step + np.log(-np.expm1(-step)), np.float32)  # inverse of softplus

    return {
        "conv": lambda shape: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32),
        "decay_log": lambda shape: np.log(rng.uniform(1, 16, shape)).astype(np.float32),
        "decay_bias": steps,
    }
