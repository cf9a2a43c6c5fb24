"""The policy that leaves the cache alone and says what changed."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.reuse.policies.base import NO_TOKENS, Edit, Selection
from jaxkv.reuse.probes import Encoded
from jaxkv.typing import Int32

# What a message is made of. {old}, {new} and {before} are tokens of the texts, put between these.
_PIECES = {
    "replace": ("\n\nCorrection: the passage \"", "{old}", "\" above is out of date, it now reads \"",
                "{new}", "\".\n\n"),
    "delete": ("\n\nCorrection: the passage \"", "{old}", "\" above was removed, disregard it.\n\n"),
    "insert": ("\n\nCorrection: after \"", "{before}", "\" above, add \"", "{new}", "\".\n\n"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Erratum:
    """Append a correction message, leave the cache untouched (arXiv 2606.17107).

    The result's tokens are the old ones and the message, not the requested ones, and its KV is exact
    for those; as an answer for the requested tokens it is approximate, and reported so. A quoted old
    passage longer than `quote` tokens is given by its two ends; new text is given in full. Where
    passages only changed places, or text was only appended, there is nothing to correct, and the
    answer is computed exactly. Without a tokenizer the message is the bare tokens.
    """

    quote: int = 24
    min_span = 8

    @property
    def exact(self) -> bool:
        return False

    def select(self, edit: Edit) -> Selection:
        if edit.prefix == edit.old_length:
            return Selection()
        message: list[Int32] = []
        for old, new, before in _changes(edit):
            kind = "replace" if len(old) and len(new) else "delete" if len(old) else "insert"
            slots = {"{old}": self._quoted(old, edit), "{new}": new, "{before}": before}
            for piece in _PIECES[kind]:
                part = slots.get(piece)
                if part is None:
                    ask = Encoded(piece)
                    if ask not in edit.evidence:
                        return Selection(ask=ask)
                    part = edit.evidence[ask]
                elif isinstance(part, Encoded):
                    return Selection(ask=part)
                message.append(part)
        if not message:
            return Selection()
        return Selection(append=np.concatenate(message).astype(np.int32))

    def _quoted(self, tokens: Int32, edit: Edit) -> Int32 | Encoded:
        if len(tokens) <= self.quote:
            return tokens
        gap = Encoded(" ... ")
        if gap not in edit.evidence:
            return gap
        half = max(self.quote // 2, 1)
        return np.concatenate([tokens[:half], edit.evidence[gap], tokens[-half:]])

    def __str__(self) -> str:
        return "erratum" if self.quote == 24 else f"erratum({self.quote})"


def _changes(edit: Edit) -> list[tuple[Int32, Int32, Int32]]:
    """For each place that changed: the tokens that went, those that came, and up to 8 before them."""
    found: list[tuple[Int32, Int32, Int32]] = []
    claimed = ~edit.deleted
    ends = [(edit.prefix, edit.prefix), *((s.old + s.length, s.new + s.length) for s in edit.survivors)]
    starts = [*((s.old, s.new) for s in edit.survivors), (edit.old_length, edit.new_length)]
    for (old_end, new_end), (_, new_start) in zip(ends, starts, strict=True):
        # What went right behind the last survivor, up to the next cached token that stayed.
        stop = old_end
        while stop < edit.old_length and not claimed[stop]:
            stop += 1
        gone = edit.old_tokens[old_end:stop]
        claimed[old_end:stop] = True
        came = edit.tokens[new_end:new_start]
        if len(gone) or len(came):
            found.append((gone, came, edit.tokens[max(new_end - 8, 0) : new_end]))
    # Deleted text in front of everything that survived, when the prefix is not its neighbour.
    left = np.flatnonzero(~claimed)
    parts = np.split(left, np.flatnonzero(np.diff(left) != 1) + 1) if len(left) else []
    return [*found, *((edit.old_tokens[part], NO_TOKENS, NO_TOKENS) for part in parts)]
