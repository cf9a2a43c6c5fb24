"""Gated DeltaNet in float64 NumPy, one token after the other, from the paper (arXiv 2412.06464).

The judge of the chunked form, of states and of snapshots. It imports nothing from jaxkv.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def delta_loop(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """q, k [T, Hk, Dk], v [T, Hv, Dv], log_decay, beta [T, Hv], state [Hv, Dk, Dv]: outputs and state."""
    state = np.array(state, np.float64)
    heads, per = v.shape[1], v.shape[1] // k.shape[1]
    out = np.zeros(v.shape)
    for t in range(len(v)):
        for h in range(heads):
            key, query = k[t, h // per], q[t, h // per]
            state[h] *= np.exp(log_decay[t, h])
            error = v[t, h] - key @ state[h]
            state[h] += beta[t, h] * np.outer(key, error)
            out[t, h] = query @ state[h]
    return out, state


@dataclasses.dataclass
class Mixer:
    """A recurrent layer's weights in float64, [in, out]."""

    shape: Any  # num_key_heads, num_value_heads, key_dim, value_dim, conv_width
    qkv: Array  # [D, C]
    gate: Array  # [D, Hv, Dv]
    beta: Array  # [D, Hv]
    decay: Array  # [D, Hv]
    conv: Array  # [C, k]
    decay_log: Array
    decay_bias: Array
    out_norm: Array
    out: Array  # [Hv, Dv, D]
    eps: float

    def start(self) -> tuple[Array, Array]:
        """Inputs of the convolution before the first token [k-1, C], and the state."""
        s = self.shape
        channels = self.qkv.shape[1]
        return np.zeros((s.conv_width - 1, channels)), np.zeros((s.num_value_heads, s.key_dim, s.value_dim))

    def run(self, h: Array, before: Array, state: Array) -> tuple[Array, Array, Array]:
        """h [T, D] normed inputs: outputs [T, D], and what `start` gives behind the last token."""
        s = self.shape
        inputs = np.concatenate([before, h @ self.qkv])
        mixed = np.zeros((len(h), inputs.shape[1]))
        for t in range(len(h)):
            for j in range(s.conv_width):
                mixed[t] += inputs[t + j] * self.conv[:, j]
        mixed = mixed * sigmoid(mixed)
        keys = s.num_key_heads * s.key_dim
        q = mixed[:, :keys].reshape(-1, s.num_key_heads, s.key_dim)
        k = mixed[:, keys : 2 * keys].reshape(-1, s.num_key_heads, s.key_dim)
        v = mixed[:, 2 * keys :].reshape(-1, s.num_value_heads, s.value_dim)
        q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) / np.sqrt(s.key_dim)
        k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
        step = np.log1p(np.exp(h @ self.decay + self.decay_bias))
        out, state = delta_loop(q, k, v, -np.exp(self.decay_log) * step, sigmoid(h @ self.beta), state)
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + self.eps) * self.out_norm
        gate = np.einsum("td,dhv->thv", h, self.gate)
        mixed_out = np.einsum("thv,hvd->td", out * gate * sigmoid(gate), self.out)
        return mixed_out, inputs[len(h) :], state


def mixer_of(layer: Any, shape: Any, eps: float) -> Mixer:
    """From jaxkv's arrays of one recurrent layer."""

    def f64(x: Any) -> Array:
        return np.asarray(x).astype(np.float64)

    return Mixer(
        shape=shape,
        qkv=f64(layer.qkv).T,
        gate=np.moveaxis(f64(layer.gate), -1, 0),
        beta=f64(layer.rates)[0].T,
        decay=f64(layer.rates)[1].T,
        conv=f64(layer.conv),
        decay_log=f64(layer.decay_log),
        decay_bias=f64(layer.decay_bias),
        out_norm=f64(layer.out_norm),
        out=np.moveaxis(f64(layer.out), 0, -1),
        eps=eps,
    )


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turn(x: Array, positions: Array, rope: Any) -> Array:
    """R(position) of the first rotary_dim features of x [n, heads, H]; the rest as it is."""
    half = rope.rotary_dim // 2
    angle = positions[:, None, None] * rope.theta ** (-np.arange(half) / half)
    c, s = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], -1)


