"""The decoder as pure functions: a step over paged KV state, and the dense oracle without any."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.cache.pages import KVPages, write_slots
from jaxkv.cache.table import StepInput
from jaxkv.errors import ConfigError
from jaxkv.model.attention import append_of, dense_attention, paged_attention, visibility
from jaxkv.model.backend import AUTO, Backend
from jaxkv.model.config import ModelConfig
from jaxkv.model.layers import embed, gated_mlp, project, rms_norm, unembed
from jaxkv.model.params import LayerParams, Params
from jaxkv.model.rope import rope_angles, rotate
from jaxkv.typing import Array

LOGITS = ("last", "all")


@struct.dataclass(kw_only=True)
class StepOutput:
    pages: tuple[KVPages, ...]
    logits: Array  # f32[B, V] of the last valid token, or f32[B, T, V]
    attention: Array | None = None  # f32[L, B, T, N·H], only when captured


def _project_qkv(x: Array, layer: LayerParams, config: ModelConfig) -> tuple[Array, Array, Array]:
    """Returns unrotated q [..., K, G, H] and k [..., K, H], and v [..., K, H]."""
    qkv = project(rms_norm(x, layer.attn_norm, config.norm_eps), layer.qkv)
    group = config.group_size
    return qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]


def _finish_layer(x: Array, attended: Array, layer: LayerParams, config: ModelConfig) -> Array:
    heads = attended.reshape(*attended.shape[:-3], config.num_heads, config.head_dim)
    x = x + project(heads, layer.out, inputs=2)
    return x + gated_mlp(rms_norm(x, layer.mlp_norm, config.norm_eps), layer.gate_up, layer.down)


def _logits(x: Array, params: Params, config: ModelConfig) -> Array:
    table = params.embed if params.unembed is None else params.unembed
    return unembed(rms_norm(x, params.final_norm, config.norm_eps), table)


def forward_step(
    params: Params,
    pages: tuple[KVPages, ...],
    step: StepInput,
    *,
    config: ModelConfig,
    logits: str = "last",
    capture: bool = False,
    backend: Backend = AUTO,
) -> StepOutput:
    """One step: writes the KV of its tokens, then attends, layer by layer.

    Positions are arbitrary, so the same function prefills, decodes, appends and repairs. Every key of
    the step is written before attention reads, so tokens computed together see each other.

    Args:
      params: weights.
      pages: one `KVPages` per layer group; donate them, or the write copies the pool.
      step: tokens, positions, and per group slots and table.
      config: architecture; static.
      logits: "last" for f32[B, V] at each row's last valid token, "all" for f32[B, T, V]; static.
      capture: also return every layer's attention output; static.
      backend: XLA or kernels; static.
    """
    if logits not in LOGITS:
        raise ConfigError(f"logits is '{logits}', expected 'last' or 'all'")
    positions, rope = step.positions, config.rope
    cos, sin = rope_angles(positions, rope, config.max_positions)
    key_angles = cos[:, :, None], sin[:, :, None]
    pages_out = list(pages)
    query_angles, seen = [], []
    for g, inputs in enumerate(step.groups):
        # A key born at b that stands at b + delta: (R(i) q)·(R(b+delta) k) = (R(i-delta) q)·(R(b) k).
        if inputs.table.deltas.shape[1] == 1:
            angles = cos[:, None], sin[:, None]
        else:
            # Keys were born below max_positions, so i - delta stays below twice that.
            shifted = positions[:, None, :] - inputs.table.deltas[:, :, None]
            angles = rope_angles(shifted, rope, 2 * config.max_positions)
        query_angles.append(tuple(a[..., None, None, :] for a in angles))
        seen.append(visibility(inputs.table, positions, step.lengths, pages[g].page_size))
    where = {
        layer: (g, index) for g, group in enumerate(config.groups) for index, layer in enumerate(group.layers)
    }
    scale = 1.0 / math.sqrt(config.head_dim)
    append = append_of(backend)
    captured = []
    x = embed(step.tokens, params.embed)
    for number, layer in enumerate(params.layers):
        g, index = where[number]
        inputs = step.groups[g]
        with jax.named_scope(f"layer_{number}"):
            q, k, v = _project_qkv(x, layer, config)
            k = rotate(k, *key_angles, magnitude=rope.magnitude)
            pages_out[g] = write_slots(pages_out[g], index, inputs.slots, k, v, append)
            q = rotate(q[:, None] * scale, *query_angles[g], magnitude=rope.magnitude)
            attended = paged_attention(
                q, pages_out[g], inputs.table, seen[g], positions, layer=index, backend=backend
            )
            if capture:
                captured.append(attended.reshape(*positions.shape, -1))
            x = _finish_layer(x, attended, layer, config)
    if logits == "last":
        x = jnp.take_along_axis(x, jnp.maximum(step.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return StepOutput(
        pages=tuple(pages_out),
        logits=_logits(x, params, config),
        attention=jnp.stack(captured) if capture else None,
    )


def forward_dense(params: Params, tokens: Array, *, config: ModelConfig) -> Array:
    """Logits f32[B, T, V] of i32[B, T] tokens at positions 0..T-1: no cache, no pages, the oracle."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    cos, sin = rope_angles(positions, config.rope, config.max_positions)
    magnitude, scale = config.rope.magnitude, 1.0 / math.sqrt(config.head_dim)
    x = embed(tokens, params.embed)
    for layer in params.layers:
        q, k, v = _project_qkv(x, layer, config)
        q = rotate(q * scale, cos[:, None, None], sin[:, None, None], magnitude=magnitude)
        k = rotate(k, cos[:, None], sin[:, None], magnitude=magnitude)
        x = _finish_layer(x, dense_attention(q, k, v), layer, config)
    return _logits(x, params, config)
