"""The plots of a report, each a matplotlib Figure, drawn without pyplot's global state.

Narrow on purpose: at the width of a phone the text of a 4.8-inch figure is still readable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from experiments.report.labels import merge_points, place_labels
from experiments.report.summary import BIN_LABELS, Summary

INK = "#222222"  # text and axes; the HTML page replaces it by its own text colour
WIDTH = 4.5  # inches
# After Okabe and Ito, tones that show on white and on black; markers tell policies apart, too.
COLOURS = (
    "#7f7f7f", "#d55e00", "#cc79a7", "#2b8cdb", "#56b4e9", "#009e73",
    "#e69f00", "#8a6fd1", "#b5651d", "#e6457a", "#4c9f38", "#0f9fa8",
)  # fmt: skip
MARKERS = "osv^DPX*<>hp"
STYLE: Any = {  # matplotlib types its keys one by one
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "svg.fonttype": "path",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}

Style = Mapping[str, tuple[str, str]]  # policy -> colour, marker


def draw_all(summary: Summary) -> dict[str, Figure]:
    """Name to figure, in the order of the report; plots without data are left out."""
    style = {
        row.policy: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
        for i, row in enumerate(summary.rows)
    }
    makers: dict[str, Callable[[Summary, Style], Figure | None]] = {
        "pareto": pareto,
        "kl_by_position": kl_by_position,
        "error_by_distance": error_by_distance,
        "error_by_layer": error_by_layer,
        "steps": steps,
        "healing": healing,
        "recovery": recovery,
        "first_token": first_token,
    }
    with matplotlib.rc_context(STYLE):
        figures = {name: make(summary, style) for name, make in makers.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def pareto(summary: Summary, style: Style) -> Figure | None:
    """FLOPs relative to exact against KL; down and left is better."""
    rows = [r for r in summary.rows if r.flops_relative > 0]
    if not rows:
        return None
    figure = blank_figure(3.9)
    axes = figure.add_subplot()
    low = _floor([r.kl for r in rows], summary.noise)
    for row in rows:
        colour, marker = style[row.policy]
        y = max(row.kl, low)
        ends = [[y - max(row.kl_low, low)], [max(row.kl_high, low) - y]]
        axes.errorbar(
            row.flops_relative,
            y,
            yerr=np.maximum(ends, 0),
            color=colour,
            marker="v" if row.kl < low else marker,
            markersize=7,
            elinewidth=1,
            capsize=2,
        )
    axes.set(xscale="log", yscale="log", ylabel="mean KL(exact‖policy), nats per token")
    axes.set_xlabel("FLOPs of an edit, relative to exact prefix reuse")
    x = [r.flops_relative for r in rows]
    axes.set_xlim(min(x) / 2.2, max(x) * 2.6)
    axes.set_ylim(low / 2, max([r.kl_high for r in rows] + [2 * low]) * 4)
    _noise_line(axes, summary.noise)
    few_ticks(axes)
    figure.draw_without_rendering()  # labels are placed in pixels, so the layout must stand
    points = [(r.flops_relative, max(r.kl, low), r.policy) for r in rows]
    bars = [((r.flops_relative, max(r.kl_low, low)), (r.flops_relative, max(r.kl_high, low))) for r in rows]
    place_labels(axes, merge_points(axes, points), bars)
    return figure


def kl_by_position(summary: Summary, style: Style) -> Figure | None:
    """KL by where the edit is, a line a policy."""
    names = list(dict.fromkeys(p for table in summary.by_position.values() for p in table))
    if not names:
        return None
    names.sort(key=_position_order)
    figure = blank_figure(3.9)
    axes = figure.add_subplot()
    tables = summary.by_position
    low = _floor([v for t in tables.values() for v in t.values()], summary.noise)
    _lines(
        axes,
        style,
        {p: [t.get(name, math.nan) for name in names] for p, t in tables.items()},
        low,
    )
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="place of the edit in the context", ylabel="mean KL, nats per token")
    _noise_line(axes, summary.noise)
    _legend_below(figure, axes)
    return figure


def error_by_distance(summary: Summary, style: Style) -> Figure | None:
    """Relative error of kept K and V by distance from the seam."""
    return _panels(
        summary.state_by_distance,
        style,
        {"keys": "K, un-rotated", "values": "V", "attention": "attention output"},
        xlabel="tokens behind the seam",
        ticks=BIN_LABELS,
    )


def error_by_layer(summary: Summary, style: Style) -> Figure | None:
    """Relative error of K, V and attention outputs by layer."""
    return _panels(
        summary.state_by_layer,
        style,
        {"keys": "K, un-rotated", "values": "V", "attention": "attention output"},
        xlabel="layer",
        ticks=None,
    )


DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))


def steps(summary: Summary, style: Style) -> Figure | None:
    """What consecutive edits add up to: error (KL, keys against birth) and cost (KV copied, time)."""
    titles = {
        "kl": "KL, nats per token",
        "key_change": "‖K − K at birth‖ / ‖K at birth‖, un-rotated",
        "kv_bytes_moved": "KV copied by an edit, bytes",
        "ms": "from the edit to the first token, ms",
    }
    shown = {key: summary.by_step.get(key, {}) for key in titles}
    shown = {
        key: table
        for key, table in shown.items()
        if any(len(p) > 1 for p in table.values()) and any(y > 0 for p in table.values() for _, y in p)
    }
    if not shown:
        return None
    figure = blank_figure(1.3 + 1.9 * len(shown))
    all_axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    names = list(dict.fromkeys(name for table in shown.values() for name in table))
    dtypes = list(dict.fromkeys(name.partition(" · ")[2] for name in names))
    for axes, (key, table) in zip(all_axes, shown.items(), strict=True):
        low = _floor([y for points in table.values() for _, y in points], math.nan)
        for name, points in table.items():
            policy, _, dtype = name.partition(" · ")
            colour = style.get(policy, (INK, "o"))[0]
            # One pattern a dtype; of one dtype lines alternate, so that two that coincide are both seen.
            number = dtypes.index(dtype) if len(dtypes) > 1 else names.index(name) % 2
            marker = MARKERS[names.index(name) % len(MARKERS)]
            x, y = [p[0] for p in points], [max(p[1], low) for p in points]
            at = [i for i, p in enumerate(points) if p[1] < low]
            filled = [i for i in range(len(points)) if i not in at]
            dashes = DASHES[number % len(DASHES)]
            axes.plot(x, y, color=colour, marker=marker, markevery=filled, ls=dashes, label=name, alpha=0.95)
            axes.plot([x[i] for i in at], [y[i] for i in at], ls="", marker=marker, color=colour,
                      mfc="none", ms=7)  # fmt: skip
        axes.set_yscale("log")
        axes.set_title(titles[key], loc="left")
        few_ticks(axes)
    all_axes[-1].set_xscale("log", base=2)
    counts = sorted({x for table in shown.values() for points in table.values() for x, _ in points})
    all_axes[-1].set_xticks(counts, [str(c) for c in counts])
    all_axes[-1].set_xlabel("consecutive edits")
    handles = {h.get_label(): h for axes in all_axes for h in axes.get_lines() if h.get_label()[0] != "_"}
    legend_below(figure, handles, handlelength=2.2)
    return figure


def healing(summary: Summary, style: Style) -> Figure | None:
    """KL while stale tokens are recomputed from left to right."""
    if not summary.healing:
        return None
    figure = blank_figure(3.4)
    axes = figure.add_subplot()
    low = _floor([y for points in summary.healing.values() for _, y in points], summary.noise)
    for policy, points in summary.healing.items():
        colour, marker = style[policy]
        x, y = [100 * p[0] for p in points], [max(p[1], low) for p in points]
        axes.plot(x, y, color=colour, marker=marker, label=policy)
    axes.set(yscale="log", xlabel="stale tokens healed, %", ylabel="mean KL, nats per token")
    _noise_line(axes, summary.noise)
    few_ticks(axes)
    _legend_below(figure, axes)
    return figure


def recovery(summary: Summary, style: Style) -> Figure | None:
    """How much of the answer's margin a repair brings back, by dependency distance."""
    tables = {p: t for p, t in summary.recovery.items() if any(math.isfinite(v) for v in t.values())}
    if not tables:
        return None
    names = sorted({n for t in tables.values() for n in t}, key=_position_order)
    figure = blank_figure(3.6)
    axes = figure.add_subplot()
    for policy, table in tables.items():
        colour, marker = style[policy]
        y = [table.get(n, math.nan) for n in names]
        axes.plot([min(max(v, -1.0), 2.0) for v in y], color=colour, marker=marker, label=policy,
                  clip_on=False)  # fmt: skip
    axes.set_ylim(-1, 2)
    for level in (0, 1):
        axes.axhline(level, color=INK, lw=0.8, ls=(0, (4, 3)), alpha=0.6)
    axes.set_xticks(range(len(names)), names)
    axes.set(
        ylabel="margin recovery: 0 = scr, 1 = exact", xlabel="tokens from the change to what depends on it"
    )
    _legend_below(figure, axes)
    return figure


