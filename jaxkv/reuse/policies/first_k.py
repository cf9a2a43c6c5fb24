"""Repair of a window behind each seam."""

from __future__ import annotations

import dataclasses

from jaxkv.reuse.diff import Span
from jaxkv.reuse.policies.base import Edit, ranges, require
from jaxkv.reuse.policies.scr import Repair
from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True)
class FirstK(Repair):
    """Recompute the first `k` tokens behind each seam (EPIC, 2410.15332; EDITLOCAL, 2609.17983)."""

    k: int = 32
    cause = "first_k"

    def __post_init__(self) -> None:
        require("first_k", self.k, 1)

    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32:  # noqa: ARG002
        return ranges([s.new for s in kept], [s.new + min(self.k, s.length) for s in kept])

    def __str__(self) -> str:
        return f"first_k({self.k})"
