"""Gated DeltaNet: a layer that keeps a matrix a head instead of keys and values.

For each value head, with key k (unit length), value v, write strength beta and decay exp(g) of a token:

    S <- exp(g) S;   S <- S + k (beta (v - S'k))';   out = S'q / sqrt(Dk)

(Yang et al., arXiv 2412.06464). Many tokens at once go through the chunked form of section 3.3 there: the
corrections of a chunk solve one unit lower triangular system each, and everything else is matrix
products. A token with beta = 0 and g = 0 changes no bit of S: that is how padding is left out.

Everything is float32, products included: a matrix that thousands of tokens were added to forgives nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.model.config import ModelConfig, RecurrentConfig
from jaxkv.model.layers import project
from jaxkv.model.recurrent_params import RecurrentParams
from jaxkv.typing import Array

CHUNK = 64  # tokens that one triangular system couples
_NORM_EPS = 1e-6  # of the unit length of queries and keys
_PRECISE = jax.lax.Precision.HIGHEST  # accelerators would round float32 operands by default


def causal_conv(x: Array, before: Array, weight: Array, lengths: Array) -> tuple[Array, Array]:
    """Depthwise convolution over a token and those before it.

    Args:
      x: f32[B, T, C], inputs of the step.
      before: f32[B, C, k-1], the inputs before it, oldest first; zeros at the start of a sequence.
      weight: f32[C, k], the last column for the token itself.
      lengths: i32[B], valid tokens of each row.

    Returns:
      f32[B, T, C], and the last k-1 valid inputs, f32[B, C, k-1].
    """
    width, length = weight.shape[1], x.shape[1]
    joined = jnp.concatenate([before.transpose(0, 2, 1), x], axis=1)
    out = sum(joined[:, j : j + length] * weight[:, j] for j in range(width))
    last = lengths[:, None] + jnp.arange(width - 1)
    after = jnp.take_along_axis(joined, last[..., None], axis=1).transpose(0, 2, 1)
    return jnp.asarray(out), after


def unit(x: Array) -> Array:
    """`x` scaled to length 1 over its last axis; a zero stays a zero."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


