"""Repair of the tokens whose cached KV is furthest from fresh."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.reuse.diff import Span
from jaxkv.reuse.policies.base import Edit, ranges, require_share
from jaxkv.reuse.policies.scr import Repair
from jaxkv.reuse.probes import Deviation, Probe
from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True)
class TopDeviation(Repair):
    """Recompute the `ratio` of kept tokens that deviate most at `layer` (CacheBlend, 2405.16444).

    The suffix runs through the first `layer` + 1 layers to find them: with L layers that is
    (layer + 1) / L of an exact prefill of the suffix, counted as `probe`.
    """

    ratio: float = 0.15
    layer: int = 1
    cause = "top_deviation"

    def __post_init__(self) -> None:
        require_share("ratio", self.ratio)
        Deviation(self.layer)  # refuses what it refuses

    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32 | Probe:
        places = ranges([s.new for s in kept], [s.new + s.length for s in kept])
        if not len(places):
            return places
        probe = Deviation(self.layer)
        if probe not in edit.evidence:
            return probe
        deviation = np.nan_to_num(edit.evidence[probe][places], nan=-1.0)
        count = int(np.ceil(self.ratio * len(places)))
        return places[np.argsort(-deviation, kind="stable")[:count]]

    def __str__(self) -> str:
        return f"top_deviation({self.ratio},{self.layer})"
