"""The report of an edit_cost run: work, time, memory and money of three edits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from experiments.config import TINY_MODEL
from experiments.paper_model import QWEN36_27B
from experiments.records import Record
from experiments.report.plots import COLOURS, STYLE, blank_figure
from experiments.report.tables import Table, write_tables
from jaxkv.reuse.bill import bill

if TYPE_CHECKING:
    from experiments.cost_config import CostConfig
    from experiments.records import RunDirectory


def write_cost_report(
    directory: RunDirectory, config: CostConfig, paper: list[Record], console: Console
) -> None:
    """Everything in it comes from `cases.jsonl`, `config.json` and arithmetic, so it can be redone."""
    document: dict[str, Any] = directory.read_config() or {}
    rows = [record for record in directory.records() if record["status"] == "ok"]
    failed = [record for record in directory.records() if record["status"] != "ok"]
    tables = [
        _measured(rows, document["model"]["name"]),
        _priced(rows, config, f"Priced, {document['model']['name']}"),
        _paper(paper),
        _priced(paper, config, f"Priced, {QWEN36_27B.name} on paper"),
        _sources(config),
    ]
    if failed:
        cells = tuple((f"{r['edit']}, {r['policy']}", r["error"]) for r in failed)
        tables.append(Table(title="Failed", columns=("measurement", "error"), rows=cells))
    figures = {}
    if rows:
        with matplotlib.rc_context(STYLE):
            figures["cost"] = (
                "Work, wall clock to the first token and price of each edit, divided by those of an exact "
                "edit at the start, which reuses nothing. The price is that of the first tariff.",
                _figure_of(rows, config),
            )
    write_tables(
        directory,
        document,
        answer=answer(rows, document["model"]["name"]),
        note="An exact turn reuses the common prefix. The others keep KV behind the edit, which no host "
        "offers today: their price is what the same tariff would make of it.",
        tables=[table for table in tables if table.rows],
        rows=[_flat(row, config) for row in rows],
        figures=figures,
        console=console,
    )


def answer(rows: list[Record], model: str) -> str:
    """One sentence: how much dearer an edit at the start is than an append, exactly and with reuse."""
    by = {(r["edit"], r["policy"]): r for r in rows}
    append, start = by.get(("append", "exact")), by.get(("edit start", "exact"))
    if append is None or start is None:
        return "No exact append and edit at the start were measured."
    text = (
        f"On {model}, an exact edit at the start of {start['prompt']:,} tokens costs "
        f"{start['ledger_flops'] / append['ledger_flops']:.1f}× the FLOPs and "
        f"{start['edit_ms'] / append['edit_ms']:.1f}× the time to first token of an append"
    )
    others = [r for r in rows if r["edit"] == "edit start" and r["policy"] != "exact"]
    if others:
        best = min(others, key=lambda r: r["ledger_flops"])
        work, wait = (best[name] / append[name] for name in ("ledger_flops", "edit_ms"))
        text += f"; {best['policy']}, which is approximate, needs {work:.1f}× and {wait:.1f}×"
    if model.startswith(TINY_MODEL):
        text = f"Smoke run with random weights, so the figures mean nothing beyond it: {text}"
    return text + "."


def _measured(rows: list[Record], model: str) -> Table:
    return Table(
        title=f"Measured, {model}",
        columns=(
            "edit, policy", "prompt", "matched", "relocated", "forwarded", "FLOPs, Eq. 9", "FLOPs, ledger",
            "ms to first token", "ms to generate", "KV bytes", "KV moved",
        ),
        rows=tuple(
            (
                f"{r['edit']}, {r['policy']}",
                f"{r['prompt']:,}",
                f"{r['matched']:,}",
                f"{r['relocated']:,}",
                f"{r['forwarded']:,}",
                _flops(r["eq9_flops"]),
                _flops(r["ledger_flops"]),
                f"{r['edit_ms']:,.0f}",
                f"{r['generate_ms']:,.0f}",
                _bytes(r["kv_bytes"]),
                _bytes(r["kv_bytes_moved"]),
            )
            for r in rows
        ),
        terminal=(0, 2, 3, 4, 6, 7, 9),
        note="FLOPs of the edit and the answer. Eq. 9 (arXiv 2609.37725) knows prefixes only, and counts "
        "half a key a token less than the ledger. KV bytes: of the prompt and the answer.",
    )  # fmt: skip


def _paper(rows: list[Record]) -> Table:
    model = QWEN36_27B
    return Table(
        title=f"On paper, {model.name}",
        columns=(
            "edit, policy", "prompt", "matched", "relocated", "forwarded", "FLOPs, Eq. 9", "FLOPs, ledger",
            "KV bytes",
        ),
        rows=tuple(
            (
                f"{r['edit']}, {r['policy']}",
                f"{r['prompt']:,}",
                f"{r['matched']:,}",
                f"{r['relocated']:,}",
                f"{r['forwarded']:,}",
                _flops(r["eq9_flops"]),
                _flops(r["ledger_flops"]),
                _bytes(r["kv_bytes"]),
            )
            for r in rows
        ),
        terminal=(0, 2, 3, 4, 6, 7),
        note=f"{model.kv_bytes_per_token:,} bytes of KV a token in bfloat16, so "
        f"{32_768 * model.kv_bytes_per_token / 2**30:g} GiB at 32,768 tokens; its recurrent layers add "
        f"{model.state_bytes:,} bytes a snapshot, as much as "
        f"{model.state_bytes / model.kv_bytes_per_token:,.0f} tokens of KV. Approximate rows count the "
        "attention layers: recurrent state behind an edit has to be replayed or accepted as it is.",
    )  # fmt: skip


def _priced(rows: list[Record], config: CostConfig, title: str) -> Table:
    tariffs = [priced.tariff for priced in config.tariffs()]
    return Table(
        title=title,
        columns=("edit, policy", *(t.name for t in tariffs)),
        rows=tuple((f"{r['edit']}, {r['policy']}", *_cells(r, config)) for r in rows) if tariffs else (),
        note="Plain input tokens that the turn costs as much as, and the share of its price without any "
        f"cache; the next turn comes {config.age:g} s after the last.",
    )


def _cells(row: Record, config: CostConfig) -> list[str]:
    cells = []
    for priced in config.tariffs():
        found = _bill(priced.tariff, row, config)
        cells.append(f"{found.cost:,.0f} {found.relative:.0%}")
    return cells


def _bill(tariff: Any, row: Record, config: CostConfig) -> Any:
    kept = row["matched"] + row["relocated"]
    return bill(tariff, prompt=row["prompt"], shared=kept, generated=row["generated"], age=config.age)


def _sources(config: CostConfig) -> Table:
    rows = []
    for priced in config.tariffs():
        for figure, price in priced.prices.items():
            state = "read there" if price.confirmed else "not confirmed"
            rows.append(
                (f"{priced.tariff.name}, {figure}", f"{price.value:g}", price.date, state, price.source)
            )
    return Table(
        title="Prices",
        terminal=(),
        columns=("figure", "value", "looked up", "state", "source"),
        rows=tuple(rows),
        note="read, write and output are multiples of a plain input token; minimum and step are tokens; ttl "
        "is seconds. Hosts change them: they are data, not truth.",
    )


def _figure_of(rows: list[Record], config: CostConfig) -> Figure:
    figure = blank_figure(0.9 + 0.42 * len(rows))
    axes = figure.add_subplot()
    base = next((r for r in rows if r["edit"] == "edit start" and r["policy"] == "exact"), rows[-1])
    tariffs = config.tariffs()[:1]
    measures: list[tuple[str, list[float]]] = [
        ("FLOPs", [r["ledger_flops"] / base["ledger_flops"] for r in rows]),
        ("ms to first token", [r["edit_ms"] / base["edit_ms"] for r in rows]),
    ]
    for priced in tariffs:
        cost = _bill(priced.tariff, base, config).cost
        prices = [_bill(priced.tariff, r, config).cost / cost for r in rows]
        measures.append((f"price, {priced.tariff.name}", prices))
    height = 0.8 / len(measures)
    places = np.arange(len(rows))[::-1]
    for number, (name, values) in enumerate(measures):
        axes.barh(places - (number - (len(measures) - 1) / 2) * height, values, height, label=name,
                  color=COLOURS[(3, 6, 5)[number]])  # fmt: skip
    axes.set_yticks(places, [f"{r['edit']}\n{r['policy']}" for r in rows], fontsize=7)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("relative to an exact edit at the start")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _flat(row: Record, config: CostConfig) -> dict[str, Any]:
    kept = {k: v for k, v in row.items() if k not in ("status", "case", "edit_ms_all")}
    for priced in config.tariffs():
        found = dataclasses.asdict(_bill(priced.tariff, row, config))
        kept |= {f"{priced.tariff.name}.{name}": value for name, value in found.items()}
    return kept


def _bytes(value: int) -> str:
    if value >= 2**30:
        return f"{value / 2**30:.2f} GiB"
    return f"{value / 2**20:.1f} MiB" if value else "0"


def _flops(value: float | None) -> str:
    return "–" if value is None else f"{value:.2e}"
