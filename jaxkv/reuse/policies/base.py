"""What a policy sees (`Edit`), what it answers (`Selection`), and the protocol in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.reuse.diff import Span
from jaxkv.reuse.probes import Probe
from jaxkv.typing import Bool, Int32

Form = Literal["view", "copy", "composed"]
FORMS = ("view", "copy", "composed")
States = Literal["fork", "replay", "compose"]
STATES = ("fork", "replay", "compose")
MIN_SPAN = 64
NO_TOKENS: Int32 = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """How a cached sequence became the requested one."""

    old_length: int
    new_length: int
    exact_length: int  # leading tokens of the source whose KV is exact
    prefix: int  # leading tokens that are the same and whose KV is kept as it stands
    survivors: tuple[Span, ...]  # behind the prefix, sorted by new position, disjoint in both
    old_tokens: Int32 = dataclasses.field(
        default_factory=lambda: NO_TOKENS, repr=False, compare=False
    )  # i32[old_length]
    tokens: Int32 = dataclasses.field(
        default_factory=lambda: NO_TOKENS, repr=False, compare=False
    )  # i32[new_length]
    evidence: Mapping[Probe, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def deleted(self) -> Bool:
        """bool[old_length]: which cached tokens do not survive."""
        gone = np.ones(self.old_length, np.bool_)
        gone[: self.prefix] = False
        for span in self.survivors:
            gone[span.old : span.old + span.length] = False
        return gone

    @property
    def inserted(self) -> Bool:
        """bool[new_length]: which requested tokens are not cached."""
        fresh = np.ones(self.new_length, np.bool_)
        fresh[: self.prefix] = False
        for span in self.survivors:
            fresh[span.new : span.new + span.length] = False
        return fresh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """A policy's answer. Positions are those of the new sequence."""

    keep: tuple[Span, ...] = ()
    recompute: tuple[tuple[str, Int32], ...] = ()  # (cause, positions); earlier causes win
    drop: tuple[Span, ...] = ()  # survivors that get no KV at all
    rotate: bool = True
    form: Form = "view"
    exact: bool = False  # also of the prefix, keep only what is exact in the source
    append: Int32 | None = None  # leave the cached sequence as it is and append these tokens instead
    ask: Probe | None = None  # not an answer yet: run this, then ask again
    take: Policy | None = None  # the answer is that of this policy, tried before with a `Trial`
    states: States = "fork"  # what recurrent layers do, where something stale is kept


@runtime_checkable
class Policy(Protocol):
    """Decides what an edit may reuse."""

    @property
    def exact(self) -> bool:
        """Whether only KV that is exact in its source may be kept."""
        ...

    @property
    def min_span(self) -> int:
        """Shortest run of tokens that counts as surviving: shorter ones are coincidence."""
        ...

    def select(self, edit: Edit) -> Selection:
        """Returns what to keep and what to recompute, or a probe to run first."""
        ...


def ranges(starts: list[int], ends: list[int]) -> Int32:
    """All positions of the half-open ranges, in order, i32[n]."""
    parts = [np.arange(a, b) for a, b in zip(starts, ends, strict=True)]
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def require(what: str, value: Any, least: int) -> None:
    """Raises ConfigError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{what} is {value!r}, expected a whole number of at least {least}")


def require_share(what: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{what} is {value!r}, expected a share above 0 and at most 1")


def named(name: str, value: Any, skip: tuple[str, ...] = ()) -> str:
    """`name`, with the fields of a dataclass that differ from their defaults in parentheses."""
    changed = {
        f.name: getattr(value, f.name)
        for f in dataclasses.fields(value)
        if f.name not in skip and getattr(value, f.name) != f.default
    }
    return name + ("(" + ",".join(f"{k}={v}" for k, v in changed.items()) + ")" if changed else "")
