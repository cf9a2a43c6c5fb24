"""An independent float64 decoder in NumPy, written from the papers: the judge of jaxkv.

RMSNorm (arXiv 1910.07467), rotary positions in half-split form (2104.09864), YaRN (2309.00071),
grouped-query attention (2305.13245), SwiGLU and GeGLU (2002.05202), local layers that see a window of
positions. It imports nothing from jaxkv.

`Cached` is the judge of Suffix Cache Reuse: a token's key is kept as it was rotated where its content
was computed, and turned by R(standing position - birth) explicitly whenever it is attended.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

Array = np.ndarray


@dataclasses.dataclass
class Layer:
    attn_norm: Array  # [D]
    q: Array  # [D, N, H]
    k: Array  # [D, K, H]
    v: Array  # [D, K, H]
    out: Array  # [N, H, D]
    mlp_norm: Array  # [D]
    gate: Array  # [D, F]
    up: Array  # [D, F]
    down: Array  # [F, D]
    q_bias: Array | float = 0.0  # [N, H]
    k_bias: Array | float = 0.0  # [K, H]
    v_bias: Array | float = 0.0  # [K, H]
    q_norm: Array | None = None  # [H]
    k_norm: Array | None = None  # [H]
    post_attn_norm: Array | None = None  # [D]
    post_mlp_norm: Array | None = None  # [D]


@dataclasses.dataclass
class Cached:
    """KV of tokens, one row each, in order of where they stand."""

    keys: list[Array]  # per layer f64[n, K, H], rotated at birth
    values: list[Array]  # per layer f64[n, K, H]
    birth: Array  # i64[n], position at which the key was rotated
    stands: Array  # i64[n], position at which it stands now

    def take(self, rows: Array, stands: Array) -> Cached:
        return Cached([k[rows] for k in self.keys], [v[rows] for v in self.values], self.birth[rows], stands)


def frequencies(rope: Any) -> Array:
    """Radians per position, one number at a time, as the papers define them."""
    out = []
    for i in range(rope.rotary_dim // 2):
        w = rope.theta ** (-2.0 * i / rope.rotary_dim)
        if rope.scaling == "linear":
            w /= rope.factor
        elif rope.scaling == "llama3":
            length = 2 * math.pi / w
            longest = rope.original_max_positions / rope.low_freq_factor
            shortest = rope.original_max_positions / rope.high_freq_factor
            if length > longest:
                w /= rope.factor
            elif length > shortest:
                s = (rope.original_max_positions / length - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                w = (1 - s) * w / rope.factor + s * w
        elif rope.scaling == "yarn":

            def dim(turns: float) -> float:
                return (
                    rope.rotary_dim
                    * math.log(rope.original_max_positions / (turns * 2 * math.pi))
                    / (2 * math.log(rope.theta))
                )

            low = max(math.floor(dim(rope.beta_fast)), 0)
            high = min(math.ceil(dim(rope.beta_slow)), rope.rotary_dim - 1)
            ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            w = w * (1 - ramp) + w / rope.factor * ramp
        out.append(w)
    return np.array(out)


def turn(x: Array, positions: Array, rope: Any, magnitude: float = 1.0) -> Array:
    """R(position) x for x [n, heads, H]: features i and i + rotary_dim/2 are a pair."""
    half = rope.rotary_dim // 2
    angle = np.asarray(positions, np.float64)[:, None, None] * frequencies(rope)
    c, s = magnitude * np.cos(angle), magnitude * np.sin(angle)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)


def norm(x: Array, weight: Array | None, eps: float) -> Array:
    """RMSNorm; without a weight, no norm at all."""
    return x if weight is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def gated(x: Array, activation: str) -> Array:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def stored_int8(x: Array) -> Array:
    """What int8 with one factor a row [..., H] keeps of x: whole multiples of its largest / 127."""
    step = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(step > 0, step, 1)) * step


def stored_float8(x: Array) -> Array:
    """What float8 e4m3 with one factor a row [..., H] keeps of x, its largest as 448.

    Three bits behind the leading one; below 2^-6, fixed steps of 2^-9 (arXiv 2209.05433).
    """
    factor = np.abs(x).max(-1, keepdims=True) / 448
    scaled = x / np.where(factor > 0, factor, 1)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6))) - 3)
    return np.rint(scaled / step) * step * factor


@dataclasses.dataclass
class Decoder:
    config: Any
    embed: Array
    layers: list[Layer]
    final_norm: Array
    unembed: Array
    store: Any = None  # what keys and values become when they are stored, [n, K, H] to [n, K, H]

    def empty(self) -> Cached:
        c = self.config
        nothing = [np.zeros((0, c.num_kv_heads, c.head_dim)) for _ in self.layers]
        return Cached(list(nothing), list(nothing), np.zeros(0, int), np.zeros(0, int))

    def logits(self, tokens: Any) -> Array:
        """f64[n, V] of tokens at positions 0..n-1, nothing cached."""
        return self.run(tokens, np.arange(len(tokens)), self.empty())[0]

    def run(
        self,
        tokens: Any,
        positions: Any,
        cached: Cached,
        *,
        rotate: bool = True,
        watch: list[Array] | None = None,
    ) -> tuple[Array, Cached]:
        """Computes tokens at positions over what is cached: logits f64[t, V], and all KV sorted.

        `rotate=False` attends cached keys as they were born, wherever they stand. `watch` gets each
        layer's attention, f64[N, t, n], keys in the order in which they were given.
        """
        c, positions = self.config, np.asarray(positions, np.int64)
        group = c.num_heads // c.num_kv_heads
        stands = np.concatenate([cached.stands, positions])
        birth = np.concatenate([cached.birth, positions])
        order = np.argsort(stands, kind="stable")
        assert len(np.unique(stands)) == len(stands), "a position is computed twice"
        x = self.embed[np.asarray(tokens)] * c.embed_scale
        keys, values = [], []
        for number, layer in enumerate(self.layers):
            local = bool(c.layer_types) and c.layer_types[number] == "local"
            rope = (c.rope_local or c.rope) if local else c.rope
            scale = 1 / math.sqrt(c.head_dim) if c.query_scale is None else c.query_scale
            h = norm(x, layer.attn_norm, c.norm_eps)
            q = norm(np.einsum("td,dnh->tnh", h, layer.q) + layer.q_bias, layer.q_norm, c.norm_eps)
            k = norm(np.einsum("td,dkh->tkh", h, layer.k) + layer.k_bias, layer.k_norm, c.norm_eps)
            q, k = (turn(each, positions, rope, rope.magnitude) for each in (q, k))
            v = np.einsum("td,dkh->tkh", h, layer.v) + layer.v_bias
            if self.store is not None:
                k, v = self.store(k), self.store(v)
            born = np.concatenate([cached.keys[number], k])
            v = np.concatenate([cached.values[number], v])
            moved = turn(born, stands - birth, rope) if rotate else born
            scores = np.einsum("tnh,snh->nts", q, np.repeat(moved, group, 1)) * scale
            seen = stands <= positions[:, None]
            if local:
                seen &= positions[:, None] - stands < c.window
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            if watch is not None:
                watch.append(weights)
            attended = np.einsum("nts,snh->tnh", weights, np.repeat(v, group, 1))
            attended = np.einsum("tnh,nhd->td", attended, layer.out)
            x = x + norm(attended, layer.post_attn_norm, c.norm_eps)
            h = norm(x, layer.mlp_norm, c.norm_eps)
            h = (gated(h @ layer.gate, c.activation) * (h @ layer.up)) @ layer.down
            x = x + norm(h, layer.post_mlp_norm, c.norm_eps)
            keys.append(born[order])
            values.append(v[order])
        logits = norm(x, self.final_norm, c.norm_eps) @ self.unembed.T
        return logits, Cached(keys, values, birth[order], stands[order])

    def greedy(self, tokens: Any, steps: int) -> list[int]:
        out = [int(t) for t in tokens]
        for _ in range(steps):
            out.append(int(self.logits(out)[-1].argmax()))
        return out[len(tokens) :]


def decoder_of(params: Any, config: Any) -> Decoder:
    """From weights [out, in], grouped as [K, G queries | key | value, H, D] and [gate | up, F, D]."""

    def f64(x: Any) -> Array:
        return np.asarray(x).astype(np.float64)

    layers = []
    for p in params.layers:
        qkv = np.moveaxis(f64(p.qkv), -1, 0)
        d, _, g, h = qkv.shape
        more = {
            name: f64(getattr(p, name))
            for name in ("q_norm", "k_norm", "post_attn_norm", "post_mlp_norm")
            if getattr(p, name) is not None
        }
        if p.qkv_bias is not None:
            bias = f64(p.qkv_bias)
            more |= {"q_bias": bias[:, : g - 2].reshape(-1, h)}
            more |= {"k_bias": bias[:, g - 2], "v_bias": bias[:, g - 1]}
        layers.append(
            Layer(
                attn_norm=f64(p.attn_norm),
                q=qkv[:, :, : g - 2].reshape(d, -1, h),
                k=qkv[:, :, g - 2],
                v=qkv[:, :, g - 1],
                out=np.moveaxis(f64(p.out), 0, -1),
                mlp_norm=f64(p.mlp_norm),
                gate=f64(p.gate_up)[0].T,
                up=f64(p.gate_up)[1].T,
                down=f64(p.down).T,
                **more,
            )
        )
    unembed = params.embed if params.unembed is None else params.unembed
    return Decoder(config, f64(params.embed), layers, f64(params.final_norm), f64(unembed))


def decoder_of_hf(tensors: dict[str, Array], config: Any) -> Decoder:
    """From weights under their Hugging Face names, [out, in]. Gemma's norm weights are what 1 is added to."""
    gemma = config.family == "gemma3"

    def get(name: str, *shape: int) -> Array:
        value = tensors[name].astype(np.float64)
        if gemma and name.endswith("norm.weight"):
            return value + 1
        return value.T.reshape(shape) if shape else value

    c, layers = config, []
    d, n, k, h = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim
    for i in range(c.num_layers):
        p = f"model.layers.{i}."
        more = {}
        if f"{p}self_attn.q_proj.bias" in tensors:
            more |= {
                f"{part}_bias": get(f"{p}self_attn.{part}_proj.bias", heads, h)
                for part, heads in (("q", n), ("k", k), ("v", k))
            }
        if f"{p}self_attn.q_norm.weight" in tensors:
            more |= {f"{part}_norm": get(f"{p}self_attn.{part}_norm.weight") for part in ("q", "k")}
        if gemma:
            more["post_attn_norm"] = get(p + "post_attention_layernorm.weight")
            more["post_mlp_norm"] = get(p + "post_feedforward_layernorm.weight")
        layers.append(
            Layer(
                attn_norm=get(p + "input_layernorm.weight"),
                q=get(p + "self_attn.q_proj.weight", d, n, h),
                k=get(p + "self_attn.k_proj.weight", d, k, h),
                v=get(p + "self_attn.v_proj.weight", d, k, h),
                out=get(p + "self_attn.o_proj.weight", n, h, d),
                mlp_norm=get(p + f"{'pre_feedforward' if gemma else 'post_attention'}_layernorm.weight"),
                gate=get(p + "mlp.gate_proj.weight", d, c.mlp_dim),
                up=get(p + "mlp.up_proj.weight", d, c.mlp_dim),
                down=get(p + "mlp.down_proj.weight", c.mlp_dim, d),
                **more,
            )
        )
    embed = get("model.embed_tokens.weight")
    unembed = embed if c.tie_embeddings else get("lm_head.weight")
    return Decoder(c, embed, layers, get("model.norm.weight"), unembed)
