"""Predicting what an approximate answer costs in KL, from signals that are cheap to read.

A ridge regression of log10 KL on a few signals, fitted on edits whose KL was measured, and a margin: the
quantile that covers `COVERAGE` of its residuals, each taken with its edit left out of the fit (jackknife
prediction intervals, Barber et al., arXiv 1905.02928). Calibrations belong to one model's weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence as Many
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.errors import ConfigError, FormatError
from jaxkv.typing import Float64

COVERAGE = 0.95
_SMALLEST = 1e-12  # of what is put on a log scale
_RIDGE = 1.0
COMMAND = "python -m experiments.calibrate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signals:
    """What is known of an approximate answer before anybody reads it."""

    key_drift: float  # ‖K − K cached‖/‖K‖ of the last recomputed survivors, deepest layer looked at
    value_drift: float  # the same for V
    stale_mass: float  # attention of the last tokens on stale keys, mean over heads and layers
    deleted_mass: float  # attention of the last survivors on deleted text, in the old sequence
    sink_stale: bool  # whether one of the first four positions is stale
    stale_share: float  # of all tokens
    distance: int  # tokens from the last seam to the end
    deleted: int  # tokens
    inserted: int  # tokens
    length: int  # tokens

    def features(self) -> Float64:
        """f64[9], on scales on which KL is roughly linear."""

        def log(x: float) -> float:
            return math.log10(max(x, _SMALLEST))

        return np.array(
            [
                log(self.key_drift),
                log(self.value_drift),
                log(self.stale_mass),
                max(log(self.deleted_mass), -6.0),
                float(self.sink_stale),
                self.stale_share,
                log(1.0 + self.distance),
                log(1.0 + self.deleted + self.inserted),
                log(self.length),
            ]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A prediction of the mean KL(exact‖approx) over the next tokens, nats."""

    kl: float  # expected
    bound: float  # not exceeded by `COVERAGE` of the calibration's answers
    signals: Signals | None = None  # None when the answer is exact
    flops: float = 0.0  # of reading the signals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted prediction for one model's weights."""

    weights_digest: str
    model: str
    mean: tuple[float, ...]  # of each feature
    scale: tuple[float, ...]
    weights: tuple[float, ...]  # of the scaled features
    intercept: float
    margin: float  # decades of KL between the prediction and its bound
    cases: int  # answers
    source: str = ""  # the run that it was fitted on: config digest and corpus digest

    def estimate(self, signals: Signals) -> Estimate:
        """Predicts KL, and the bound above it."""
        x = (signals.features() - np.array(self.mean)) / np.array(self.scale)
        log = float(x @ np.array(self.weights)) + self.intercept
        # A KL cannot exceed what the vocabulary allows; beyond the data the line means nothing.
        return Estimate(kl=10.0 ** min(log, 3.0), bound=10.0 ** min(log + self.margin, 3.0), signals=signals)

    def to_json(self) -> str:
        """What `read` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, text: str, name: str = "calibration") -> Calibration:
        """Reads `to_json`'s form; anything else is a FormatError."""
        try:
            data = json.loads(text)
            lists = {key: tuple(map(float, data[key])) for key in ("mean", "scale", "weights")}
            found = cls(**{**data, **lists})
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"'{name}' is not a calibration: {error}") from None
        wanted = len(_blank().features())
        if not len(found.mean) == len(found.scale) == len(found.weights) == wanted:
            raise FormatError(f"'{name}' has {len(found.weights)} features, expected {wanted}: fit it again")
        return found


def fit(
    signals: Many[Signals],
    kl: Many[float],
    *,
    weights_digest: str,
    model: str,
    source: str = "",
    edits: Many[str] | None = None,
) -> Calibration:
    """Fits a calibration.

    Args:
      signals: of n answers, n >= 20.
      kl: the mean KL that was measured for each, nats; 0 or more.
      weights_digest, model, source: whose it is, and from what.
      edits: which edit each answers, when several policies answered one; None when each its own. The margin
        is of edits that the fit did not see, so all answers to one are left out together.

    Raises:
      ConfigError: too few answers or edits, lengths that differ, or a KL that is negative or not finite.
    """
    measured = np.asarray(kl, np.float64)
    if len(signals) != len(measured) or len(measured) < 20:
        raise ConfigError(
            f"signals are {len(signals)} and kl {len(measured)}, expected as many, at least 20 answers"
        )
    groups = list(range(len(measured))) if edits is None else list(edits)
    if len(groups) != len(measured) or len(set(groups)) < 5:
        raise ConfigError(
            f"edits are {len(groups)}, {len(set(groups))} of them different, expected {len(measured)} and at "
            "least 5"
        )
    if not np.isfinite(measured).all() or (measured < 0).any():
        raise ConfigError("kl holds a number that is negative or not finite, expected nats per token")
    x = np.stack([s.features() for s in signals])
    y = np.log10(np.maximum(measured, _SMALLEST))
    mean, scale = x.mean(axis=0), np.where(x.std(axis=0) > 1e-9, x.std(axis=0), 1.0)
    design = (x - mean) / scale
    gram = design.T @ design + _RIDGE * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, design.T @ (y - y.mean()))
    residuals = y - (design @ weights + y.mean())
    # Residuals of a ridge with one edit left out, in closed form: (1 − H)⁻¹ r over its answers.
    hat = design @ np.linalg.solve(gram, design.T) + 1 / len(y)
    left_out = np.empty_like(y)
    for edit in dict.fromkeys(groups):
        at = np.flatnonzero([group == edit for group in groups])
        left_out[at] = np.linalg.solve(np.eye(len(at)) - hat[np.ix_(at, at)], residuals[at])
    rank = min(math.ceil(COVERAGE * (len(y) + 1)), len(y)) - 1
    return Calibration(
        weights_digest=weights_digest,
        model=model,
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        weights=tuple(weights.tolist()),
        intercept=float(y.mean()),
        margin=float(np.sort(left_out)[rank]),
        cases=len(y),
        source=source,
    )


def load_calibration(weights_digest: str, directory: Path | None = None) -> Calibration:
    """The calibration of a model's weights, from `directory` or those that came with jaxkv.

    Raises:
      ConfigError: there is none for these weights.
      FormatError: the file is damaged.
    """
    name = f"{weights_digest[:16]}.json"
    where: Any = directory or resources.files("jaxkv.reuse") / "calibrations"
    path = where / name
    if not path.is_file():
        raise ConfigError(
            f"no calibration is known for the weights {weights_digest[:16]}, expected one made by "
            f"'{COMMAND}', or a policy that needs none"
        )
    found = Calibration.read(path.read_text(encoding="utf-8"), name)
    if found.weights_digest != weights_digest:
        raise FormatError(f"'{name}' is the calibration of other weights, {found.weights_digest[:16]}")
    return found


def _blank() -> Signals:
    return Signals(
        key_drift=1, value_drift=1, stale_mass=1, deleted_mass=1, sink_stale=False, stale_share=0,
        distance=0, deleted=0, inserted=0, length=1,
    )  # fmt: skip
