"""Repair of the tokens that attended the edited text, wherever they stand."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.reuse.diff import Span
from jaxkv.reuse.policies.base import Edit, ranges, require
from jaxkv.reuse.policies.first_k import FirstK
from jaxkv.reuse.policies.scr import Repair
from jaxkv.reuse.probes import Attention, Probe
from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True)
class Dependents(Repair):
    """Recompute a window behind each seam, and the `most` kept tokens that attend the edit most.

    A window repairs what stands near an edit; a sentence far behind it that took over a changed
    fact keeps its stale state (EDITLOCAL, arXiv 2609.17983, loses almost all of the margin at 250
    tokens). Those tokens are found by the `Attention` probe: how much each survivor attended the
    deleted text, from what is cached. Text that was only inserted was attended by nothing: then only
    the window is repaired.
    """

    window: int = 32
    most: int = 32
    cause = "dependents"

    def __post_init__(self) -> None:
        require("window", self.window, 0)
        require("most", self.most, 1)

    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32 | Probe:
        near = FirstK(self.window).positions(edit, kept) if self.window else ranges([], [])
        places = np.setdiff1d(ranges([s.new for s in kept], [s.new + s.length for s in kept]), near)
        if not len(places) or not edit.deleted.any():
            return near
        probe = Attention()
        if probe not in edit.evidence:
            return probe
        mass = edit.evidence[probe][places]
        far = places[np.argsort(-mass, kind="stable")[: self.most]]
        return np.concatenate([near, far]).astype(np.int32)

    def __str__(self) -> str:
        return f"dependents({self.window},{self.most})"
