"""What a lookup in the prefix index answers: how much is cached, where, and why not more."""

from __future__ import annotations

import dataclasses
import enum

from jaxkv.cache.radix import Place
from jaxkv.cache.sequence import PAGE
from jaxkv.typing import Int32


class Cause(enum.StrEnum):
    """Why a match ended where it did."""

    COMPLETE = "complete"  # the whole prompt is cached
    LAST_TOKEN = "last_token"  # all but the last token: one has to be computed for its logits
    LIMIT = "limit"  # the caller asked for no more
    TOKENS = "tokens"  # what is cached here goes on with another token
    CHUNK = "chunk"  # no cached chunk goes on with these tokens (chunk granularity only)
    EXHAUSTED = "exhausted"  # what is cached here ends
    EVICTED = "evicted"  # what went on here was evicted for others
    EXPIRED = "expired"  # what went on here was not used for too long
    QUOTA = "quota"  # what went on here did not fit into the domain's quota
    PINNED = "pinned"  # what goes on here is in a lower tier, and no page could be freed for it
    ABSENT = "absent"  # nothing is cached for this domain under this contract
    CONTRACT = "contract"  # the domain's cache is under a contract that differs
    GRANULARITY = "granularity"  # cut back to the chunk grid
    WINDOW = "window"  # local layers do not hold the window before what is cached from here on
    DISABLED = "disabled"  # the caller asked for no reuse


_EXPLANATIONS = {
    Cause.COMPLETE: "the whole prompt of {at} tokens is cached",
    Cause.LAST_TOKEN: "all but the last token is cached; that one, at position {at}, is computed",
    Cause.LIMIT: "the match was limited to {at} tokens",
    Cause.TOKENS: "tokens differ at position {at}",
    Cause.CHUNK: "the chunk from position {at} on is not cached",
    Cause.EXHAUSTED: "the cached run ends at position {at}",
    Cause.EVICTED: "what was cached from position {at} on was evicted",
    Cause.EXPIRED: "what was cached from position {at} on has expired",
    Cause.QUOTA: "what was computed from position {at} on did not fit into the domain's quota",
    Cause.PINNED: "what is stored from position {at} on found no page: the rest is pinned or in use",
    Cause.ABSENT: "nothing is cached for this domain under this contract",
    Cause.CONTRACT: "what this domain has cached is under another contract",
    Cause.GRANULARITY: "cut back to the chunk grid at position {at}",
    Cause.WINDOW: "local layers hold no window to go on from behind position {at}",
    Cause.DISABLED: "reuse was not asked for",
}


@dataclasses.dataclass(frozen=True)
class MatchEnd:
    """Why a match ended at `position`; `before` is the end that the chunk grid cut back, if any."""

    cause: Cause
    position: int
    before: MatchEnd | None = None
    fields: tuple[str, ...] = ()  # of the contract, that differ

    def __str__(self) -> str:
        text = _EXPLANATIONS[self.cause].format(at=self.position)
        if self.fields:
            text += f": {', '.join(self.fields)}"
        return text if self.before is None else f"{text}; before that, {self.before}"

    @property
    def limiting(self) -> Cause:
        """The cause that a longer match would have to overcome: the one before the grid's, if any."""
        return self.cause if self.before is None else self.before.limiting


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """The longest cached prefix of a prompt, pinned: the caller owes a release of `pages`."""

    length: int
    segments: Int32  # i32[W, 4], positions 0..length-1 in order, each slot at its birth
    end: MatchEnd
    resume: int = 0  # recurrent layers: position of the deepest snapshot at or before the end
    state: int | None = None  # its slot, with a reference for the caller; None where there is none
    place: Place | None = None  # where the index has these tokens

    @property
    def pages(self) -> Int32:
        """i32[W], the references taken for the caller, one for each segment row."""
        return self.segments[:, PAGE]
