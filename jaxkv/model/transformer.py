"""The decoder as pure functions: a step over paged KV state, and the dense oracle without any."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.cache.pages import KVPages, as_stored, write_slots
from jaxkv.cache.states import Pages, States, kv_groups, read_states, write_states
from jaxkv.cache.table import GroupInput, StepInput
from jaxkv.errors import ConfigError
from jaxkv.model.attention import Visibility, append_of, dense_attention, paged_attention, visibility
from jaxkv.model.backend import AUTO, Backend
from jaxkv.model.config import ModelConfig
from jaxkv.model.contiguous import KVCopy, LayerCopy, copied_attention, put_written
from jaxkv.model.deltanet import gated_delta_net
from jaxkv.model.layers import embed, gated_mlp, project, rms_norm, unembed
from jaxkv.model.params import LayerParams, Params
from jaxkv.model.recurrent_params import RecurrentParams
from jaxkv.model.rope import rope_angles, rotate
from jaxkv.typing import Array
from pallas_kernels.dispatch import platform

LOGITS = ("last", "all")


@struct.dataclass(kw_only=True)
class StepOutput:
    pages: Pages
    logits: Array  # f32[B, V] of the last valid token, or f32[B, T, V]
    attention: Array | None = None  # f32[L, B, T, N·H] of the layers that attend, only when captured
    copies: tuple[KVCopy, ...] | None = None  # as given, with the step's tokens


def project_qkv(x: Array, layer: LayerParams, config: ModelConfig) -> tuple[Array, Array, Array]:
    """Returns unrotated q [..., K, G, H] and k [..., K, H], and v [..., K, H]."""
    qkv = project(rms_norm(x, layer.attn_norm, config.norm_eps), layer.qkv)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    group = config.group_size
    q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
    return q, k, v


def finish_layer(x: Array, attended: Array, layer: LayerParams, config: ModelConfig) -> Array:
    """A layer behind its attention, whose output is [..., K, G, H]: projection and MLP, f32[..., D]."""
    heads = attended.reshape(*attended.shape[:-3], config.num_heads, config.head_dim)
    added = project(heads, layer.out, inputs=2)
    if layer.post_attn_norm is not None:
        added = rms_norm(added, layer.post_attn_norm, config.norm_eps)
    x = x + added
    added = rms_norm(x, layer.mlp_norm, config.norm_eps)
    added = gated_mlp(added, layer.gate_up, layer.down, config.activation)
    if layer.post_mlp_norm is not None:
        added = rms_norm(added, layer.post_mlp_norm, config.norm_eps)
    return x + added


def gate_attention(attended: Array, x: Array, layer: LayerParams, config: ModelConfig) -> Array:
    """Attention's output [..., K, G, H] times a sigmoid of the layer's input, where there is a gate."""
    if layer.attn_gate is None:
        return attended
    gate = project(rms_norm(x, layer.attn_norm, config.norm_eps), layer.attn_gate)
    return attended * jax.nn.sigmoid(gate).reshape(attended.shape)


def _recurrent_layer(
    x: Array, layer: RecurrentParams, states: States, lengths: Array, config: ModelConfig
) -> tuple[Array, States]:
    """A whole layer: what comes out, and what is kept behind the last valid token."""
    conv, state, operator = states
    h = rms_norm(x, layer.attn_norm, config.norm_eps)
    mixed, *states_out = gated_delta_net(h, layer, conv, state, lengths, config=config, operator=operator)
    x = x + mixed
    h = rms_norm(x, layer.mlp_norm, config.norm_eps)
    return x + gated_mlp(h, layer.gate_up, layer.down, config.activation), States(*states_out)


class _View(NamedTuple):
    """What the layers of one group have in common in a step."""

    inputs: GroupInput
    positions: Array  # i32[B, T]
    key_angles: tuple[Array, ...]  # cosine and sine
    query_angles: tuple[Array, ...]
    seen: Visibility | Array  # of the pages, or where the slots of the copy stand
    at: Array | None  # i32[B], with a copy


@functools.partial(jax.jit, static_argnames=("config", "group", "backend", "on"))
def _attention_layer(
    x: Array,
    layer: LayerParams,
    pages: KVPages,
    index: int,
    view: _View,
    copy: LayerCopy | None,
    *,
    config: ModelConfig,
    group: int,
    backend: Backend,
    on: str,
) -> tuple[Array, KVPages, LayerCopy | None, Array]:
    """A whole layer, traced once for all layers of a group: most of a warm start was tracing them one by one.

    `on`, the platform, only keeps what was traced for one from being used for another.
    """
    del on
    of = config.groups[group]
    inputs, seen = view.inputs, view.seen
    q, k, v = project_qkv(x, layer, config)
    k = rotate(k, *view.key_angles, magnitude=of.rope.magnitude)
    pages = write_slots(pages, index, inputs.slots, k, v, append_of(backend))
    q = rotate(q[:, None] * config.attention_scale, *view.query_angles, magnitude=of.rope.magnitude)
    if isinstance(seen, Visibility):
        attended = paged_attention(
            q, pages, inputs.table, seen, view.positions, layer=index, window=of.window, backend=backend
        )
    else:
        assert copy is not None
        assert view.at is not None
        copy = put_written(copy, view.at, *as_stored(pages, k[:, 0], v[:, 0]))
        attended = copied_attention(q, copy, seen, inputs.table, view.positions[:, 0], window=of.window)
    gated = gate_attention(attended, x, layer, config)
    return finish_layer(x, gated, layer, config), pages, copy, attended


def logits_of(x: Array, params: Params, config: ModelConfig) -> Array:
    """Logits f32[..., V] of the states f32[..., D] behind the last layer."""
    table = params.embed if params.unembed is None else params.unembed
    return unembed(rms_norm(x, params.final_norm, config.norm_eps), table)


def forward_step(
    params: Params,
    pages: Pages,
    step: StepInput,
    *,
    config: ModelConfig,
    logits: str = "last",
    capture: bool = False,
    backend: Backend = AUTO,
    copies: tuple[KVCopy, ...] | None = None,
    at: tuple[Array, ...] = (),
) -> StepOutput:
    """One step: writes the KV of its tokens, then attends, layer by layer.

    Positions are arbitrary, so the same function prefills, decodes, appends and repairs. Every key of
    the step is written before attention reads, so tokens computed together see each other. Recurrent
    layers know no positions: they take the tokens in their order, behind the state that is read.

    Args:
      params: weights.
      pages: one `KVPages` per layer group, then a `StatePool` if there are recurrent layers; donate them,
        or the write copies the pool.
      step: tokens, positions, and per group slots and table.
      config: architecture; static.
      logits: "last" for f32[B, V] at each row's last valid token, "all" for f32[B, T, V]; static.
      capture: also return every layer's attention output; static.
      backend: XLA or kernels; static.
      copies: per group, attended instead of the pages; for one token a row.
      at: per group i32[B], where the copy takes each row's token.
    """
    if logits not in LOGITS:
        raise ConfigError(f"logits is '{logits}', expected 'last' or 'all'")
    positions = step.positions
    pages_out = list(pages)
    views = []
    for g, (group, inputs, held) in enumerate(zip(config.groups, step.groups, kv_groups(pages), strict=True)):
        cos, sin = rope_angles(positions, group.rope, config.max_positions)
        # A key born at b that stands at b + delta: (R(i) q)·(R(b+delta) k) = (R(i-delta) q)·(R(b) k).
        if inputs.table.deltas.shape[1] == 1:
            angles = cos[:, None], sin[:, None]
        else:
            # Keys were born below max_positions, so i - delta stays below twice that.
            shifted = positions[:, None, :] - inputs.table.deltas[:, :, None]
            angles = rope_angles(shifted, group.rope, 2 * config.max_positions)
        views.append(
            _View(
                inputs=inputs,
                positions=positions,
                key_angles=(cos[:, :, None], sin[:, :, None]),
                query_angles=tuple(a[..., None, None, :] for a in angles),
                seen=visibility(inputs.table, positions, step.lengths, held.page_size, group.window)
                if copies is None
                else copies[g].where,
                at=None if copies is None else at[g],
            )
        )
    captured = []
    copied = None if copies is None else [list(copy.layers) for copy in copies]
    x = embed(step.tokens, params.embed, config.embed_scale)
    recurrent = iter(range(len(config.recurrent_layers)))
    for number, layer in enumerate(params.layers):
        if isinstance(layer, RecurrentParams):
            with jax.named_scope(f"layer_{number}"):
                index = next(recurrent)
                assert step.states is not None
                states = read_states(pages_out[-1], index, step.states.read, step.states.fresh)
                x, states = _recurrent_layer(x, layer, states, step.lengths, config)
                pages_out[-1] = write_states(pages_out[-1], index, step.states.write, states)
            continue
        g, index = config.group_of(number)
        with jax.named_scope(f"layer_{number}"):
            x, pages_out[g], copy, attended = _attention_layer(
                x,
                layer,
                pages_out[g],
                index,
                views[g],
                None if copied is None else copied[g][index],
                config=config,
                group=g,
                backend=backend,
                on=platform(),
            )
        if copied is not None:
            copied[g][index] = copy
        if capture:
            captured.append(attended.reshape(*positions.shape, -1))
    if logits == "last":
        x = jnp.take_along_axis(x, jnp.maximum(step.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return StepOutput(
        pages=tuple(pages_out),
        logits=logits_of(x, params, config),
        attention=jnp.stack(captured) if capture else None,
        copies=None
        if copies is None or copied is None
        else tuple(c.replace(layers=tuple(new)) for c, new in zip(copies, copied, strict=True)),  # type: ignore[attr-defined]
    )


def _start(batch: int, config: ModelConfig) -> States:
    """What a layer keeps before the first token."""
    shape = config.recurrent
    assert shape is not None
    return States(
        jnp.zeros((batch, shape.channels, shape.conv_width - 1), jnp.float32),
        jnp.zeros((batch, shape.num_value_heads, shape.key_dim, shape.value_dim), jnp.float32),
    )


def forward_dense(params: Params, tokens: Array, *, config: ModelConfig) -> Array:
    """Logits f32[B, T, V] of i32[B, T] tokens at positions 0..T-1: no cache, no pages, the oracle."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    angles = [rope_angles(positions, group.rope, config.max_positions) for group in config.groups]
    x = embed(tokens, params.embed, config.embed_scale)
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    for number, layer in enumerate(params.layers):
        if isinstance(layer, RecurrentParams):
            x, _ = _recurrent_layer(x, layer, _start(len(x), config), lengths, config)
            continue
        g, _ = config.group_of(number)
        group, (cos, sin) = config.groups[g], angles[g]
        q, k, v = project_qkv(x, layer, config)
        q = q * config.attention_scale
        q = rotate(q, cos[:, None, None], sin[:, None, None], magnitude=group.rope.magnitude)
        k = rotate(k, cos[:, None], sin[:, None], magnitude=group.rope.magnitude)
        attended = gate_attention(dense_attention(q, k, v, group.window), x, layer, config)
        x = finish_layer(x, attended, layer, config)
    return logits_of(x, params, config)
