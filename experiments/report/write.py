"""Writes a run's report: summary.csv, plots, report.html, and the gist on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.records import require_complete
from experiments.report.page import render_page
from experiments.report.plots import draw_all
from experiments.report.summary import summarize, to_csv
from experiments.report.tables import save_plots
from experiments.report.terminal import print_summary

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig
    from experiments.records import RunDirectory


def write_report(directory: RunDirectory, config: ExperimentConfig, console: Console) -> None:
    """Everything in the report comes from `cases.jsonl` and `config.json`, so it can be redone."""
    document: dict[str, Any] = directory.read_config() or {}
    records = directory.records()
    require_complete(records, directory.cases_path)
    summary = summarize(records, config.policies)
    directory.write("summary.csv", to_csv(summary))
    figures = draw_all(summary)
    save_plots(directory.path, figures)
    directory.write("report.html", render_page(summary, document, figures))
    print_summary(summary, document["model"]["name"], directory.path, console)
