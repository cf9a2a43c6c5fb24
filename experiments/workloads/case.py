"""One case of a workload: what was cached, what is asked for, and how the text truly goes on."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What the text behind the context asks, if it asks something; the last token is the answer.

    A `recall` item counts if exact gives `answer` and the model does not without its context.
    """

    kind: str  # "recall", or "residue": a deleted secret is asked for
    answer: int  # token id: of recall the true one, of residue the one that was deleted
    stale: int | None = None  # token id that was true before the edit
    candidates: tuple[int, ...] = ()  # token ids among which a residue is ranked
    distance: int = 0  # tokens between what changed and what depends on it


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """An edit on the way to a case's last one."""

    new: Int32  # i32[m]
    continuation: Int32  # i32[T], scored behind it; empty when the turn is passed without measuring


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
    before: tuple[Turn, ...] = ()  # edits between `old` and `new`: the state passes through each
    kv_dtype: str = ""  # of the pages; the model's when empty
    task: Task | None = None
    twin: Int32 | None = None  # i32[n], another past of the same `new`: what does an answer tell of it?

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All edits, the last one included."""
        return (*self.before, Turn(new=self.new, continuation=self.continuation))

    @property
    def longest(self) -> int:
        """Tokens that any of its sequences holds at once, continuation included."""
        return max(len(self.old), *(len(t.new) + len(t.continuation) for t in self.turns))

    @property
    def digest(self) -> str:
        """First 16 hex digits of a SHA-256 over all its tokens: runs compare only what agrees in it."""
        arrays = [self.old, *(a for turn in self.turns for a in (turn.new, turn.continuation))]
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(len(array).to_bytes(8, "little") + np.asarray(array, "<i4").tobytes())
        return digest.hexdigest()[:16]

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
