"""How far one set of logits, or of layer states, is from another. NumPy only; float64 inside.

Always measured against a fresh exact prefill of the same tokens, on the same teacher-forced
continuation. Figures are nats per token unless a name says otherwise; identical inputs give
exactly 0.

    KL(p‖q) = Σ p·(log p − log q) = Σ p·(e^d − 1 − d)  with  d = log q − log p,  as Σ p = Σ q = 1

The right-hand form sums terms that are never negative, so a divergence of 1e-13 is still a figure
and not the rounding of a difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.errors import ConfigError, TokenError
from jaxkv.summary import (
    DISTANCE_BINS,
    DistanceBin,
    Summary,
    bin_index,
    bootstrap_interval,
    by_distance,
    finite,
    standard_error,
)
from jaxkv.typing import Array, Bool, Float64, Int32

__all__ = [
    "DISTANCE_BINS",
    "DistanceBin",
    "Divergence",
    "LayerDivergence",
    "Summary",
    "bootstrap_interval",
    "by_distance",
    "divergence",
    "layer_divergence",
    "standard_error",
]

_CHUNK_BYTES = 32 * 2**20  # of one float64 [rows, V] block; about eight such blocks live at once


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Divergence:
    """Per-token comparison of two sets of logits over T tokens. Made by `divergence`."""

    kl_tokens: Float64  # [T], KL(exact‖approx), nats
    reverse_kl_tokens: Float64  # [T], KL(approx‖exact), nats
    top1_tokens: Bool  # [T], same most likely token
    top5_tokens: Float64  # [T], share of the exact top five that is in the approximate top five
    cosine_tokens: Float64  # [T], cosine of the two logit rows
    delta_nll_tokens: Float64 | None  # [T], NLL(approx) − NLL(exact) of the target, nats

    @property
    def kl(self) -> Summary:
        """KL(exact‖approx) over tokens, nats."""
        return Summary.of(self.kl_tokens)

    @property
    def reverse_kl(self) -> Summary:
        """KL(approx‖exact) over tokens, nats."""
        return Summary.of(self.reverse_kl_tokens)

    @property
    def top1_agreement(self) -> float:
        """Share of tokens where both have the same most likely token, 0 to 1."""
        return float(self.top1_tokens.mean())

    @property
    def top5_overlap(self) -> float:
        """Mean share of the exact top five found in the approximate top five, 0 to 1."""
        return float(self.top5_tokens.mean())

    @property
    def logit_cosine(self) -> float:
        """Mean cosine of the logit rows, −1 to 1."""
        return float(self.cosine_tokens.mean())

    @property
    def delta_nll(self) -> float | None:
        """Mean NLL(approx) − NLL(exact) on the targets, nats per token; None without targets."""
        return None if self.delta_nll_tokens is None else float(self.delta_nll_tokens.mean())

    @property
    def perplexity_ratio(self) -> float | None:
        """Perplexity(approx) / perplexity(exact) on the targets; None without targets."""
        delta = self.delta_nll
        if delta is None:
            return None
        return math.exp(delta) if delta < 700 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Summary figures, JSON-ready (no per-token arrays)."""
        ratio = self.perplexity_ratio
        return {
            "tokens": len(self.kl_tokens),
            "kl": self.kl.to_dict(),
            "reverse_kl": self.reverse_kl.to_dict(),
            "top1_agreement": self.top1_agreement,
            "top5_overlap": self.top5_overlap,
            "logit_cosine": self.logit_cosine,
            "delta_nll": self.delta_nll,
            "perplexity_ratio": None if ratio is None else finite(ratio),
        }

    def __str__(self) -> str:
        kl = self.kl
        spread = "" if math.isnan(kl.stderr) else f" ± {kl.stderr:.1g}"
        text = (
            f"KL {kl.mean:.3g}{spread} nats (p95 {kl.p95:.3g}, max {kl.max:.3g}), "
            f"top-1 {self.top1_agreement:.1%}, top-5 {self.top5_overlap:.1%}"
        )
        if self.delta_nll is not None:
            text += f", ΔNLL {self.delta_nll:+.3g}"
        return f"{text}, {len(self.kl_tokens)} tokens"


