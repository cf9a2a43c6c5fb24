"""Reads the table of docs/numerics.md, the one place where tolerances are set."""

from __future__ import annotations

import functools
from pathlib import Path

_PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"


@functools.cache
def _table() -> dict[str, dict[str, float]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    header = next(i for i, row in enumerate(rows) if row[0] == "name")
    dtypes = rows[header][2:]
    return {
        row[0]: {dtype: float(cell) for dtype, cell in zip(dtypes, row[2:], strict=True) if cell}
        for row in rows[header + 2 :]
    }


def tolerance(name: str, dtype: str = "float32") -> float:
    """The absolute tolerance of a quantity named in docs/numerics.md."""
    return _table()[name][dtype]