def hybrid_run(
    params: Any,
    config: Any,
    tokens: Any,
    positions: Any,
    cached: list[tuple[Array, Array, Array]] | None = None,
    states: list[tuple[Array, Array]] | None = None,
    written: Any = None,
    inputs: list[Array] | None = None,
    store: Any = None,
) -> tuple[Array, list[tuple[Array, Array, Array]], list[tuple[Array, Array]]]:
    """Runs tokens at ascending positions, in their order for recurrent layers, in float64.

    `cached`: for each layer that attends, where its tokens stand i[n], keys before rotation, and values.
    `states`: for each recurrent layer the last convolution inputs and the state. `written`: bool, tokens
    whose keys and values are added; of the others others are cached. `inputs`: a list, to which recurrent
    layers add what they are given. Returns logits [t, V] and both.
    """

    def f64(x: Any) -> Array:
        return np.asarray(x).astype(np.float64)

    c, positions = config, np.asarray(positions, np.float64)
    written = np.ones(len(positions), bool) if written is None else written
    kv: list[tuple[Array, Array, Array]] = []
    after: list[tuple[Array, Array]] = []
    x = f64(params.embed)[np.asarray(tokens)]
    for kind, layer in zip(c.types, params.layers, strict=True):
        h = norm(x, f64(layer.attn_norm), c.norm_eps)
        if kind == "recurrent":
            mixer = mixer_of(layer, c.recurrent, c.norm_eps)
            start = mixer.start() if states is None else states[len(after)]
            mixed, before, state = mixer.run(h, *start)
            if inputs is not None:
                inputs.append(h)
            after.append((before, state))
        else:
            group, nothing = c.num_heads // c.num_kv_heads, np.zeros((0, c.num_kv_heads, c.head_dim))
            qkv = np.einsum("td,kghd->tkgh", h, f64(layer.qkv))
            q = norm(qkv[:, :, :group], f64(layer.q_norm), c.norm_eps).reshape(len(x), c.num_heads, -1)
            k = norm(qkv[:, :, group], f64(layer.k_norm), c.norm_eps)
            v = qkv[:, :, group + 1]
            if store is not None:
                k, v = turn(store(turn(k, positions, c.rope)), -positions, c.rope), store(v)
            at, keys, values = (np.zeros(0), nothing, nothing) if cached is None else cached[len(kv)]
            at = np.concatenate([at, positions[written]])
            keys = np.concatenate([keys, k[written]])
            values = np.concatenate([values, v[written]])
            assert len(np.unique(at)) == len(at), "a position has two keys"
            turned = np.repeat(turn(keys, at, c.rope), group, 1)
            scores = np.einsum("tnh,snh->nts", turn(q, positions, c.rope), turned) / np.sqrt(c.head_dim)
            scores = np.where(at <= positions[:, None], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            heads = np.einsum("nts,snh->tnh", weights, np.repeat(values, group, 1))
            heads *= sigmoid(np.einsum("td,nhd->tnh", h, f64(layer.attn_gate)))
            mixed = np.einsum("tnh,dnh->td", heads, f64(layer.out))
            kv.append((at, keys, values))
        x = x + mixed
        h = norm(x, f64(layer.mlp_norm), c.norm_eps)
        gate_up = np.einsum("td,gfd->tgf", h, f64(layer.gate_up))
        x = x + (gate_up[:, 0] * sigmoid(gate_up[:, 0]) * gate_up[:, 1]) @ f64(layer.down).T
    table = params.embed if params.unembed is None else params.unembed
    return norm(x, f64(params.final_norm), c.norm_eps) @ f64(table).T, kv, after


def hybrid_logits(params: Any, config: Any, tokens: Any) -> tuple[Array, list[tuple[Array, Array]]]:
    """float64 logits [n, V] of a whole text, and for each recurrent layer what it keeps of it."""
    logits, _, states = hybrid_run(params, config, tokens, np.arange(len(tokens)))
    return logits, states


def mixer_inputs(model: Any, tokens: Any, number: int) -> Array:
    """Normed inputs [n, D] of a recurrent layer, counted among its like, for a whole text."""
    inputs: list[Array] = []
    hybrid_run(model.params, model.config, tokens, np.arange(len(tokens)), inputs=inputs)
    return inputs[number]
