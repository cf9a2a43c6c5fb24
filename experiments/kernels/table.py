"""The table that a run prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from experiments.kernels.bench import Row


def print_table(rows: list[Row], console: Console) -> None:
    """Prints measured rows, and below them why others were not."""
    table = Table(title="Kernels: median time of a call, chained inside one jit")
    for name in ("case", "candidate"):
        table.add_column(name, no_wrap=True)
    for name in ("µs", "±", "GB/s", "% of copy", "TFLOP/s", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if row.status in ("ok", "wrong"):
            if previous not in (None, row.case):
                table.add_section()
            table.add_row("" if previous == row.case else row.case, row.candidate, *_figures(row))
            previous = row.case
    console.print(table)
    for text in dict.fromkeys(
        f"{row.candidate} {row.status}: {row.reason}" for row in rows if row.status in ("skipped", "failed")
    ):
        console.print(text, highlight=False, soft_wrap=True)


def _figures(row: Row) -> list[str]:
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.seconds is None:
        return ["wrong", "", "", "", "", error]
    return [
        f"{row.seconds * 1e6:,.1f}",
        f"{(row.spread or 0) * 1e6:,.1f}",
        f"{(row.bytes_per_second or 0) / 1e9:,.1f}",
        "" if row.of_copy is None else f"{row.of_copy:.1%}",
        f"{(row.flops_per_second or 0) / 1e12:,.3f}" if row.flops else "",
        error,
    ]
