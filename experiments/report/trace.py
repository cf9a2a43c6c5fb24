"""The report of a prefix_trace run: what the prefix index saved, in the same run against none."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.config import TINY_MODEL
from experiments.records import Record
from experiments.report.plots import COLOURS, STYLE, blank_figure
from experiments.report.tables import Table, write_tables

if TYPE_CHECKING:
    from experiments.records import RunDirectory
    from experiments.trace_config import TraceConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One replay."""

    cell: str
    arm: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float  # by tokens
    computed_tokens: int
    queue_p50: float  # seconds
    ttft_p50: float
    ttft_p95: float
    generated_tokens: int
    tokens_per_second: float  # generated, over the whole replay
    seconds: float
    evicted_pages: int
    preemptions: int
    same_output: int  # requests whose tokens equal those of the replay without reuse


def summarize(records: list[Record]) -> list[Row]:
    """One row a replay, in the order of the records."""
    without = {r["case"]: r for r in records if r["policy"] == "no_reuse"}
    return [_row(record, without.get(record["case"])) for record in records]


def _row(record: Record, without: Record | None) -> Row:
    requests = record["requests"]

    def total(name: str) -> int:
        return sum(r[name] for r in requests)

    def percentile(name: str, share: float) -> float:
        values = [r[name] for r in requests if r[name] is not None]
        return float(np.percentile(values, share)) if values else math.nan

    outputs = {r["id"]: r["output"] for r in (without or {"requests": []})["requests"]}
    return Row(
        cell=record["case"],
        arm=record["policy"],
        requests=len(requests),
        prompt_tokens=total("prompt_tokens"),
        hit_tokens=total("hit_tokens"),
        hit_rate=total("hit_tokens") / total("prompt_tokens"),
        computed_tokens=total("computed_tokens"),
        queue_p50=percentile("queue_seconds", 50),
        ttft_p50=percentile("ttft", 50),
        ttft_p95=percentile("ttft", 95),
        generated_tokens=total("generated_tokens"),
        tokens_per_second=total("generated_tokens") / record["seconds"],
        seconds=record["seconds"],
        evicted_pages=record["evicted_pages"],
        preemptions=record["preemptions"],
        same_output=sum(outputs.get(r["id"]) == r["output"] for r in requests),
    )


def answer(rows: list[Row], model: str) -> str:
    """One sentence: how much was found, and what that did to the time to the first token."""
    pairs = _pairs(rows)
    if not pairs:
        return "No cell was replayed with and without reuse."
    best, plain = max(pairs, key=lambda pair: pair[0].hit_rate)
    text = (
        f"On {model}, the prefix index found {best.hit_rate:.0%} of {best.prompt_tokens:,} prompt tokens; "
        f"the time to first token at p50 was {_seconds(best.ttft_p50)} against {_seconds(plain.ttft_p50)} "
        f"without it, at p95 {_seconds(best.ttft_p95)} against {_seconds(plain.ttft_p95)}, and "
        f"{best.tokens_per_second:.1f} tokens were generated a second against {plain.tokens_per_second:.1f}"
    )
    worst = min(pairs, key=lambda pair: pair[0].hit_rate)[0]
    if worst.hit_rate < best.hit_rate:
        text += f" (cell {best.cell}; lowest, {worst.cell}: {worst.hit_rate:.0%} found)"
    if model.startswith(TINY_MODEL):
        text = f"Smoke run with random weights, so the figures mean nothing beyond it: {text}"
    return text + "."


def write_trace_report(directory: RunDirectory, config: TraceConfig, console: Console) -> None:
    """Everything in it comes from `cases.jsonl` and `config.json`, so it can be redone."""
    document: dict[str, Any] = directory.read_config() or {}
    records = [record for record in directory.records() if record["status"] == "ok"]
    rows = summarize(records)
    with matplotlib.rc_context(STYLE):
        figures = {
            "ttft": (
                "Share of requests that had their first token after so many seconds from their arrival. "
                "Solid with the prefix index, dashed without.",
                _ttft(records),
            ),
            "tokens": (
                "Where the prompt tokens of each cell came from. Computed more than prompted means that "
                "preempted requests were computed again.",
                _tokens(rows),
            ),
        }
    write_tables(
        directory,
        document,
        answer=answer(rows, document["model"]["name"]),
        note="The same trace, replayed in the same process with the prefix index and without it. A cell is "
        "order of arrival / pages / eviction policy / order of admission. Arrivals are Poisson at "
        f"{config.rate:g} a second; idle time is skipped, not slept.",
        tables=[_table(rows), _tenants(records)],
        rows=[_clean(row) for row in rows],
        figures=figures,
        console=console,
    )


