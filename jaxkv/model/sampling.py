"""Choosing the next token, inside jit: greedy, temperature, top-k, top-p, seeded per row and step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.typing import Array


@struct.dataclass(kw_only=True)
class SamplingInput:
    """Per-row sampling parameters. Temperature 0 is greedy."""

    temperature: Array  # f32[B]
    top_k: Array  # i32[B], 0 = off
    top_p: Array  # f32[B], 1 = off
    seed: Array  # u32[B]


def sample(logits: Array, params: SamplingInput, positions: Array) -> Array:
    """Returns i32[B] tokens from f32[B, V] logits.

    The randomness of a row depends on its seed and position only, not on its batch: the same request
    gives the same text whatever it is served with. Top-k is applied first, then top-p over what is
    left (Holtzman et al., arXiv 1904.09751); the most likely token
    always stays, and so do tokens that tie with the last one kept.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        vocab = logits.shape[-1]
        scaled = logits / jnp.maximum(params.temperature, 1e-6)[:, None]
        ordered = -jnp.sort(-scaled, axis=-1)
        rank = jnp.arange(vocab)
        in_k = rank < jnp.where(params.top_k > 0, params.top_k, vocab)[:, None]
        probs = jax.nn.softmax(jnp.where(in_k, ordered, -jnp.inf), axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        in_p = (before < params.top_p[:, None]) | (params.top_p >= 1)[:, None]
        kept = (in_k & in_p).at[:, 0].set(True)
        floor = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        masked = jnp.where(scaled >= floor, scaled, -jnp.inf)
        keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(params.seed, positions)
        drawn = jax.vmap(jax.random.categorical)(keys, masked).astype(jnp.int32)
        return jnp.where(params.temperature > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(params.temperature > 0), draw, lambda: greedy)
