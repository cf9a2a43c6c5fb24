"""Suffix Cache Reuse, what may be combined with it, and its two controls."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from jaxkv.errors import ConfigError
from jaxkv.reuse.diff import Span
from jaxkv.reuse.policies.base import (
    FORMS,
    MIN_SPAN,
    STATES,
    Edit,
    Form,
    Selection,
    States,
    named,
    ranges,
    require,
)
from jaxkv.reuse.probes import Attention, Deviation, Encoded, Probe, Trial
from jaxkv.typing import Int32

_PROBES = (Attention, Deviation, Encoded, Trial)


class Repair(abc.ABC):
    """Names positions that Suffix Cache Reuse recomputes although they survived.

    Combine repairs with `SCR() | FirstK(32) | Sinks(4)`; one on its own means `SCR() | repair`.
    """

    cause: ClassVar[str] = "repair"  # under which the ledger counts its work
    min_span: ClassVar[int] = MIN_SPAN

    @abc.abstractmethod
    def positions(self, edit: Edit, kept: tuple[Span, ...]) -> Int32 | Probe:
        """Positions of the new sequence, i32[n], any order; or a probe whose answer it needs first."""

    @property
    def exact(self) -> bool:
        return False

    def select(self, edit: Edit) -> Selection:
        return (SCR() | self).select(edit)

    def __or__(self, other: Repair) -> SCR:
        return (SCR() | self) | other


@dataclasses.dataclass(frozen=True)
class SCR:
    """Suffix Cache Reuse (arXiv 2609.37725 §4.3): keep the longest surviving spans, moved by R(delta).

    Inserted tokens and the last `tail` tokens of each span are computed. `form="view"` leaves keys
    where they are and rotates queries by -delta; `form="copy"` writes R(delta) K into fresh pages,
    always from the keys as born. Combine it with repairs: `SCR() | FirstK(32) | Sinks(4)`.

    Recurrent layers have no suffix to move. `states="fork"`, the paper's, takes over the state behind the
    old text, and what is computed goes on from there: as cheap as without such layers, and stale.
    `states="replay"` starts from the nearest snapshot before the edit and runs every token behind it, with
    attention over the relocated keys: it costs what the exact answer does, and shows what of the divergence
    is the state's. `states="compose"` starts there too, but passes over what of a kept span lies between two
    snapshots: what these tokens made of the old state, they are taken to make of the new one.
    """

    form: Form = "view"
    max_spans: int = 6
    min_span: int = MIN_SPAN
    tail: int = 16
    repairs: tuple[Repair, ...] = ()
    rotate: bool = True
    states: States = "fork"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"form is '{self.form}', expected one of {', '.join(FORMS)}")
        if self.states not in STATES:
            raise ConfigError(f"states is '{self.states}', expected one of {', '.join(STATES)}")
        require("max_spans", self.max_spans, 1)
        require("min_span", self.min_span, 1)
        require("tail", self.tail, 0)
        if not isinstance(self.repairs, tuple) or not all(isinstance(r, Repair) for r in self.repairs):
            raise ConfigError(f"repairs are {self.repairs!r}, expected a tuple of repairs such as FirstK")

    @property
    def exact(self) -> bool:
        return False

    def select(self, edit: Edit) -> Selection:
        longest = sorted(edit.survivors, key=lambda s: (-s.length, s.new))[: self.max_spans]
        kept = tuple(sorted((s for s in longest if s.length >= self.min_span), key=lambda s: s.new))
        ends = [s.new + s.length for s in kept]
        tails = ranges([max(e - self.tail, s.new) for e, s in zip(ends, kept, strict=True)], ends)
        causes: list[tuple[str, Int32]] = []
        for repair in self.repairs:
            found = repair.positions(edit, kept)
            if isinstance(found, _PROBES):
                return Selection(ask=found)
            causes.append((repair.cause, found))
        return Selection(
            keep=kept,
            recompute=(*causes, ("tail", tails)),
            rotate=self.rotate,
            form=self.form,
            states=self.states,
        )

    def __or__(self, repair: Repair) -> SCR:
        if not isinstance(repair, Repair):
            return NotImplemented
        return dataclasses.replace(self, repairs=(*self.repairs, repair))

    def __str__(self) -> str:
        name = named("scr" if self.rotate else "no_rotation", self, skip=("repairs", "rotate"))
        return "|".join([name, *(str(r) for r in self.repairs)])


def NoRotation(form: Form = "view", max_spans: int = 6, min_span: int = MIN_SPAN, tail: int = 16) -> SCR:
    """Negative control: `SCR` whose keys stay rotated for their old positions."""
    return SCR(form=form, max_spans=max_spans, min_span=min_span, tail=tail, rotate=False)


def Composed(max_spans: int = 6, min_span: int = MIN_SPAN, tail: int = 16) -> SCR:
    """Negative control: `SCR` that rotates its last copy again, in the pages' dtype, at every move.

    What a cache does that keeps only rotated keys. Rounding adds up over moves; `SCR` in either form
    starts from the keys as born instead.
    """
    return SCR(form="composed", max_spans=max_spans, min_span=min_span, tail=tail)