def _pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    without = {row.cell: row for row in rows if row.arm == "no_reuse"}
    return [(row, without[row.cell]) for row in rows if row.arm == "reuse" and row.cell in without]


def _clean(row: Row) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in dataclasses.asdict(row).items()
    }


def _table(rows: list[Row]) -> Table:
    return Table(
        title="Replays",
        columns=(
            "cell", "reuse", "hit rate", "computed", "queue p50", "TTFT p50", "TTFT p95", "tokens/s",
            "evicted", "preempted", "same output",
        ),
        rows=tuple(
            (
                row.cell,
                "yes" if row.arm == "reuse" else "no",
                f"{row.hit_rate:.1%}",
                f"{row.computed_tokens:,}",
                _seconds(row.queue_p50),
                _seconds(row.ttft_p50),
                _seconds(row.ttft_p95),
                f"{row.tokens_per_second:.1f}",
                f"{row.evicted_pages:,}",
                f"{row.preemptions:,}",
                f"{row.same_output}/{row.requests}",
            )
            for row in rows
        ),
        terminal=(0, 1, 2, 3, 5, 6, 7, 8, 9),
        note="Hit rate: prompt tokens found when a request was first admitted, of all prompt tokens. "
        "tokens/s: generated, over the whole replay. evicted: pages. same output: requests whose greedy "
        "tokens equal those of the replay without reuse.",
    )  # fmt: skip


def _tenants(records: list[Record]) -> Table:
    rows = []
    for record in records:
        if record["policy"] == "no_reuse":
            continue
        for tenant in sorted({r["tenant"] for r in record["requests"]}):
            own = [r for r in record["requests"] if r["tenant"] == tenant]
            for name, part in (
                ("first turns", [r for r in own if not r["turn"]]),
                ("follow-ups", [r for r in own if r["turn"]]),
            ):
                if part:
                    prompt, hit = (sum(r[key] for r in part) for key in ("prompt_tokens", "hit_tokens"))
                    ttft = float(np.median([r["ttft"] for r in part]))
                    rows.append(
                        (
                            record["case"],
                            f"{tenant}, {name}",
                            str(len(part)),
                            f"{prompt:,}",
                            f"{hit / prompt:.1%}",
                            _seconds(ttft),
                        )
                    )
    return Table(
        title="By tenant",
        columns=("cell", "who", "requests", "prompt tokens", "hit rate", "TTFT p50"),
        rows=tuple(rows),
        note="Tenants share nothing: each pays for its own first use of a system prompt.",
    )


def _ttft(records: list[Record]) -> Figure:
    figure = blank_figure(3.4)
    axes = figure.add_subplot()
    cells = list(dict.fromkeys(r["case"] for r in records))
    for record in records:
        values = np.sort([r["ttft"] for r in record["requests"] if r["ttft"] is not None])
        colour = COLOURS[(1 + cells.index(record["case"])) % len(COLOURS)]
        reuse = record["policy"] == "reuse"
        axes.step(
            values,
            np.arange(1, len(values) + 1) / max(len(values), 1),
            where="post",
            color=colour,
            ls="-" if reuse else (0, (3, 2)),
            label=record["case"] if reuse else None,
        )
    axes.set(xlabel="seconds from arrival to first token", ylabel="share of requests", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    if len(cells) > 1:
        figure.legend(loc="outside lower center", ncols=1)
    return figure


def _tokens(rows: list[Row]) -> Figure:
    figure = blank_figure(1.0 + 0.34 * len(rows))
    axes = figure.add_subplot()
    shown = list(reversed(rows))
    places = np.arange(len(shown))
    axes.barh(places, [r.hit_tokens for r in shown], color=COLOURS[5], height=0.62, label="found")
    axes.barh(
        places,
        [r.computed_tokens for r in shown],
        left=[r.hit_tokens for r in shown],
        color=COLOURS[1],
        height=0.62,
        label="computed",
    )
    names = [f"{r.cell}\n{'reuse' if r.arm == 'reuse' else 'none'}" for r in shown]
    axes.set_yticks(places, names, fontsize=7)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("prompt tokens")
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{1e3 * value:,.0f} ms" if value < 1 else f"{value:,.2f} s"