def divergence(exact: Array, approx: Array, targets: Array | None = None) -> Divergence:
    """Compares two sets of logits row by row.

    Args:
      exact: float [T, V], logits of the reference.
      approx: float [T, V], logits to be judged.
      targets: int [T], the true token of each row, for NLL; optional.

    Returns:
      Per-token figures and their summaries. Memory stays bounded: rows are processed in chunks.

    Raises:
      ConfigError: shapes differ, are not [T, V], hold no row, are not floating, or not finite.
      TokenError: targets have another length, are not integers, or lie outside [0, V).
    """
    p_logits, q_logits = _logits("exact", exact), _logits("approx", approx)
    if p_logits.shape != q_logits.shape:
        raise ConfigError(f"approx has shape {q_logits.shape}, expected that of exact, {p_logits.shape}")
    count, vocab = p_logits.shape
    ids = None if targets is None else _targets(targets, count, vocab)

    kl, reverse, cosine, top5 = (np.empty(count, np.float64) for _ in range(4))
    top1 = np.empty(count, np.bool_)
    delta_nll = None if ids is None else np.empty(count, np.float64)
    rows = max(1, _CHUNK_BYTES // (8 * vocab))
    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        a = p_logits[part].astype(np.float64)
        b = q_logits[part].astype(np.float64)
        _check_finite("exact", a, start)
        _check_finite("approx", b, start)
        log_p, log_q = _log_softmax(a), _log_softmax(b)
        kl[part], reverse[part] = _kl(log_p, log_q), _kl(log_q, log_p)
        top1[part] = a.argmax(axis=1) == b.argmax(axis=1)
        top5[part] = _overlap(a, b, min(5, vocab))
        cosine[part] = _cosine(a, b)
        if ids is not None and delta_nll is not None:
            pick = ids[part, None]
            gain = np.take_along_axis(log_p, pick, 1) - np.take_along_axis(log_q, pick, 1)
            delta_nll[part] = gain[:, 0]
    return Divergence(
        kl_tokens=kl,
        reverse_kl_tokens=reverse,
        top1_tokens=top1,
        top5_tokens=top5,
        cosine_tokens=cosine,
        delta_nll_tokens=delta_nll,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerDivergence:
    """Relative error ‖approx − exact‖ / ‖exact‖ (Frobenius) of one kind of state."""

    per_layer: Float64  # [L]
    by_distance: Float64 | None  # [L, bins], nan where a bin holds no token
    counts: Int32 | None  # [bins], tokens in each bin

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: nan and infinity become None."""
        cells = self.by_distance
        return {
            "per_layer": [finite(x) for x in self.per_layer],
            "by_distance": None if cells is None else [[finite(x) for x in r] for r in cells],
            "counts": None if self.counts is None else self.counts.tolist(),
        }


def layer_divergence(
    exact: Array,
    approx: Array,
    distances: Array | None = None,
    bins: Sequence[int] = DISTANCE_BINS,
) -> LayerDivergence:
    """Relative error of keys, values or attention outputs, by layer and distance from the seam.

    Args:
      exact: float [L, n, ...], the reference; keys un-rotated.
      approx: float [L, n, ...], the state to be judged, at the same n positions.
      distances: int [n], tokens from the seam, for the figures by distance; optional.
      bins: as in `by_distance`.

    A layer whose reference is zero has error 0 if approx is zero too, else infinity.

    Raises:
      ConfigError: shapes differ, have fewer than two axes, are empty, or hold nan or infinity.
    """
    a, b = _floating("exact", exact), _floating("approx", approx)
    if a.shape != b.shape:
        raise ConfigError(f"approx has shape {b.shape}, expected that of exact, {a.shape}")
    if a.ndim < 2 or not a.size:
        raise ConfigError(f"exact has shape {a.shape}, expected [L, n, ...] with at least one value")
    layers, count = a.shape[:2]
    error, norm = np.empty((layers, count), np.float64), np.empty((layers, count), np.float64)
    for layer in range(layers):  # one layer at a time: float64 copies stay small
        x = a[layer].reshape(count, -1).astype(np.float64)
        y = b[layer].reshape(count, -1).astype(np.float64)
        _check_finite("exact", x, 0, "position")
        _check_finite("approx", y, 0, "position")
        error[layer], norm[layer] = ((y - x) ** 2).sum(axis=1), (x**2).sum(axis=1)
    per_layer = _ratio(error.sum(axis=1), norm.sum(axis=1))
    if distances is None:
        return LayerDivergence(per_layer=per_layer, by_distance=None, counts=None)
    index = bin_index(distances, bins, count)
    cells = np.full((layers, len(bins)), np.nan)
    for i in range(len(bins)):
        chosen = index == i
        if chosen.any():
            cells[:, i] = _ratio(error[:, chosen].sum(axis=1), norm[:, chosen].sum(axis=1))
    counts = np.bincount(index, minlength=len(bins)).astype(np.int32)
    return LayerDivergence(per_layer=per_layer, by_distance=cells, counts=counts)


def _log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _kl(log_p: Float64, log_q: Float64) -> Float64:
    p, d = np.exp(log_p), log_q - log_p
    # Near d = 0, e^d − 1 − d needs expm1; far from it p·e^d would overflow, q does not.
    near = np.abs(d) < 0.5
    terms = np.where(near, p * (np.expm1(np.where(near, d, 0.0)) - d), np.exp(log_q) - p - p * d)
    result: Float64 = np.maximum(terms, 0.0).sum(axis=1)
    return result


def _top_mask(logits: Float64, k: int) -> Bool:
    """Mask [rows, V] of the k largest logits of each row; among equals the lowest token id wins."""
    bound = np.partition(logits, -k, axis=1)[:, -k, None]
    above, equal = logits > bound, logits == bound
    room = k - above.sum(axis=1, keepdims=True)
    result: Bool = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return result


def _overlap(a: Float64, b: Float64, k: int) -> Float64:
    result: Float64 = (_top_mask(a, k) & _top_mask(b, k)).sum(axis=1) / k
    return result


def _cosine(a: Float64, b: Float64) -> Float64:
    # Scaled first, or squares of large logits overflow. Zeros are parallel only to zeros.
    a = a / np.maximum(np.abs(a).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    b = b / np.maximum(np.abs(b).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    dot, aa, bb = (np.einsum("rv,rv->r", x, y) for x, y in ((a, b), (a, a), (b, b)))
    norm = np.sqrt(aa * bb)
    both_zero = (aa == 0) & (bb == 0)
    result: Float64 = np.where(both_zero, 1.0, dot / np.where(norm > 0, norm, 1.0)).clip(-1.0, 1.0)
    return result


def _ratio(error: Float64, norm: Float64) -> Float64:
    safe = np.where(norm > 0, norm, 1.0)
    zero = np.where(error > 0, np.inf, 0.0)
    result: Float64 = np.where(norm > 0, np.sqrt(error / safe), zero)
    return result


def _floating(name: str, value: Array) -> Any:
    array = np.asarray(value)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":  # ml_dtypes has kind V
        raise ConfigError(f"{name} has dtype {array.dtype}, expected a floating dtype")
    return array


def _logits(name: str, value: Array) -> Any:
    array = _floating(name, value)
    if array.ndim != 2 or not array.size:
        raise ConfigError(f"{name} has shape {array.shape}, expected [T, V] with at least one value")
    return array


def _targets(value: Array, count: int, vocab: int) -> Any:
    ids = np.asarray(value)
    if ids.shape != (count,):
        raise TokenError(f"targets has shape {ids.shape}, expected ({count},), one token a row")
    if ids.dtype.kind not in "iu":
        raise TokenError(f"targets has dtype {ids.dtype}, expected integers")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        bad = int(ids[(ids < 0) | (ids >= vocab)][0])
        raise TokenError(f"targets holds token {bad}, expected 0 to {vocab - 1}")
    return ids


def _check_finite(name: str, block: Float64, start: int, unit: str = "row") -> None:
    bad = ~np.isfinite(block).all(axis=1)
    if bad.any():
        row = start + int(bad.argmax())
        raise ConfigError(f"{name} holds nan or infinity in {unit} {row}, expected finite numbers")
