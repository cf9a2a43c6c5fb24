"""Float64 loops in NumPy that every implementation is judged by. Shares no code with them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Array = np.ndarray


def attention(
    q: Array,
    kv: Array,
    page: Array,
    first: Array,
    lo: Array,
    hi: Array,
    delta_index: Array,
    positions: Array,
    *,
    scale: Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    at: Iterable[tuple[int, int]] | None = None,
) -> Array:
    """Softmax attention of queries (b, t), one query and one slot after the other.

    Args:
      q, kv, page, first, lo, hi, delta_index, positions, scale, window, soft_cap: as in
        `pallas_kernels.paged_attention`, NumPy arrays.
      at: which (b, t) to judge; None for all. The others stay NaN.

    Returns:
      f64[B, T, K, G, H].
    """
    batch, _, length, kv_heads, group, head_dim = q.shape
    block = page.shape[1] // delta_index.shape[1]
    out = np.full((batch, length, kv_heads, group, head_dim), np.nan)
    for b, t in np.ndindex(batch, length) if at is None else at:
        here, scores, values = int(positions[b, t]), [], []
        for m in range(page.shape[1]):
            query = q[b, delta_index[b, m // block], t].astype(np.float64)  # [K, G, H]
            for s in range(int(lo[b, m]), int(hi[b, m])):
                stands = int(first[b, m]) + s
                if stands > here or here < 0 or (window is not None and stands <= here - window):
                    continue
                row = kv[page[b, m], :, s].astype(np.float64)  # [K, 2H]
                keys, value = row[:, :head_dim], row[:, head_dim:]
                if scale is not None:
                    size, of = kv.shape[2], scale[:, page[b, m]].astype(np.float64)  # [K, S]
                    keys, value = keys * of[:, s : s + 1], value * of[:, size + s : size + s + 1]
                score = (query * keys[:, None]).sum(-1)
                scores.append(score if soft_cap is None else soft_cap * np.tanh(score / soft_cap))
                values.append(value)
        if not scores:
            out[b, t] = 0.0
            continue
        weights = np.exp(np.array(scores) - np.max(scores, 0))  # [S, K, G]
        out[b, t] = (weights[..., None] * np.array(values)[:, :, None]).sum(0) / weights.sum(0)[..., None]
    return out


def factors(scale: Array, rows: int, page_size: int) -> Array:
    """The factors of every slot's key and value, [X, K, P, 2], of `scale` [K, X', S]."""
    scale = np.asarray(scale)
    out = np.full((rows, scale.shape[0], page_size, 2), np.nan, scale.dtype)
    for x, k, s, part in np.ndindex(out.shape):
        out[x, k, s, part] = scale[k, x, part * page_size + s]
    return out


def rotated(keys: Array, angle: Array) -> Array:
    """Keys [..., H] turned by angles f64[rotary_dim/2] in float64, as complex numbers."""
    half = angle.shape[-1]
    out = keys.astype(np.float64)
    turned = (out[..., :half] + 1j * out[..., half : 2 * half]) * np.exp(1j * angle.astype(np.float64))
    out[..., :half], out[..., half : 2 * half] = turned.real, turned.imag
    return out
