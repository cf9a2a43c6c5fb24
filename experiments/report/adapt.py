"""The report of an adaptation: divergence and perplexity before and after, and the way there."""

from __future__ import annotations

import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from experiments.config import TINY_MODEL
from experiments.records import Record, RunDirectory
from experiments.report.answer import figure, spread
from experiments.report.columns import interval
from experiments.report.page import signed
from experiments.report.plots import COLOURS, INK, STYLE, blank_figure, few_ticks, legend_below
from experiments.report.tables import Table, write_tables
from jaxkv.divergence import standard_error

_BEFORE, _AFTER = COLOURS[0], COLOURS[5]


def write_adapt_report(directory: RunDirectory, console: Console) -> None:
    """Everything in it comes from `cases.jsonl` and `config.json`, so it can be redone."""
    document: dict[str, Any] = directory.read_config() or {}
    records = [r for r in directory.records() if r["status"] == "ok"]
    steps = [r for r in records if r["policy"] == "train"]
    pairs = paired(records)
    figures = {}
    with matplotlib.rc_context(STYLE):
        if pairs:
            figures["held_out"] = (
                "KL of each held-out edit before and after; below the diagonal it became smaller.",
                _held_out(pairs),
            )
        if steps:
            figures["training"] = (
                "Losses of the training batches before each step: KL of reused against exact state, and the "
                "NLL of the true text from exact state.",
                _training(steps),
            )
    config = document["config"]
    write_tables(
        directory,
        document,
        answer=answer(pairs, document),
        note=f"Reused answers ({config['policy']}) against exact answers of the same weights, through the "
        f"engine, {config['continuation']} teacher-forced tokens behind each edit of {config['context']} "
        f"tokens; the last {config['held_share']:.0%} of the corpus is held out. Intervals are 95% bootstrap "
        "intervals of paired differences over edits.",
        tables=[table for table in (_overall(pairs), _by(pairs), _setting(document, steps)) if table.rows],
        rows=[_flat(a, b) for a, b in pairs],
        figures=figures,
        console=console,
    )


def paired(records: list[Record]) -> list[tuple[Record, Record]]:
    """Held-out edits that were judged before and after."""
    before = {r["case"]: r for r in records if r["policy"] == "before"}
    return [(before[r["case"]], r) for r in records if r["policy"] == "after" and r["case"] in before]


def answer(pairs: list[tuple[Record, Record]], document: dict[str, Any]) -> str:
    """One sentence: what adaptation did to divergence, and to plain perplexity."""
    if not pairs:
        return "No held-out edit was judged before and after."
    config, model = document["config"], document["model"]["name"]
    kl = [[r["divergence"]["kl"]["mean"] for r in side] for side in zip(*pairs, strict=True)]
    nll = [[r["plain_nll"] for r in side] for side in zip(*pairs, strict=True)]
    change, low, high = interval(_minus(kl))
    ratio = [math.exp(x) for x in interval(_minus(nll))]
    told = "not told from no change" if low <= 0 <= high else "lower" if high < 0 else "higher"
    before, after = (figure(float(np.mean(side))) for side in kl)
    text = (
        f"On {model}, {config['steps']} steps of rank {config['rank']} bring the mean KL of "
        f"{config['policy']} on {len(pairs)} held-out edits from {before} to {after} nats ({signed(change)} "
        f"[{signed(low)}, {signed(high)}], {told}), and plain perplexity of held-out text to {ratio[0]:.4f} "
        f"[{ratio[1]:.4f}, {ratio[2]:.4f}] of what it was"
    )
    if model == TINY_MODEL:
        text = f"Smoke run with random weights, so the figures mean nothing beyond it: {text}"
    return text + "."


def _minus(sides: list[list[float]]) -> list[float]:
    return [after - before for before, after in zip(*sides, strict=True)]


_FIGURES = {
    "KL(exact‖reused), nats": ("divergence", "kl", "mean"),
    "KL p95, nats": ("divergence", "kl", "p95"),
    "top-1 agreement": ("divergence", "top1_agreement"),
    "NLL lost to reuse, nats": ("divergence", "delta_nll"),
    "plain NLL, nats a token": ("plain_nll",),
}


