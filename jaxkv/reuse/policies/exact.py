"""The exact policy and the control that leaves survivors out."""

from __future__ import annotations

import dataclasses

from jaxkv.reuse.policies.base import MIN_SPAN, Edit, Selection


@dataclasses.dataclass(frozen=True)
class Exact:
    """Reuse the common prefix, recompute the rest: what exact engines do (vLLM, SGLang)."""

    min_span = MIN_SPAN

    @property
    def exact(self) -> bool:
        return True

    def select(self, edit: Edit) -> Selection:  # noqa: ARG002 - the prefix is kept by every policy
        return Selection()

    def __str__(self) -> str:
        return "exact"


@dataclasses.dataclass(frozen=True)
class Drop:
    """Keep the prefix, compute new tokens, leave survivors out: how much does the suffix matter?"""

    min_span = MIN_SPAN

    @property
    def exact(self) -> bool:
        return False

    def select(self, edit: Edit) -> Selection:
        return Selection(drop=edit.survivors)

    def __str__(self) -> str:
        return "drop"
