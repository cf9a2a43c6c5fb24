"""Statistics over tokens and cases: summaries, groups by distance, bootstrap intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.typing import Array, Float64, Int32

DISTANCE_BINS = (0, 16, 64, 256, 1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """One figure over tokens or cases. `stderr` is nan for a single value."""

    mean: float
    p50: float
    p95: float
    max: float
    stderr: float

    @classmethod
    def of(cls, values: Float64) -> Summary:
        """Summary of `values` f64[n], n ≥ 1. stderr = standard deviation (n − 1) / √n."""
        values = np.asarray(values, np.float64)
        if values.ndim != 1 or not values.size:
            raise ConfigError(f"values has shape {values.shape}, expected [n] with n of at least 1")
        p50, p95 = np.percentile(values, (50, 95))
        return cls(
            mean=float(values.mean()),
            p50=float(p50),
            p95=float(p95),
            max=float(values.max()),
            stderr=standard_error(values),
        )

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready: nan and infinity become None."""
        return {name: finite(value) for name, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceBin:
    """Values whose distance d from the seam satisfies lo ≤ d < hi (hi None: no upper end)."""

    lo: int
    hi: int | None
    count: int
    mean: float  # nan when the bin is empty
    stderr: float  # nan below two values

    @property
    def label(self) -> str:
        """`0–15`, or `1024+` for the last bin."""
        return f"{self.lo}+" if self.hi is None else f"{self.lo}–{self.hi - 1}"

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON-ready: nan becomes None."""
        return {
            "lo": self.lo,
            "hi": self.hi,
            "count": self.count,
            "mean": finite(self.mean),
            "stderr": finite(self.stderr),
        }


def by_distance(
    values: Array, distances: Array, bins: Sequence[int] = DISTANCE_BINS
) -> tuple[DistanceBin, ...]:
    """Groups `values` float [n] by `distances` int [n], in tokens from the seam.

    Args:
      values: one finite figure a token.
      distances: 0 is the seam itself; none may lie below the first bin.
      bins: strictly increasing lower edges; the last bin has no upper end.

    Raises:
      ConfigError: lengths differ, a distance lies below bins[0], or bins don't increase.
    """
    data = np.asarray(values, np.float64)
    if data.ndim != 1:
        raise ConfigError(f"values has shape {data.shape}, expected [n]")
    index = bin_index(distances, bins, len(data))
    result = []
    for i, lo in enumerate(bins):
        chosen = data[index == i]
        result.append(
            DistanceBin(
                lo=int(lo),
                hi=int(bins[i + 1]) if i + 1 < len(bins) else None,
                count=len(chosen),
                mean=float(chosen.mean()) if len(chosen) else math.nan,
                stderr=standard_error(chosen),
            )
        )
    return tuple(result)


def standard_error(values: Array) -> float:
    """Standard error of the mean of `values` float [n]; nan below two values."""
    data = np.asarray(values, np.float64)
    return float(data.std(ddof=1) / math.sqrt(data.size)) if data.size > 1 else math.nan


def bootstrap_interval(
    values: Array, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values` float [n]; deterministic in `seed`.

    For a paired comparison pass the differences: one value a case.

    Raises:
      ConfigError: no values, a value that is not finite, or an argument out of range.
    """
    data = np.asarray(values, np.float64)
    if data.ndim != 1 or not data.size:
        raise ConfigError(f"values has shape {data.shape}, expected [n] with n of at least 1")
    if not np.isfinite(data).all():
        raise ConfigError("values holds nan or infinity, expected finite numbers")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence}, expected a number between 0 and 1")
    if resamples < 1:
        raise ConfigError(f"resamples is {resamples}, expected a positive number")
    rng = np.random.default_rng(seed)
    # A multinomial row counts how often each value is drawn: the same as drawing indices, in less
    # memory.
    draws = rng.multinomial(data.size, np.full(data.size, 1 / data.size), size=resamples)
    means = draws @ data / data.size
    tail = (1 - confidence) / 2
    lo, hi = np.quantile(means, (tail, 1 - tail))
    return float(lo), float(hi)


def bin_index(distances: Array, bins: Sequence[int], count: int) -> Int32:
    """Index i32[count] of the bin of each distance; errors as in `by_distance`."""
    edges = np.asarray(bins)
    if edges.ndim != 1 or not edges.size or (np.diff(edges) <= 0).any():
        raise ConfigError(f"bins is {tuple(bins)}, expected strictly increasing lower edges")
    steps = np.asarray(distances)
    if steps.shape != (count,):
        raise ConfigError(f"distances has shape {steps.shape}, expected ({count},)")
    if steps.dtype.kind not in "iu":
        raise ConfigError(f"distances has dtype {steps.dtype}, expected integers")
    if steps.size and steps.min() < edges[0]:
        raise ConfigError(f"distances holds {int(steps.min())}, expected at least bins[0], {int(edges[0])}")
    return (np.searchsorted(edges, steps, side="right") - 1).astype(np.int32)


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no number for it (nan, infinity)."""
    return float(value) if math.isfinite(value) else None
