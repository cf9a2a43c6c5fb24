"""Answers from exact state and from reused state, both differentiable in the weights.

The engine writes pages, which no gradient passes. Here the same arithmetic runs on plain arrays: keys and
values of the cached text are computed under its own past, those that survive are rotated to where they
now stand, and what is computed attends them together with the rest. A test holds both to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.adaptation.edits import EditBatch
from jaxkv.errors import ConfigError
from jaxkv.model.attention import MASKED, dense_attention
from jaxkv.model.config import LayerGroup, ModelConfig
from jaxkv.model.layers import embed
from jaxkv.model.params import LayerParams, Params
from jaxkv.model.rope import rope_angles, rotate
from jaxkv.model.transformer import finish_layer, gate_attention, logits_of, project_qkv
from jaxkv.typing import Array

KV = tuple[Array, Array]  # of one layer: keys not rotated, values, f32[B, S, K, H]


def require_attention(config: ModelConfig) -> None:
    """Raises ConfigError where a layer is recurrent: its state holds no tokens that could be moved."""
    if config.recurrent is not None:
        raise ConfigError("layer_types has recurrent layers, expected a model that only attends")


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
    return logits_of(exact, params, config), logits_of(_take(mine, batch.answers), params, config)


def _dense(params: Params, tokens: Array, config: ModelConfig, remat: bool) -> tuple[Array, list[KV]]:
    """States f32[B, M, D] of texts from position 0 on, and every layer's keys (not rotated) and values."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def block(x: Array, layer: LayerParams, group: LayerGroup) -> tuple[Array, KV]:
        cos, sin = rope_angles(positions, group.rope, config.max_positions)
        magnitude = group.rope.magnitude
        q, k, v = project_qkv(x, layer, config)
        q = rotate(q * config.attention_scale, cos[:, None, None], sin[:, None, None], magnitude=magnitude)
        key = rotate(k, cos[:, None], sin[:, None], magnitude=magnitude)
        attended = gate_attention(dense_attention(q, key, v, group.window), x, layer, config)
        return finish_layer(x, attended, layer, config), (k, v)

    x, kept = embed(tokens, params.embed, config.embed_scale), []
    for number, layer in enumerate(params.layers):
        x, pair = _maybe_remat(block, remat)(x, layer, config.groups[config.group_of(number)[0]])
        kept.append(pair)
    return x, kept


def _reused(params: Params, batch: EditBatch, kept: Sequence[KV], config: ModelConfig, remat: bool) -> Array:
    """States f32[B, C, D] of the computed positions, over the KV that survives."""
    count, length = batch.new.shape
    rows = jnp.arange(count)[:, None]
    stands = jnp.arange(length, dtype=jnp.int32)
    distance = batch.rows[..., None] - stands  # i32[B, C, M]
    source = jnp.maximum(batch.source, 0)
    tokens = jnp.take_along_axis(batch.new, jnp.minimum(batch.rows, length - 1), axis=1)

    def placed(old: Array, fresh: Array) -> Array:
        survived = jnp.take_along_axis(old, source[..., None, None], axis=1)
        return survived.at[rows, batch.rows].set(fresh, mode="drop")

    def block(x: Array, layer: LayerParams, old: KV, group: LayerGroup) -> Array:
        # A key that was computed at b and stands at b + delta is R(delta) R(b) k = R(b + delta) k.
        cos, sin = rope_angles(stands, group.rope, config.max_positions)
        mine = [a[:, :, None, None] for a in rope_angles(batch.rows, group.rope, config.max_positions)]
        q, k, v = project_qkv(x, layer, config)
        keys, values = placed(old[0], k), placed(old[1], v)
        q = rotate(q * config.attention_scale, *mine, magnitude=group.rope.magnitude)
        keys = rotate(keys, cos[:, None], sin[:, None], magnitude=group.rope.magnitude)
        seen = (distance >= 0) & (distance < (group.window or length))
        scores = jnp.where(seen[:, None, None], jnp.einsum("btkgh,bskh->bkgts", q, keys), MASKED)
        attended = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, axis=-1), values)
        return finish_layer(x, gate_attention(attended, x, layer, config), layer, config)

    x = embed(tokens, params.embed, config.embed_scale)
    for number, (layer, old) in enumerate(zip(params.layers, kept, strict=True)):
        x = _maybe_remat(block, remat)(x, layer, old, config.groups[config.group_of(number)[0]])
    return x


def _take(x: Array, at: Array) -> Array:
    return jnp.take_along_axis(x, at[..., None], axis=1)


def _maybe_remat(block: Callable[..., Any], remat: bool) -> Callable[..., Any]:
    """`block` as it is, or computing its activations again in the backward pass; the group is static."""
    if not remat:
        return block

    def again(*arrays_and_group: Any) -> Any:
        *arrays, group = arrays_and_group
        return jax.checkpoint(functools.partial(block, group=group))(*arrays)

    return again
