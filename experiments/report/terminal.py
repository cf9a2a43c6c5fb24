"""The gist of a run in the terminal: the answer, a table, and where the rest is."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.report.answer import answer, figure, multiple, spread
from experiments.report.page import relative
from experiments.report.summary import Summary


def print_summary(summary: Summary, model: str, path: Path, console: Console) -> None:
    """Prints what the report says, in a form that fits 80 columns."""
    console.print()
    console.print(answer(summary, model), highlight=False, style="bold")
    console.print()
    if summary.rows:
        console.print(_table(summary))
        if summary.noise_cases:
            equal = ", bitwise equal" if summary.noise == 0 else ""
            console.print(
                f"Noise floor (exact against exact under another chunking): "
                f"{figure(summary.noise)} nats{equal}. ± is the standard error over cases.",
                highlight=False,
            )
    if summary.pages:
        console.print()
        console.print(_pages(summary))
    if summary.failures:
        count = len(summary.failures)
        case, policy, error = summary.failures[0]
        console.print(
            f"{count} measurement{'' if count == 1 else 's'} failed, first {case} under {policy}: "
            f"{error}. Run the same command to try again.",
            style="red",
            highlight=False,
            markup=False,
        )
    console.print(f"Report: {path / 'report.html'}", highlight=False, soft_wrap=True)
    console.print(f"Run directory: {path}", highlight=False, soft_wrap=True)


def _pages(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("pages", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes", "dtype KL", "reuse KL", "both KL", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary.pages:
        table.add_row(
            row.dtype,
            row.policy,
            f"{row.token_bytes:,.0f}",
            figure(row.pages_kl),
            figure(row.kl),
            figure(row.both_kl),
            f"{row.both_top1:.1%}",
        )
    table.caption = (
        "KL in nats: of the dtype alone and of both against exact over float32 pages, of reuse against "
        "exact over the same pages. bytes: KV of a token."
    )
    table.caption_justify = "left"
    return table


def _table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in ("KL, nats", "× noise", "top-1", "ΔNLL", "forwarded", "FLOPs", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary.rows:
        error = "" if math.isnan(row.kl_se) else f" ±{spread(row.kl_se)}"
        table.add_row(
            row.policy,
            figure(row.kl) + error,
            multiple(row.noise_multiple),
            f"{row.top1:.1%}",
            f"{row.delta_nll:+.1g}" if abs(row.delta_nll) < 0.01 else f"{row.delta_nll:+.2f}",
            f"{row.forwarded:,.0f}",
            relative(row.flops_relative),
            f"{row.ttft_ms:,.0f}",
        )
    table.caption = "FLOPs: relative to exact prefix reuse. ms: from edit to first token."
    table.caption_justify = "left"
    return table
