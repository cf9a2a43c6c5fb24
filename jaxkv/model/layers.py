"""The pieces between attention: norm, projections, gated MLP, embedding. Activations are float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxkv.model.sharding import on_mesh, split_last
from jaxkv.typing import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis in float32 (Zhang and Sennrich, arXiv 1910.07467)."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight


def project(x: Array, weight: Array, *, inputs: int = 1) -> Array:
    """Contracts the last `inputs` axes of `x` with the first ones of `weight`; float32 result.

    The operand is rounded to the weight's dtype and products are accumulated in float32.
    """
    # As one matrix product: with more axes XLA on CPU takes a slower path for a single row. On a mesh axes
    # stay apart: a sharded one that is merged behind another can't stay sharded.
    width = math.prod(weight.shape[:inputs])
    rows = x.reshape(*x.shape[: x.ndim - inputs], width).astype(weight.dtype)
    out = jax.lax.dot_general(
        rows,
        weight.reshape(width, *(weight.shape[inputs:] if on_mesh() else (-1,))),
        (((rows.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(*rows.shape[:-1], *weight.shape[inputs:])


def gated_mlp(x: Array, gate_up: Array, down: Array, activation: str = "silu") -> Array:
    """(activation(x·gate) * (x·up))·down, with gate_up [D, 2, F] and down [F, D].

    SwiGLU with "silu", GeGLU in its tanh form with "gelu_tanh" (Shazeer, arXiv 2002.05202).
    """
    hidden = project(x, gate_up)
    gate = hidden[..., 0, :]
    gate = jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return project(gate * hidden[..., 1, :], down)


def embed(tokens: Array, table: Array, scale: float = 1.0) -> Array:
    """Rows of the embedding table [V, D] times `scale`, float32; `tokens` are validated on the host."""
    rows = table[tokens].astype(jnp.float32)
    return rows if scale == 1.0 else rows * scale


def unembed(x: Array, table: Array) -> Array:
    """Logits f32[..., V] of hidden states x [..., D] with a table [V, D]."""
    logits = jax.lax.dot_general(
        x.astype(table.dtype),
        table,
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return split_last(logits)  # they are wanted whole: without this the table would be gathered, not they