def first_token(summary: Summary, style: Style) -> Figure | None:
    """Wall clock of an edit until the logits of the next token are there."""
    rows = [r for r in summary.rows if math.isfinite(r.ttft_ms)]
    if not rows:
        return None
    figure = blank_figure(0.8 + 0.3 * len(rows))
    axes = figure.add_subplot()
    for y, row in enumerate(reversed(rows)):
        spread = 0.0 if math.isnan(row.ttft_se) else row.ttft_se
        axes.barh(y, row.ttft_ms, xerr=spread or None, color=style[row.policy][0], height=0.62, ecolor=INK)
        text = f" {row.ttft_ms:,.0f} ms" if row.ttft_ms >= 10 else f" {row.ttft_ms:.1f} ms"
        axes.text(row.ttft_ms + spread, y, text, va="center", fontsize=7.5)
    axes.set_yticks(range(len(rows)), [r.policy for r in reversed(rows)])
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(r.ttft_ms + np.nan_to_num(r.ttft_se) for r in rows) * 1.22)
    figure.supxlabel("ms from edit to first token ± standard error", fontsize=9)  # names may be long
    return figure


def blank_figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)  # labels are measured in its pixels
    return figure


def _panels(
    tables: Mapping[str, Mapping[str, Sequence[float]]],
    style: Style,
    titles: Mapping[str, str],
    *,
    xlabel: str,
    ticks: Sequence[str] | None,
) -> Figure | None:
    shown = {state: tables.get(state, {}) for state in titles}
    shown = {state: table for state, table in shown.items() if _positive(table)}
    if not shown:
        return None
    figure = blank_figure(0.9 + 1.7 * len(shown))
    all_axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (state, table) in zip(all_axes, shown.items(), strict=True):
        _lines(axes, style, table, _floor(_positive(table), math.nan))
        axes.set_title(titles[state], loc="left")
    figure.supylabel("‖policy − exact‖ / ‖exact‖", fontsize=8.5)
    all_axes[-1].set_xlabel(xlabel)
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if ticks:
        used = max(i for t in shown.values() for v in t.values() for i in np.flatnonzero(_real(v)))
        all_axes[-1].set_xticks(range(len(ticks)), ticks)
        all_axes[-1].set_xlim(-0.3, used + 0.3)
    _legend_below(figure, all_axes[0])
    return figure