def delta_step(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """One token. Shapes as in `delta_chunks`, without T."""
    repeat = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x, repeat, axis=1) for x in (q, k))
    state = state * jnp.exp(log_decay)[..., None, None]
    # Sums of products, not matrix products: one row each, and float32 on every platform.
    change = (v - jnp.sum(state * k[..., None], axis=-2)) * beta[..., None]
    state = state + k[..., None] * change[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def delta_chunks(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, *, chunk: int = CHUNK
) -> tuple[Array, Array]:
    """T tokens, `chunk` at a time.

    Args:
      q: f32[B, T, Hk, Dk], unit length times 1/sqrt(Dk).
      k: f32[B, T, Hk, Dk], unit length.
      v: f32[B, T, Hv, Dv].
      log_decay: f32[B, T, Hv], g, at most 0.
      beta: f32[B, T, Hv], 0 to 1; 0, beside a log_decay of 0, for padding.
      state: f32[B, Hv, Dk, Dv], before the first token.
      chunk: tokens coupled by one system; static.

    Returns:
      f32[B, T, Hv, Dv], and the state behind the last token.
    """
    batch, length, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    chunk = min(chunk, length)
    missing = -length % chunk

    def cut(x: Array, groups: int) -> Array:
        """[B, T, groups · r, ...] as [n, B, groups, r, chunk, ...], padded with zeros."""
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, -1, chunk, groups, x.shape[2] // groups, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 4))

    q, k = cut(q, key_heads), cut(k, key_heads)  # r = 1: a key head's value heads share them
    v, log_decay, beta = cut(v, key_heads), cut(log_decay, key_heads), cut(beta, key_heads)
    total = jnp.cumsum(log_decay, axis=-1)  # [n, B, Hk, r, chunk]
    row, column = jnp.arange(chunk)[:, None], jnp.arange(chunk)
    # exp of what is masked could overflow: it is masked before.
    between = jnp.where(row >= column, total[..., :, None] - total[..., None, :], -jnp.inf)
    between = jnp.exp(between)
    products = _matmul(k, k.swapaxes(-1, -2)) * between
    system = jnp.where(row > column, products * beta[..., None], 0.0)
    decayed = jnp.exp(total)[..., None]
    wanted = jnp.concatenate([v, jnp.broadcast_to(k * decayed, (*v.shape[:-1], key_dim))], axis=-1)
    solved = _matmul(unit_lower_inverse(system), wanted * beta[..., None])
    new, read = solved[..., :value_dim], solved[..., value_dim:]
    within = _matmul(q, k.swapaxes(-1, -2)) * between
    queries = q * decayed
    keys = k * jnp.exp(total[..., -1:] - total)[..., None]
    left = jnp.exp(total[..., -1])[..., None, None]

    def fold(state: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        new, read, within, queries, keys, left = part
        change = new - _matmul(read, state)
        out = _matmul(queries, state) + _matmul(within, change)
        return state * left + _matmul(keys.swapaxes(-1, -2), change), out

    state = state.reshape(batch, key_heads, heads // key_heads, key_dim, value_dim)
    state, out = jax.lax.scan(fold, state, (new, read, within, queries, keys, left))
    out = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(batch, -1, heads, value_dim)[:, :length]
    return out, state.reshape(batch, heads, key_dim, value_dim)


def unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)⁻¹ of strictly lower triangular f32[..., n, n]: blocks of twice the size, log2(n) times.

    The inverse of [[A, 0], [C, B]] is [[A⁻¹, 0], [-B⁻¹·C·A⁻¹, B⁻¹]]. As stable as forward substitution, where
    a Neumann series would cancel catastrophically when keys repeat. Not `triangular_solve`: two batched ones
    at once can wait for each other for ever on CPU, since jaxlib's kernel (seen in 0.10.2) blocks the very
    threads on which its parts are to run.
    """
    n = strict.shape[-1]
    size = 1 << (n - 1).bit_length()
    strict = jnp.pad(strict, ((0, 0),) * (strict.ndim - 2) + ((0, size - n),) * 2)
    batch = strict.shape[:-2]
    inverse = jnp.ones((*batch, size, 1, 1), strict.dtype)
    half = 1
    while half < size:
        blocks = strict.reshape(*batch, size // (2 * half), 2 * half, size // (2 * half), 2 * half)
        below = jnp.einsum("...iaib->...iab", blocks)[..., half:, :half]
        above, beneath = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_matmul(_matmul(beneath, below), above)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([above, jnp.zeros_like(above)], -1),
                jnp.concatenate([corner, beneath], -1),
            ],
            -2,
        )
        half *= 2
    return inverse[..., 0, :n, :n]


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=_PRECISE)


def gates(h: Array, layer: RecurrentParams, valid: Array) -> tuple[Array, Array]:
    """log_decay and beta, f32[B, T, Hv], of normed inputs f32[B, T, D]; zeros where not `valid`."""
    raw = project(h, layer.rates)
    beta = jax.nn.sigmoid(raw[..., 0, :])
    log_decay = -jnp.exp(layer.decay_log) * jax.nn.softplus(raw[..., 1, :] + layer.decay_bias)
    return jnp.where(valid, log_decay, 0.0), jnp.where(valid, beta, 0.0)


def gated_norm(x: Array, gate: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of each head's output f32[..., Hv, Dv], then times silu(gate)."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * weight * jax.nn.silu(gate)


def split_heads(mixed: Array, shape: RecurrentConfig) -> tuple[Array, Array, Array]:
    """Queries and keys f32[B, T, Hk, Dk], ready to use, and values f32[B, T, Hv, Dv] of f32[B, T, C]."""
    keys = shape.num_key_heads * shape.key_dim
    heads = (*mixed.shape[:-1], shape.num_key_heads, shape.key_dim)
    q, k = mixed[..., :keys].reshape(heads), mixed[..., keys : 2 * keys].reshape(heads)
    v = mixed[..., 2 * keys :].reshape(*mixed.shape[:-1], shape.num_value_heads, shape.value_dim)
    return unit(q) * shape.key_dim**-0.5, unit(k), v


def gated_delta_net(
    h: Array,
    layer: RecurrentParams,
    conv: Array,
    state: Array,
    lengths: Array,
    *,
    config: ModelConfig,
    operator: Array | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """The mixer of a recurrent layer, for T tokens behind a state.

    Args:
      h: f32[B, T, D], normed inputs.
      layer: weights.
      conv: f32[B, C, k-1], the last inputs of the convolution.
      state: f32[B, Hv, Dk, Dv].
      lengths: i32[B], valid tokens; what is behind them changes no bit of what is returned as state.
      config: architecture; static.
      operator: f32[B, Hv, Dk, Dk], what tokens since some earlier one made of the state then: S there
        became operator · S + what they wrote. None where nobody asks.

    Returns:
      f32[B, T, D], and conv, state and operator behind the last valid token.
    """
    shape = config.recurrent
    assert shape is not None
    valid = (jnp.arange(h.shape[1]) < lengths[:, None])[..., None]
    mixed = project(h, layer.qkv)
    # As a snapshot stores them: what a step passes on within itself is what it would read back.
    mixed = mixed.astype(layer.qkv.dtype).astype(jnp.float32)
    # Padding may hold anything, NaN included: 0 · NaN is NaN.
    mixed, conv = causal_conv(jnp.where(valid, mixed, 0.0), conv, layer.conv, lengths)
    q, k, v = split_heads(jax.nn.silu(mixed), shape)
    log_decay, beta = gates(h, layer, valid)
    if operator is not None:  # columns of a state do not mix: these are written nothing, only transformed
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, shape.key_dim),))
        state = jnp.concatenate([state, operator], axis=-1)
    if h.shape[1] == 1:
        q, k, v, log_decay, beta = (x[:, 0] for x in (q, k, v, log_decay, beta))
        out, state = delta_step(q, k, v, log_decay, beta, state)
        out = out[:, None]
    else:
        out, state = delta_chunks(q, k, v, log_decay, beta, state)
    if operator is not None:
        out, operator = out[..., : shape.value_dim], state[..., shape.value_dim :]
        state = state[..., : shape.value_dim]
    out = gated_norm(out, project(h, layer.gate), layer.out_norm, config.norm_eps)
    return project(out, layer.out, inputs=2), conv, state, operator
