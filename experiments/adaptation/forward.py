"""Answers from exact state and from reused state, both differentiable in the weights.

The engine writes pages, which no gradient passes. Here the same arithmetic runs on plain arrays: keys and
values of the cached text are computed under its own past, those that survive are rotated to where they
now stand, and what is computed attends them together with the rest. A test holds both to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.adaptation.edits import EditBatch
from jaxkv.errors import ConfigError
from jaxkv.model.attention import MASKED, dense_attention
from jaxkv.model.config import ModelConfig
from jaxkv.model.layers import embed
from jaxkv.model.params import LayerParams, Params
from jaxkv.model.rope import rope_angles, rotate
from jaxkv.model.transformer import _finish_layer, _logits, _project_qkv
from jaxkv.typing import Array

KV = tuple[Array, Array]  # of one layer: keys not rotated, values, f32[B, S, K, H]


def require_plain(config: ModelConfig) -> None:
    """Raises ConfigError unless all layers keep one history: no windows, no recurrent layers."""
    if len(config.groups) != 1:
        raise ConfigError(
            f"the model has {len(config.groups)} groups of layers, expected one: adaptation is built for "
            "plain decoders"
        )


def answers(
    params: Params, batch: EditBatch, *, config: ModelConfig, remat: bool = False
) -> tuple[Array, Array]:
    """Logits of the answers from exact state and from reused state, f32[B, T, V] each.

    Args:
      params: weights; gradients pass through both results.
      batch: edits.
      config: architecture; static.
      remat: compute activations again in the backward pass instead of keeping them; static.
    """
    count, length = batch.new.shape
    cached = jnp.pad(batch.old, ((0, 0), (0, length - batch.old.shape[1])))
    # One pass over both texts: they have one shape.
    x, kept = _dense(params, jnp.concatenate([batch.new, cached]), config, remat)
    exact = _take(x[:count], batch.answer_positions)
    mine = _reused(params, batch, [(k[count:], v[count:]) for k, v in kept], config, remat)
    return _logits(exact, params, config), _logits(_take(mine, batch.answers), params, config)


def _dense(params: Params, tokens: Array, config: ModelConfig, remat: bool) -> tuple[Array, list[KV]]:
    """States f32[B, M, D] of texts from position 0 on, and every layer's keys (not rotated) and values."""
    cos, sin = rope_angles(jnp.arange(tokens.shape[1], dtype=jnp.int32), config.rope, config.max_positions)
    magnitude, scale = config.rope.magnitude, 1.0 / math.sqrt(config.head_dim)

    def block(x: Array, layer: LayerParams) -> tuple[Array, KV]:
        q, k, v = _project_qkv(x, layer, config)
        query = rotate(q * scale, cos[:, None, None], sin[:, None, None], magnitude=magnitude)
        key = rotate(k, cos[:, None], sin[:, None], magnitude=magnitude)
        return _finish_layer(x, dense_attention(query, key, v), layer, config), (k, v)

    step = _maybe_remat(block, remat)
    x, kept = embed(tokens, params.embed), []
    for layer in params.layers:
        x, pair = step(x, layer)
        kept.append(pair)
    return x, kept


def _reused(params: Params, batch: EditBatch, kept: Sequence[KV], config: ModelConfig, remat: bool) -> Array:
    """States f32[B, C, D] of the computed positions, over the KV that survives."""
    count, length = batch.new.shape
    rows = jnp.arange(count)[:, None]
    stands = jnp.arange(length, dtype=jnp.int32)
    # A key that was computed at b and stands at b + delta is R(delta) R(b) k = R(b + delta) k.
    cos, sin = rope_angles(stands, config.rope, config.max_positions)
    query_cos, query_sin = rope_angles(batch.rows, config.rope, config.max_positions)
    magnitude, scale = config.rope.magnitude, 1.0 / math.sqrt(config.head_dim)
    seen = stands <= batch.rows[..., None]  # bool[B, C, M]
    source = jnp.maximum(batch.source, 0)
    tokens = jnp.take_along_axis(batch.new, jnp.minimum(batch.rows, length - 1), axis=1)

    def placed(old: Array, fresh: Array) -> Array:
        survived = jnp.take_along_axis(old, source[..., None, None], axis=1)
        return survived.at[rows, batch.rows].set(fresh, mode="drop")

    def block(x: Array, layer: LayerParams, old: KV) -> Array:
        q, k, v = _project_qkv(x, layer, config)
        keys, values = placed(old[0], k), placed(old[1], v)
        angles = query_cos[:, :, None, None], query_sin[:, :, None, None]
        query = rotate(q * scale, *angles, magnitude=magnitude)
        keys = rotate(keys, cos[:, None], sin[:, None], magnitude=magnitude)
        scores = jnp.einsum("btkgh,bskh->bkgts", query, keys)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        attended = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, axis=-1), values)
        return _finish_layer(x, attended, layer, config)

    step = _maybe_remat(block, remat)
    x = embed(tokens, params.embed)
    for layer, old in zip(params.layers, kept, strict=True):
        x = step(x, layer, old)
    return x


def _take(x: Array, at: Array) -> Array:
    return jnp.take_along_axis(x, at[..., None], axis=1)


def _maybe_remat(block: Callable[..., Any], remat: bool) -> Callable[..., Any]:
    return jax.checkpoint(block) if remat else block
