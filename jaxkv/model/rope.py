"""Rotary position embedding, half-split convention, with angles exact to float32.

`cos(p·w)` in float32 loses `p·w·2^-24` radians of phase, 0.008 at position 131,072. Here a position is
split into a high and a low part whose cosines and sines come from float64 tables, and the two are
joined by the angle-addition formulas: the phase error is a few 2^-24 at any position.

Source of RoPE: Su et al., arXiv 2104.09864; YaRN: Peng et al., arXiv 2309.00071; llama3 scaling: the
Llama 3.1 model card.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np

from jaxkv.model.config import RopeConfig
from jaxkv.typing import Array, Float32, Float64

_LOW_BITS = 8
_LOW = 1 << _LOW_BITS


def inverse_frequencies(rope: RopeConfig) -> Float64:
    """Returns radians per position, f64[rotary_dim/2], after the scaling that `rope` names."""
    half = rope.rotary_dim // 2
    inv = rope.theta ** (-np.arange(half, dtype=np.float64) / half)
    if rope.scaling == "linear":
        return inv / rope.factor
    if rope.scaling == "llama3":
        wavelength = 2 * math.pi / inv
        turns = rope.original_max_positions / wavelength
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return smooth * inv + (1 - smooth) * inv / rope.factor
    if rope.scaling == "yarn":

        def dim_of(turns: float) -> float:
            positions = rope.original_max_positions / (turns * 2 * math.pi)
            return half * math.log(positions) / math.log(rope.theta)

        low = max(math.floor(dim_of(rope.beta_fast)), 0)
        high = min(math.ceil(dim_of(rope.beta_slow)), rope.rotary_dim - 1)
        ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return (1 - ramp) * inv + ramp * inv / rope.factor
    return inv


@functools.lru_cache(maxsize=64)
def _tables(rope: RopeConfig, high_entries: int) -> tuple[Float32, Float32]:
    """cos | sin of the low part, f32[256, rotary_dim], and of the high part (multiples of 256)."""
    inv = inverse_frequencies(rope)

    def table(positions: Float64) -> Float32:
        angles = positions[:, None] * inv
        return np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)

    return table(np.arange(_LOW, dtype=np.float64)), table(
        (np.arange(high_entries) * _LOW).astype(np.float64)
    )


def rope_angles(positions: Array, rope: RopeConfig, max_position: int) -> tuple[Array, Array]:
    """Returns cos and sin, f32[..., rotary_dim/2], of i32 `positions` in [0, max_position].

    Positions outside that range are the caller's to refuse on the host: padding rows may hold any
    number and get some finite angle. The magnitude factor is not included.
    """
    entries = max(max_position, 1) // _LOW + 1
    low_table, high_table = _tables(rope, entries)
    low = jnp.asarray(low_table)[positions & (_LOW - 1)]
    high = jnp.asarray(high_table)[jnp.clip(positions >> _LOW_BITS, 0, entries - 1)]
    cos_low, sin_low = jnp.split(low, 2, -1)
    cos_high, sin_high = jnp.split(high, 2, -1)
    return cos_high * cos_low - sin_high * sin_low, sin_high * cos_low + cos_high * sin_low


def rotate(x: Array, cos: Array, sin: Array, *, magnitude: float = 1.0) -> Array:
    """Rotates the first `rotary_dim` features of `x` [..., H]; the rest pass through unchanged.

    Args:
      x: float32 queries or keys, [..., H].
      cos, sin: f32[..., rotary_dim/2], broadcastable to x's leading axes.
      magnitude: YaRN's attention factor; given at birth only, never when a key is moved.
    """
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    parts = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    if rest.shape[-1]:  # a query that is rotated once a delta has as many copies of what passes through
        parts.append(jnp.broadcast_to(rest, (*parts[0].shape[:-1], rest.shape[-1])))
    return jnp.concatenate(parts, -1)
