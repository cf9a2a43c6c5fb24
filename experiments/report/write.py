"""Writes a run's report: summary.csv, plots, report.html, and the gist on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
from rich.console import Console

from experiments.report.page import render_page
from experiments.report.plots import STYLE, draw_all
from experiments.report.summary import summarize, to_csv
from experiments.report.terminal import print_summary

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig
    from experiments.records import RunDirectory

_PNG_DPI = 200


def write_report(directory: RunDirectory, config: ExperimentConfig, console: Console) -> None:
    """Everything in the report comes from `cases.jsonl` and `config.json`, so it can be redone."""
    document: dict[str, Any] = directory.read_config() or {}
    summary = summarize(directory.records(), config.policies)
    directory.write("summary.csv", to_csv(summary))
    figures = draw_all(summary)
    plots = directory.path / "plots"
    plots.mkdir(exist_ok=True)
    for name, figure in figures.items():
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
            figure.savefig(plots / f"{name}.png", dpi=_PNG_DPI, facecolor="white")
            figure.savefig(plots / f"{name}.svg", facecolor="white", metadata={"Date": None})
    directory.write("report.html", render_page(summary, document, figures))
    print_summary(summary, document["model"]["name"], directory.path, console)
