"""The policy of privacy."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.reuse.diff import Span
from jaxkv.reuse.policies.base import MIN_SPAN, Edit, Selection
from jaxkv.reuse.policies.scr import SCR


@dataclasses.dataclass(frozen=True)
class Forget:
    """Nothing that attended deleted text survives: exact from the first deleted token on."""

    min_span = MIN_SPAN

    @property
    def exact(self) -> bool:
        return True

    def select(self, edit: Edit) -> Selection:
        gone = edit.deleted
        first_deleted = int(np.argmax(gone)) if gone.any() else edit.old_length
        # Of an edited source, what is not exact may have attended what was deleted before.
        first_deleted = min(first_deleted, edit.exact_length)
        untouched = tuple(
            Span(s.old, s.new, min(s.length, first_deleted - s.old))
            for s in edit.survivors
            if s.old < first_deleted
        )
        return SCR().select(dataclasses.replace(edit, survivors=untouched))

    def __str__(self) -> str:
        return "forget"
