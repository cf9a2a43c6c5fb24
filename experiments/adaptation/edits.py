"""Sampled edits as arrays of one shape, so that a compiled step takes any of them.

Which positions keep their KV is the library's own decision: its diff, and the policy's `select`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from flax import struct

from jaxkv.errors import ConfigError
from jaxkv.reuse.diff import diff
from jaxkv.reuse.policies import Edit, Policy
from jaxkv.typing import Array, Int32

KINDS = ("delete", "insert", "replace")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextEdit:
    """One edit of real text, and how the text goes on behind it."""

    kind: str
    position: float  # share of the untouched text in front of the edit
    old: Int32  # i32[S], cached
    new: Int32  # i32[m], requested
    continuation: Int32  # i32[T], teacher-forced behind it


@struct.dataclass(kw_only=True)
class EditBatch:
    """Edits padded to S cached tokens, M positions, C computed ones and T answers."""

    old: Array  # i32[B, S]
    new: Array  # i32[B, M], the requested tokens, the continuation, then padding
    source: Array  # i32[B, M], where a position's KV stands in `old`; -1 where it is computed
    rows: Array  # i32[B, C], computed positions, ascending; M in padding
    answers: Array  # i32[B, T], indices into `rows` whose logits answer
    answer_positions: Array  # i32[B, T], the same as positions
    targets: Array  # i32[B, T], the true tokens there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Static lengths of a batch."""

    old: int  # S
    new: int  # M
    rows: int  # C
    answers: int  # T

    @classmethod
    def of(cls, draw: Draw, policy: Policy) -> Shape:
        """What any edit that `draw` allows needs under `policy`, on text without repetitions.

        Raises:
          ConfigError: the policy can't be trained, or keeps nothing that could be stale.
        """
        context, continuation, largest = draw.context, draw.continuation, max(draw.sizes)
        text = np.arange(context + continuation + largest, dtype=np.int32)
        found = [
            sources(draw.edit(kind, position, size, text, 0, context + continuation), policy)
            for kind in draw.kinds
            for position in draw.positions
            for size in draw.sizes
        ]
        if not any((source[np.argmax(source < 0) :] >= 0).any() for source in found):
            raise ConfigError(
                f"policy '{policy}' keeps nothing behind any edit of {context} tokens, expected a smaller "
                "min_span or a longer config.context"
            )
        rows = max(int((source < 0).sum()) for source in found)
        new = context + largest + continuation
        return cls(old=context, new=new, rows=min(rows + continuation - 1, new), answers=continuation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """From which edits are drawn, uniformly."""

    context: int
    continuation: int
    kinds: tuple[str, ...]
    positions: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def need(self) -> int:
        """Tokens of the shortest text that edits can be drawn from."""
        return self.context + self.continuation + max(self.sizes)

    def edit(self, kind: str, position: float, size: int, tokens: Int32, at: int, borrow: int) -> TextEdit:
        """An edit of the context from token `at` on; inserted text is that from `borrow` on."""
        old = tokens[at : at + self.context]
        touched = 0 if kind == "insert" else size
        place = round(position * (self.context - touched))
        added = tokens[borrow : borrow + size] if kind != "delete" else tokens[:0]
        rest = tokens[at + self.context : at + self.context + self.continuation]
        return TextEdit(
            kind=kind,
            position=position,
            old=old.astype(np.int32),
            new=np.concatenate([old[:place], added, old[place + touched :]]).astype(np.int32),
            continuation=rest.astype(np.int32),
        )

    def one(self, tokens: Int32, rng: np.random.Generator) -> TextEdit:
        """An edit of a random place of a text i32[n], n >= `need`."""
        size = int(rng.choice(self.sizes))
        return self.edit(
            self.kinds[rng.integers(len(self.kinds))],
            self.positions[rng.integers(len(self.positions))],
            size,
            tokens,
            int(rng.integers(0, len(tokens) - self.context - self.continuation + 1)),
            int(rng.integers(0, len(tokens) - size + 1)),
        )

    def batch(
        self, tokens: Int32, count: int, rng: np.random.Generator, policy: Policy, shape: Shape
    ) -> EditBatch:
        """`count` random edits. One that repetitions in the text make larger than `shape` is drawn again."""
        edits: list[TextEdit] = []
        while len(edits) < count:
            edit = self.one(tokens, rng)
            if (sources(edit, policy) < 0).sum() + self.continuation - 1 <= shape.rows:
                edits.append(edit)
        return make_batch(edits, policy, shape)


def sources(edit: TextEdit, policy: Policy) -> Int32:
    """Where each requested position's KV stands in the cached text, i32[m]; -1: it is computed.

    Raises:
      ConfigError: the policy asks the device, drops survivors, appends or ignores rotation.
    """
    found = diff(edit.old, edit.new, min_span=policy.min_span)
    prefix = 0
    if found and found[0].old == 0 and found[0].new == 0:
        prefix, found = found[0].length, found[1:]
    selection = policy.select(
        Edit(
            old_length=len(edit.old),
            exact_length=len(edit.old),
            new_length=len(edit.new),
            prefix=prefix,
            survivors=found,
            old_tokens=edit.old,
            tokens=edit.new,
        )
    )
    if selection.ask is not None or selection.append is not None or selection.take is not None:
        raise ConfigError(
            f"policy '{policy}' asks the device or appends text, expected SCR and plain repairs"
        )
    if selection.drop or not selection.rotate:
        raise ConfigError(f"policy '{policy}' is a control, expected SCR and plain repairs")
    source = np.full(len(edit.new), -1, np.int32)
    source[:prefix] = np.arange(prefix)
    for span in selection.keep:
        at = np.arange(span.new, span.new + span.length)
        source[at] = at - span.delta
    for _, positions in selection.recompute:
        moved = positions[positions >= prefix]
        source[moved] = -1
    source[-1] = -1  # an answer needs its logits
    return source


def make_batch(edits: Sequence[TextEdit], policy: Policy, shape: Shape) -> EditBatch:
    """Pads `edits` to `shape`.

    Raises:
      ConfigError: an edit does not fit.
    """
    count = len(edits)
    old = np.zeros((count, shape.old), np.int32)
    new = np.zeros((count, shape.new), np.int32)
    source = np.full((count, shape.new), -1, np.int32)
    rows = np.full((count, shape.rows), shape.new, np.int32)
    answers = np.zeros((count, shape.answers), np.int32)
    positions = np.zeros((count, shape.answers), np.int32)
    targets = np.zeros((count, shape.answers), np.int32)
    for i, edit in enumerate(edits):
        length = len(edit.new)
        text = np.concatenate([edit.new, edit.continuation])
        kept = sources(edit, policy)
        # The last token of the continuation is predicted, not computed.
        computed = np.concatenate([np.flatnonzero(kept < 0), np.arange(length, len(text) - 1)])
        if len(edit.old) != shape.old or len(text) > shape.new or len(computed) > shape.rows:
            raise ConfigError(
                f"an edit has {len(edit.old)} cached, {len(text)} requested and {len(computed)} computed "
                f"tokens, expected {shape.old}, and at most {shape.new} and {shape.rows}"
            )
        old[i], new[i, : len(text)], source[i, :length] = edit.old, text, kept
        rows[i, : len(computed)] = computed
        positions[i] = np.arange(length - 1, len(text) - 1)
        answers[i] = np.searchsorted(computed, positions[i])
        targets[i] = edit.continuation
    return EditBatch(
        old=old,
        new=new,
        source=source,
        rows=rows,
        answers=answers,
        answer_positions=positions,
        targets=targets,
    )
