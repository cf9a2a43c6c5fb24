"""Repair of the attention sink."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.reuse.diff import Span
from jaxkv.reuse.policies.base import Edit, require
from jaxkv.reuse.policies.scr import Repair
from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True)
class Sinks(Repair):
    """Recompute the first `s` positions when the head changed: attention sinks (StreamingLLM, 2309.17453)."""

    s: int = 4
    cause = "sinks"

    def __post_init__(self) -> None:
        require("sinks", self.s, 1)

    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32:  # noqa: ARG002
        return np.arange(edit.prefix, max(min(self.s, edit.new_length), edit.prefix), dtype=np.int32)

    def __str__(self) -> str:
        return f"sinks({self.s})"
