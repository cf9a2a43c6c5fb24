"""Reads the collectives of a compiled program: which, how many, and how many bytes each moves."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (.+?) ({'|'.join(KINDS)})(-start)?\(", re.MULTILINE)
_SHAPE = re.compile(r"\b([a-z]+)(\d+)[a-z0-9]*\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    kind: str
    nbytes: int  # of its result on one device

    def link_bytes(self, devices: int) -> float:
        """Bytes that a device sends in a ring over `devices` (Patarasuk and Yuan, 2009)."""
        share = (devices - 1) / devices
        return {"all-reduce": 2 * share, "reduce-scatter": devices * share}.get(
            self.kind, share
        ) * self.nbytes


def collectives(hlo: str) -> list[Collective]:
    """All collectives in the text of a compiled program, `Compiled.as_text()`, in its order.

    An instruction in the body of a loop counts once.
    """
    found = []
    for match in _INSTRUCTION.finditer(hlo):
        shapes = [_nbytes(*shape.groups()) for shape in _SHAPE.finditer(match[1])]
        # An asynchronous start of these gives its operand, its result and maybe a context.
        paired = match[3] and match[2] in ("all-gather", "collective-permute", "reduce-scatter")
        found.append(Collective(match[2], shapes[1] if paired and len(shapes) > 1 else sum(shapes)))
    return found


def counts(found: Iterable[Collective]) -> dict[str, int]:
    """How many there are of each kind."""
    return dict(Counter(each.kind for each in found))


def _nbytes(_: str, bits: str, dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d) * int(bits) // 8
