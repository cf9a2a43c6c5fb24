"""compare.html: what changed between runs, by policy, with paired bootstrap intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console

from experiments.compare import Comparison, Difference
from experiments.config import TINY_MODEL
from experiments.records import RunDirectory
from experiments.report.answer import figure
from experiments.report.page import inline_svg, relative, render, setting_of, signed
from experiments.report.plots import COLOURS, INK, MARKERS, STYLE, blank_figure, few_ticks, legend_below
from experiments.report.tables import Table, print_tables, save_plots, to_csv


def write_comparison(directory: RunDirectory, comparison: Comparison, console: Console) -> None:
    """Writes compare.html, compare.csv and plots, and prints the gist."""
    rows = [{**dataclasses.asdict(row), "decided": row.decided} for row in comparison.rows]
    directory.write("compare.csv", to_csv([_clean(row) for row in rows]))
    with matplotlib.rc_context(STYLE):
        figures = {"compare_kl": levels(comparison), "compare_difference": differences(comparison.rows)}
    save_plots(directory.path, figures)
    sentence, tables = answer(comparison), _tables(comparison)
    captions = {
        "compare_kl": "KL of each policy in each run, over the cases that both finished. The dashed line is "
        "the higher noise floor, left of it nothing is told apart. What is 0 is drawn at the left edge.",
        "compare_difference": "Paired difference of the KL to the first run, mean and 95% bootstrap interval "
        "over cases; right of 0 is worse. Filled: the interval leaves out 0. The scale is linear near 0 and "
        "logarithmic outside.",
    }
    base = comparison.runs[0]
    page = render(
        "tables.html",
        heading=("compare", " against ".join(_labels(comparison)), base.document["created"][:10]),
        answer=sentence,
        setting=_setting(comparison),
        note=f"Every difference is paired: the same case under the same policy, minus its figure in "
        f"'{base.label}'. Intervals are 95% bootstrap intervals over cases, each for itself: of twenty "
        "policies that changed nothing, one is expected to look changed.",
        tables=tables,
        plots=[(name, captions[name], inline_svg(name, plot)) for name, plot in figures.items()],
    )
    directory.write("compare.html", page)
    print_tables(sentence, tables, directory.path / "compare.html", console)


def _setting(comparison: Comparison) -> list[tuple[str, str]]:
    """That of the first run, and of the others what differs from it."""
    first = setting_of(comparison.runs[0].document)
    rows = [(f"{comparison.runs[0].label}: {term}", text) for term, text in first]
    for run in comparison.runs[1:]:
        rows += [
            (f"{run.label}: {t}", text) for t, text in setting_of(run.document) if (t, text) not in first
        ]
    return rows


def answer(comparison: Comparison) -> str:
    """One sentence: where the KL changed, by how much, and what that did to the time to first token."""
    parts = []
    for run in comparison.runs[1:]:
        rows = [row for row in comparison.rows if row.other == run.label]
        if not rows:
            parts.append(f"'{run.label}' shares no finished case with '{comparison.runs[0].label}'")
            continue
        changed = [row for row in rows if row.decided]
        largest = max(changed, key=lambda row: abs(row.kl), default=None)
        cases = max(row.cases for row in rows)
        text = (
            f"'{run.label}' differs from '{comparison.runs[0].label}' in KL under {len(changed)} of "
            f"{len(rows)} policies on {cases} common case{'' if cases == 1 else 's'}"
        )
        if largest is not None:
            text += (
                f", most under {largest.policy}: {figure(largest.kl_base)} to {figure(largest.kl_other)} "
                f"nats ({_cell(largest.kl_low, largest.kl, largest.kl_high)})"
            )
        faster = [r for r in rows if r.ms_high < 0]
        slower = [r for r in rows if r.ms_low > 0]
        text += f"; to the first token {len(faster)} are faster and {len(slower)} slower"
        parts.append(text)
    sentence = "; ".join(parts)
    if any(run.document["model"]["name"] == TINY_MODEL for run in comparison.runs):
        sentence = f"Random weights, so the figures mean nothing beyond the runs: {sentence}"
    return sentence + "."


def levels(comparison: Comparison) -> Figure:
    """KL of each policy, a mark a run, on a log axis."""
    policies = list(dict.fromkeys(row.policy for row in comparison.rows))
    real = [v for r in comparison.rows for v in (r.kl_base, r.kl_other) if v > 0]
    noise = max((run.noise for run in comparison.runs if run.noise > 0), default=math.nan)
    low = min([*real, noise] if noise > 0 else real, default=1e-12) / 3
    plot = blank_figure(1.3 + 0.34 * len(policies))
    axes = plot.add_subplot()
    labels = _labels(comparison)
    for height, policy in enumerate(reversed(policies)):
        rows = [row for row in comparison.rows if row.policy == policy]
        values = {rows[0].base: rows[0].kl_base, **{row.other: row.kl_other for row in rows}}
        at = [max(value, low) for value in values.values()]
        axes.plot([min(at), max(at)], [height, height], color=INK, alpha=0.35, lw=1, zorder=1)
        for label, x in zip(values, at, strict=True):
            number = labels.index(label)
            axes.plot(
                x, height, ls="", marker=MARKERS[number % len(MARKERS)], color=_colour(number),
                ms=7, mfc="none" if number == 0 else _colour(number), label=label,
            )  # fmt: skip
    if noise > 0:
        axes.axvline(noise, color=INK, ls=(0, (4, 3)), lw=0.9, alpha=0.7)
    axes.set_xscale("log")
    few_ticks(axes)
    axes.tick_params(axis="x", labelsize=7.5)
    _name_rows(axes, list(reversed(policies)))
    axes.set_xlabel("mean KL(exact‖policy), nats per token")
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_below(plot, {label: handles[label] for label in labels if label in handles})
    return plot


def differences(rows: Sequence[Difference]) -> Figure:
    """Paired differences of the KL with their intervals."""
    plot = blank_figure(1.0 + 0.34 * len(rows))
    axes = plot.add_subplot()
    others = list(dict.fromkeys(row.other for row in rows))
    for height, row in enumerate(reversed(rows)):
        colour = _colour(1 + others.index(row.other))
        axes.plot([row.kl_low, row.kl_high], [height, height], color=colour, lw=1.4, solid_capstyle="butt")
        axes.plot(row.kl, height, "o", color=colour, mfc=colour if row.decided else "none", ms=6)
    ends = [abs(v) for row in rows for v in (row.kl_low, row.kl, row.kl_high) if v]
    # Linear within the smallest change that an interval tells from 0, so that it is seen.
    told = [abs(row.kl) for row in rows if row.decided and row.kl]
    linear = min(told, default=max(ends, default=1.0))
    axes.set_xscale("symlog", linthresh=max(linear, max(ends, default=1.0) * 1e-6))
    axes.axvline(0, color=INK, lw=0.9, alpha=0.7)
    names = [row.policy if len(others) == 1 else f"{row.policy} · {row.other}" for row in rows]
    _name_rows(axes, list(reversed(names)))
    axes.locator_params(axis="x", numticks=6)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("difference of the mean KL, nats per token")
    return plot


def _name_rows(axes: matplotlib.axes.Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(visible=False, axis="y")


def _colour(number: int) -> str:
    """The base is grey, as exact is elsewhere."""
    return COLOURS[number % len(COLOURS)]


def _labels(comparison: Comparison) -> list[str]:
    return [run.label for run in comparison.runs]


def _tables(comparison: Comparison) -> list[Table]:
    several = len(comparison.runs) > 2
    base = comparison.runs[0].label
    named = [(f"{r.policy} · {r.other}" if several else r.policy, r) for r in comparison.rows]
    floors = ", ".join(f"{figure(run.noise)} nats in '{run.label}'" for run in comparison.runs)
    tables = [
        Table(
            title="Differences",
            columns=(
                "policy",
                f"KL, {base}",
                "KL, other",
                "KL difference, nats",
                "top-1 difference",
                "ΔNLL difference, nats",
                "FLOPs ratio",
                "cases",
                "unpaired",
            ),
            rows=tuple((name, *_divergence_cells(row)) for name, row in named),
            terminal=(0, 1, 2, 3, 7),
            note=f"Noise floor: {floors}. Other minus {base}; unpaired cases were finished by one run only.",
        ),
        Table(
            title="Wall clock to the first token",
            columns=("policy", f"ms, {base}", "ms, other", "difference, ms", "ratio"),
            rows=tuple((name, *_clock_cells(row)) for name, row in named),
            terminal=(),
            note="Two runs are two processes at two times: what else the machine did is in it.",
        ),
    ]
    if comparison.changed:
        tables.append(
            Table(
                title="What differs between the runs",
                columns=("key", *_labels(comparison)),
                rows=tuple((key, *values) for key, values in comparison.changed),
                terminal=(),
            )
        )
    return tables


def _divergence_cells(row: Difference) -> tuple[str, ...]:
    return (
        figure(row.kl_base),
        figure(row.kl_other),
        _cell(row.kl_low, row.kl, row.kl_high),
        _cell(row.top1_low, row.top1, row.top1_high),
        _cell(row.delta_nll_low, row.delta_nll, row.delta_nll_high),
        relative(row.flops_ratio),
        str(row.cases),
        str(row.unpaired),
    )


def _clock_cells(row: Difference) -> tuple[str, ...]:
    ratio = f"{row.ms_other / row.ms_base:.2f}" if row.ms_base else "–"
    return f"{row.ms_base:,.1f}", f"{row.ms_other:,.1f}", _cell(row.ms_low, row.ms, row.ms_high), ratio


def _cell(low: float, value: float, high: float) -> str:
    return f"{signed(value)} [{signed(low)}, {signed(high)}]"


def _clean(row: dict[str, object]) -> dict[str, object]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