def _lines(axes: Any, style: Style, table: Mapping[str, Sequence[float]], low: float) -> None:
    """One line a policy on a log axis; what is below `low` (zero, too) is drawn hollow at `low`."""
    for policy, values in table.items():
        colour, marker = style[policy]
        y = np.array(values, np.float64)
        clipped = np.where(y < low, low, y)
        many = len(y) > 12
        axes.plot(clipped, color=colour, marker="" if many else marker, label=policy, alpha=0.95)
        under = np.flatnonzero(y < low)
        axes.plot(under, clipped[under], ls="", marker=marker, color=colour, mfc="none", ms=7)
    axes.set_yscale("log")
    few_ticks(axes)


def _noise_line(axes: Any, noise: float) -> None:
    """A dashed line on a log axis that has its data, with room for its name below."""
    if noise > 0:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, noise * (noise / high) ** 0.08), high)
        axes.axhline(noise, color=INK, ls=(0, (4, 3)), lw=0.9, alpha=0.7)
        axes.annotate(
            "noise floor",
            (0, noise),
            xycoords=("axes fraction", "data"),
            xytext=(3, -3),
            textcoords="offset points",
            ha="left",
            va="top",
            fontsize=7.5,
        )


def _legend_below(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    legend_below(figure, dict(zip(labels, handles, strict=True)))


def legend_below(figure: Any, handles: Mapping[str, Any], *, handlelength: float = 1.6) -> None:
    """A legend under the plots, of as many columns as its longest label leaves room for."""
    longest = max((len(label) for label in handles), default=1)
    # Points at 8 pt: about 4.9 a letter, and a handle with its gaps.
    columns = int(72 * WIDTH / (4.9 * longest + 8 * handlelength + 24))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(max(columns, 1), 3),
        handlelength=handlelength,
    )


def few_ticks(axes: Any) -> None:
    """Few ticks on log axes, but some: between powers of ten where an axis holds hardly any of those."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and 0 < low < high:
            axis.set_minor_formatter(NullFormatter())
            axis.set_minor_locator(NullLocator())
            if high / low < 100:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
            else:
                axis.set_major_locator(LogLocator(numticks=7))


def _floor(values: Sequence[float], noise: float) -> float:
    """Where zero is drawn on a log axis: below everything that is not zero."""
    real = [v for v in [*values, noise] if math.isfinite(v) and v > 0]
    return min(real, default=1e-9) / 3


def _positive(table: Mapping[str, Sequence[float]]) -> list[float]:
    return [v for row in table.values() for v in row if math.isfinite(v) and v > 0]


def _real(values: Sequence[float]) -> Any:
    return np.isfinite(np.asarray(values, np.float64))


def _position_order(name: str) -> float:
    """Head, shares of the context, the end; other labels by the number in them."""
    if name in ("head", "end"):
        return -1.0 if name == "head" else 1e9
    number = re.search(r"[0-9.]+", name)
    return float(number[0]) if number else 0.0
