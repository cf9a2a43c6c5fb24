"""The pieces between attention: norm, projections, gated MLP, embedding. Activations are float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxkv.model.sharding import on_mesh, split_last
from jaxkv.typing import Array
from pallas_kernels.dispatch import platform


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis in float32 (Zhang and Sennrich, arXiv 1910.07467)."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight


def project(x: Array, weight: Array, *, inputs: int = 1) -> Array:
    """Contracts the last `inputs` axes of `x` with the last ones of `weight`; float32 result.

    The operand is rounded to the weight's dtype and products are accumulated in float32.
    """
    # As one matrix product: with more axes XLA on CPU takes a slower path for a single row. On a mesh axes
    # stay apart: a sharded one that is merged behind another can't stay sharded.
    outputs = weight.shape[: weight.ndim - inputs]
    width = math.prod(weight.shape[len(outputs) :])
    rows = x.reshape(*x.shape[: x.ndim - inputs], width)
    out = _product(rows, weight.reshape(*(outputs if on_mesh() else (-1,)), width))
    return out.reshape(*rows.shape[:-1], *outputs)


def _product(x: Array, weight: Array) -> Array:
    """f32[..., out] of x [..., in] and a weight [out, in], which on a mesh has its output axes apart."""

    def dot(rows: Array) -> Array:
        return jax.lax.dot_general(
            rows.astype(weight.dtype),
            weight,
            (((rows.ndim - 1,), (weight.ndim - 1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    count = math.prod(x.shape[:-1])
    if count in (1, 2) and platform() == "cpu" and not on_mesh():
        # What XLA is slow at there: one row in bfloat16 takes five times as long as four, and two rows in
        # float32 half as long again as each by itself.
        rows = x.reshape(count, -1)
        if count == 1 and weight.dtype == jnp.bfloat16:
            return dot(jnp.pad(rows, ((0, 3), (0, 0))))[:1].reshape(*x.shape[:-1], -1)
        if count == 2 and weight.dtype == jnp.float32:
            return jnp.concatenate([dot(rows[:1]), dot(rows[1:])]).reshape(*x.shape[:-1], -1)
    return dot(x)


def gated_mlp(x: Array, gate_up: Array, down: Array, activation: str = "silu") -> Array:
    """(activation(x·gate) * (x·up))·down, with gate_up [2, F, D] and down [D, F].

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
    # They are wanted whole: without this the table would be gathered, not they.
    return split_last(_product(x, table))
