"""One case of a workload: what was cached, what is asked for, and how the text truly goes on."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Old and new tokens, and the teacher-forced continuation that both share."""

    id: str  # stable: the same config gives the same ids and tokens
    edit: str
    position: str  # label, e.g. "head", "25%"
    size: int  # tokens deleted, inserted or moved
    context: int  # tokens cached before the edit
    document: int
    old: Int32  # i32[n]
    new: Int32  # i32[m]
    continuation: Int32  # i32[T], the true text behind the context
    seams: tuple[int, ...]  # positions in `new` where the old text goes on behind a change

    def distances(self, positions: Int32) -> Int32:
        """Tokens from the nearest seam at or before each position, i32[n]; -1 before the first."""
        seams = np.asarray(self.seams, np.int32)
        if not len(seams):
            return np.full(len(positions), -1, np.int32)
        index = np.searchsorted(seams, positions, side="right") - 1
        result: Int32 = np.where(index < 0, -1, positions - seams[index]).astype(np.int32)
        return result


def position_label(position: float) -> str:
    """`head`, or the share as a percentage."""
    return "head" if position == 0 else f"{100 * position:.4g}%"
