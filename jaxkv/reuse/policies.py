"""What to keep of a cached sequence when its tokens change. A policy is a value; `plan` applies it.

A policy looks at an `Edit` and answers with a `Selection`: which surviving spans to keep and which
positions to recompute although they survived. To add one: a frozen dataclass with `select`, and its
name in `POLICIES`.

    SCR() | FirstK(32) | Sinks(4)        # keep spans, repair behind every seam, renew the sink
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxkv.errors import ConfigError, nearest
from jaxkv.reuse.diff import Span
from jaxkv.typing import Int32

Form = Literal["view", "copy"]
MIN_SPAN = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """How a cached sequence became the requested one."""

    old_length: int
    new_length: int
    exact_length: int  # leading tokens of the source whose KV is exact
    prefix: int  # leading tokens that are the same and whose KV is kept as it stands
    survivors: tuple[Span, ...]  # behind the prefix, sorted by new position, disjoint in both


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """A policy's answer. Positions are those of the new sequence."""

    keep: tuple[Span, ...] = ()
    recompute: tuple[tuple[str, Int32], ...] = ()  # (cause, positions); earlier causes win
    drop: tuple[Span, ...] = ()  # survivors that get no KV at all
    rotate: bool = True
    form: Form = "view"


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
        """Returns what to keep and what to recompute."""
        ...


class Repair(Protocol):
    """Names positions that an approximate policy recomputes although they survived."""

    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32:
        """Positions of the new sequence, i32[n], any order."""
        ...


def _ranges(starts: list[int], ends: list[int]) -> Int32:
    parts = [np.arange(a, b) for a, b in zip(starts, ends, strict=True)]
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def _require(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{what} is {value!r}, expected a whole number of at least {least}")


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


@dataclasses.dataclass(frozen=True)
class SCR:
    """Suffix Cache Reuse (arXiv 2609.37725 §4.3): keep the longest surviving spans, moved by R(delta).

    Inserted tokens and the last `tail` tokens of each span are computed. `form="view"` leaves keys
    where they are and rotates queries by -delta; `form="copy"` writes R(delta) K into fresh pages.
    Combine it with repairs: `SCR() | FirstK(32) | Sinks(4)`.
    """

    form: Form = "view"
    max_spans: int = 6
    min_span: int = MIN_SPAN
    tail: int = 16
    repairs: tuple[FirstK | Sinks, ...] = ()
    rotate: bool = True

    def __post_init__(self) -> None:
        if self.form not in ("view", "copy"):
            raise ConfigError(f"form is '{self.form}', expected 'view' or 'copy'")
        _require("max_spans", self.max_spans, 1)
        _require("min_span", self.min_span, 1)
        _require("tail", self.tail, 0)
        if not isinstance(self.repairs, tuple) or not all(
            isinstance(repair, FirstK | Sinks) for repair in self.repairs
        ):
            raise ConfigError(f"repairs are {self.repairs!r}, expected a tuple of FirstK and Sinks")

    @property
    def exact(self) -> bool:
        return False

    def select(self, edit: Edit) -> Selection:
        longest = sorted(edit.survivors, key=lambda s: (-s.length, s.new))[: self.max_spans]
        kept = tuple(sorted((s for s in longest if s.length >= self.min_span), key=lambda s: s.new))
        ends = [s.new + s.length for s in kept]
        tails = _ranges([max(e - self.tail, s.new) for e, s in zip(ends, kept, strict=True)], ends)
        causes = [(repair.cause, repair.positions(edit, kept)) for repair in self.repairs]
        return Selection(
            keep=kept,
            recompute=(*causes, ("tail", tails)),
            rotate=self.rotate,
            form=self.form,
        )

    def __or__(self, repair: FirstK | Sinks) -> SCR:
        if not isinstance(repair, FirstK | Sinks):
            return NotImplemented
        return dataclasses.replace(self, repairs=(*self.repairs, repair))

    def __str__(self) -> str:
        base = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("repairs", "rotate") and getattr(self, f.name) != f.default
        }
        name = "scr" if self.rotate else "no_rotation"
        if base:
            name += "(" + ",".join(f"{k}={v}" for k, v in base.items()) + ")"
        return "|".join([name, *(str(r) for r in self.repairs)])


def NoRotation(form: Form = "view", max_spans: int = 6, min_span: int = MIN_SPAN, tail: int = 16) -> SCR:
    """Negative control: `SCR` whose keys stay rotated for their old positions."""
    return SCR(form=form, max_spans=max_spans, min_span=min_span, tail=tail, rotate=False)


