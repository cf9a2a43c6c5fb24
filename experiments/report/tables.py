"""A report made of tables: one definition for the terminal, the CSV file and the HTML page."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import rich.table
from matplotlib.figure import Figure
from rich.console import Console

from experiments.records import RunDirectory
from experiments.report.page import inline_svg, render, setting_of
from experiments.report.plots import STYLE

_PNG_DPI = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, the first column naming the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    terminal: tuple[int, ...] | None = None  # columns that the terminal shows; None: all, (): none

    def print(self, console: Console) -> None:
        """Prints the table's terminal columns: they are to fit 80 characters."""
        shown = range(len(self.columns)) if self.terminal is None else self.terminal
        table = rich.table.Table(
            title=self.title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0)
        )
        for number in shown:
            table.add_column(self.columns[number], justify="right" if number else "left", no_wrap=not number)
        for row in self.rows:
            table.add_row(*(row[number] for number in shown))
        if self.note:
            table.caption, table.caption_justify = self.note, "left"
        console.print(table)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a row under the keys of the first; None is empty."""
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    return out.getvalue()


def write_tables(
    directory: RunDirectory,
    document: Mapping[str, Any],
    *,
    answer: str,
    note: str,
    tables: Sequence[Table],
    rows: Sequence[Mapping[str, Any]],
    figures: Mapping[str, tuple[str, Figure]],
    console: Console,
) -> None:
    """Writes summary.csv, plots and report.html, and prints the gist.

    Args:
      directory: of the run.
      document: contents of its config.json.
      answer: the sentence that the report leads with.
      note: what it is compared with.
      tables: in the order of the report; plots come behind the first.
      rows: of the CSV file.
      figures: name to caption and figure.
      console: where the gist goes.
    """
    config = document["config"]
    directory.write("summary.csv", to_csv(rows))
    save_plots(directory.path, {name: figure for name, (_, figure) in figures.items()})
    page = render(
        "tables.html",
        heading=(config["experiment"], config["name"], document["created"][:10]),
        answer=answer,
        setting=setting_of(document),
        note=note,
        tables=tables,
        plots=[(name, caption, inline_svg(name, figure)) for name, (caption, figure) in figures.items()],
    )
    directory.write("report.html", page)
    print_tables(answer, tables, directory.path / "report.html", console)


def print_tables(answer: str, tables: Sequence[Table], page: Path, console: Console) -> None:
    """The gist in the terminal: the answer, what fits of the tables, and where the page is."""
    console.print()
    console.print(answer, highlight=False, style="bold")
    for table in tables:
        if table.terminal != ():
            console.print()
            table.print(console)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)


def save_plots(path: Path, figures: Mapping[str, Figure]) -> None:
    """Writes `plots/<name>.png` and `.svg` in a run directory."""
    plots = path / "plots"
    plots.mkdir(exist_ok=True)
    for name, figure in figures.items():
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
            figure.savefig(plots / f"{name}.png", dpi=_PNG_DPI, facecolor="white")
            figure.savefig(plots / f"{name}.svg", facecolor="white", metadata={"Date": None})