def _overall(pairs: list[tuple[Record, Record]]) -> Table:
    rows = []
    for name, path in _FIGURES.items() if pairs else ():
        sides = [[_at(r, path) for r in side] for side in zip(*pairs, strict=True)]
        mean, low, high = interval(_minus(sides))
        cells = [f"{np.mean(side):.4g} ± {spread(standard_error(np.array(side)))}" for side in sides]
        rows.append((name, *cells, f"{signed(mean)} [{signed(low)}, {signed(high)}]"))
    return Table(
        title="Before and after",
        columns=("figure", "before", "after", "difference"),
        rows=tuple(rows),
        note="± is the standard error over edits. The NLL lost to reuse is that of the true continuation "
        "under the reused state, minus that under the exact state.",
    )


def _by(pairs: list[tuple[Record, Record]]) -> Table:
    groups: dict[str, list[tuple[Record, Record]]] = {}
    for pair in pairs:
        place = "head" if pair[0]["position"] == 0 else f"{100 * pair[0]['position']:.4g}%"
        groups.setdefault(f"{pair[0]['edit']}, {place}", []).append(pair)
    rows = []
    for name, group in sorted(groups.items()):
        kl = [[r["divergence"]["kl"]["mean"] for r in side] for side in zip(*group, strict=True)]
        cells = [figure(float(np.mean(side))) for side in kl]
        rows.append((name, str(len(group)), *cells, signed(float(np.mean(_minus(kl))))))
    return Table(
        title="KL by edit",
        columns=("edit, place", "edits", "before", "after", "difference"),
        rows=tuple(rows),
    )


def _setting(document: dict[str, Any], steps: list[Record]) -> Table:
    seconds = [r["seconds"] for r in steps]
    rows = [
        ("tokens held out", f"{document['held_out_tokens']:,}"),
        ("steps", str(len(steps))),
        ("median step", f"{np.median(seconds):.2f} s" if seconds else "–"),
        ("all steps", f"{sum(seconds):,.0f} s, compilation included" if seconds else "–"),
    ]
    return Table(title="Training", columns=("what", "value"), rows=tuple(rows), terminal=())


def _at(record: Record, path: tuple[str, ...]) -> float:
    value: Any = record
    for key in path:
        value = value[key]
    return float(value)


def _flat(before: Record, after: Record) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: before[name] for name in ("case", "edit", "position", "relocated", "forwarded")
    }
    for side, record in (("before", before), ("after", after)):
        for path in _FIGURES.values():
            row[f"{'_'.join(p for p in path if p != 'divergence')}_{side}"] = _at(record, path)
    return row


def _held_out(pairs: list[tuple[Record, Record]]) -> Figure:
    plot = blank_figure(3.9)
    axes = plot.add_subplot()
    kl = np.array([[r["divergence"]["kl"]["mean"] for r in pair] for pair in pairs])
    low = max(kl[kl > 0].min(initial=1.0) / 2, 1e-12)
    kl = np.maximum(kl, low)
    heads = np.array([pair[0]["position"] == 0 for pair in pairs])
    ends = np.array([low, kl.max() * 2])
    axes.plot(ends, ends, color=INK, lw=0.8, ls=(0, (4, 3)), alpha=0.7)
    groups = ((heads, "o", _AFTER, "edit at the head"), (~heads, "s", COLOURS[1], "edit behind it"))
    for which, marker, colour, label in groups:
        if which.any():
            axes.plot(*kl[which].T, ls="", marker=marker, color=colour, label=label, alpha=0.9)
    axes.set(
        xscale="log", yscale="log", xlabel="KL before, nats per token", ylabel="KL after, nats per token"
    )
    few_ticks(axes)
    handles, labels = axes.get_legend_handles_labels()
    legend_below(plot, dict(zip(labels, handles, strict=True)))
    return plot


def _training(steps: list[Record]) -> Figure:
    plot = blank_figure(4.0)
    upper, lower = plot.subplots(2, 1, sharex=True)
    at = [int(r["case"].removeprefix("step-")) for r in steps]
    upper.plot(at, [r["kl"] for r in steps], color=_AFTER, marker="o", ms=3)
    upper.set(yscale="log", ylabel="KL, nats")
    lower.plot(at, [r["nll"] for r in steps], color=_BEFORE, marker="o", ms=3)
    lower.set(xlabel="step", ylabel="plain NLL, nats")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    few_ticks(upper)
    return plot