class _AsPolicy:
    """Lets a repair be used on its own: it then means `SCR() | repair`."""

    min_span = MIN_SPAN

    @property
    def exact(self) -> bool:
        return False

    def select(self, edit: Edit) -> Selection:
        return (SCR() | self).select(edit)  # type: ignore[operator]

    def __or__(self, other: FirstK | Sinks) -> SCR:
        return (SCR() | self) | other  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class FirstK(_AsPolicy):
    """Recompute the first `k` tokens behind each seam (EPIC, 2410.15332; EDITLOCAL, 2609.17983)."""

    k: int = 32
    cause = "first_k"

    def __post_init__(self) -> None:
        _require("first_k", self.k, 1)

    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32:  # noqa: ARG002
        return _ranges([s.new for s in kept], [s.new + min(self.k, s.length) for s in kept])

    def __str__(self) -> str:
        return f"first_k({self.k})"


@dataclasses.dataclass(frozen=True)
class Sinks(_AsPolicy):
    """Recompute the first `s` positions when the head changed: attention sinks (StreamingLLM, 2309.17453)."""

    s: int = 4
    cause = "sinks"

    def __post_init__(self) -> None:
        _require("sinks", self.s, 1)

    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32:  # noqa: ARG002
        return np.arange(edit.prefix, max(min(self.s, edit.new_length), edit.prefix), dtype=np.int32)

    def __str__(self) -> str:
        return f"sinks({self.s})"


@dataclasses.dataclass(frozen=True)
class Forget:
    """Nothing that attended deleted text survives: exact from the first deleted token on."""

    min_span = MIN_SPAN

    @property
    def exact(self) -> bool:
        return True

    def select(self, edit: Edit) -> Selection:
        covered = np.zeros(edit.old_length, bool)
        covered[: edit.prefix] = True
        for s in edit.survivors:
            covered[s.old : s.old + s.length] = True
        first_deleted = edit.old_length if covered.all() else int(np.argmin(covered))
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


_SIZES = ("form", "max_spans", "min_span", "tail")
# Name to constructor and the arguments that a name may carry, in order.
POLICIES: dict[str, tuple[Callable[..., Policy], tuple[str, ...]]] = {
    "exact": (Exact, ()),
    "drop": (Drop, ()),
    "no_rotation": (NoRotation, _SIZES),
    "scr": (SCR, _SIZES),
    "first_k": (FirstK, ("k",)),
    "sinks": (Sinks, ("s",)),
    "forget": (Forget, ()),
}
_FORM = re.compile(r"(\w+)\s*(?:\(([^()]*)\))?", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,9}")


def policy_from_name(text: str) -> Policy:
    """Reads what `str(policy)` writes: "exact", "scr(form=copy)", "scr|first_k(32)|sinks(4)".

    Raises:
      ConfigError: an unknown policy, argument or value.
    """
    policies = [_parse_one(part.strip()) for part in text.split("|")]
    result = policies[0]
    for other in policies[1:]:
        if not isinstance(result, SCR | FirstK | Sinks) or not isinstance(other, FirstK | Sinks):
            raise ConfigError(f"policy '{text}' combines what does not combine, expected scr|repair|…")
        result = result | other
    return result


def _parse_one(text: str) -> Policy:
    match = _FORM.fullmatch(text)
    name = match[1] if match else text.partition("(")[0]
    if name not in POLICIES:
        known = list(POLICIES)
        raise ConfigError(
            f"policy '{name}' is unknown, expected one of {', '.join(known)}{nearest(name, known)}"
        )
    if match is None:
        raise ConfigError(
            f"policy '{text}' is malformed, expected {name}, or its arguments in one parenthesis"
        )
    make, allowed = POLICIES[name]
    arguments: dict[str, int | str] = {}
    parts = [part.strip() for part in (match[2] or "").split(",")] if match[2] else []
    for number, part in enumerate(parts):
        key, equals, value = (piece.strip() for piece in part.rpartition("="))
        if not equals:
            key = allowed[number] if number < len(allowed) else ""
        if key not in allowed or key in arguments:
            expected = ", ".join(allowed) or "none"
            raise ConfigError(f"policy '{text}' has argument '{part}', expected arguments: {expected}")
        if key == "form":
            arguments[key] = value
        elif _NUMBER.fullmatch(value):
            arguments[key] = int(value)
        else:
            raise ConfigError(f"policy '{text}' has {key} '{value}', expected arguments that are numbers")
    return make(**arguments)
