"""Fits the error estimate of a model from a finished run, and judges it on another one:

python -m experiments.calibrate --run=runs/calibration --held_out=runs/held_out

Both runs need `signals=True`. Writes `<first 16 digits of the weights' digest>.json` into --out, by
default where jaxkv looks for it, unless --out is empty.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.records import Record, RunDirectory
from experiments.report.plots import COLOURS, INK, MARKERS, STYLE
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.reuse import estimate
from jaxkv.reuse.estimate import COVERAGE, Calibration, Signals, fit
from jaxkv.reuse.policies.budget import LADDER

_RUN = flags.DEFINE_string("run", None, "Run directory to fit on.")
_HELD_OUT = flags.DEFINE_string("held_out", None, "Run directory to judge on.")
_OUT = flags.DEFINE_string("out", str(Path(estimate.__file__).parent / "calibrations"), "Where to write.")

_PLOT = flags.DEFINE_string("plot", None, "PNG of predicted against measured KL on --held_out.")

BUDGETS = (0.001, 0.003, 0.01, 0.03, 0.1)


def read_run(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """`config.json` and the finished measurements of a run.

    Raises:
      ConfigError: no such run, or one that recorded no signals.
    """
    if not (path / "cases.jsonl").is_file():
        raise ConfigError(f"run '{path}' holds no cases.jsonl, expected a finished run")
    with RunDirectory(path) as directory:
        document = directory.read_config() or {}
        records = [r for r in directory.records() if r["status"] == "ok"]
    if not any(r.get("signals") for r in records):
        raise ConfigError(f"run '{path}' recorded no signals, expected one with --config.signals=True")
    return document, records


def samples(records: list[Record]) -> tuple[list[Signals], list[float], list[Record]]:
    """Signals and measured KL of every approximate answer that recorded them."""
    kept = [r for r in records if r.get("signals")]
    return (
        [Signals(**r["signals"]) for r in kept],
        [r["divergence"]["kl"]["mean"] for r in kept],
        kept,
    )


def fit_run(path: Path) -> Calibration:
    """A calibration from all answers of a run."""
    document, records = read_run(path)
    signals, kl, kept = samples(records)
    return fit(
        signals,
        kl,
        edits=[r["case"] for r in kept],
        weights_digest=document["model"]["weights_digest"],
        model=document["model"]["name"],
        source=f"config {document['config_digest']}, corpus {document['corpus']['sha256'][:16]}",
    )


def judge(calibration: Calibration, records: list[Record]) -> dict[str, float]:
    """Coverage of the bound, correlation, and typical error of the prediction on other edits."""
    signals, kl, _ = samples(records)
    found = [calibration.estimate(s) for s in signals]
    log = np.log10(np.maximum(kl, 1e-12))
    predicted = np.log10([e.kl for e in found])
    return {
        "answers": len(kl),
        "coverage": float(np.mean([k <= e.bound for k, e in zip(kl, found, strict=True)])),
        "correlation": float(np.corrcoef(log, predicted)[0, 1]),
        "rms_decades": float(np.sqrt(np.mean((log - predicted) ** 2))),
        "bias_decades": float(np.mean(predicted - log)),
    }


def budgets(calibration: Calibration, records: list[Record], ladder: Sequence[str]) -> list[dict[str, Any]]:
    """What `budget(eps)` would have done on these edits: the first rung whose bound fits, else exact.

    FLOPs count rungs that were given up, as the ledger does.
    """
    by_case: dict[str, dict[str, Record]] = {}
    for record in records:
        by_case.setdefault(record["case"], {})[record["policy"]] = record
    rows = []
    for eps in BUDGETS:
        kl, flops, exact, fell_back = [], 0.0, 0.0, 0
        for answers in by_case.values():
            if "exact" not in answers or not all(name in answers for name in ladder):
                continue
            exact += answers["exact"]["flops"]
            for name in ladder:
                flops += answers[name]["flops"]
                signals = answers[name]["signals"]
                if signals is None or calibration.estimate(Signals(**signals)).bound <= eps:
                    kl.append(answers[name]["divergence"]["kl"]["mean"])
                    break
            else:
                flops += answers["exact"]["flops"]
                kl.append(answers["exact"]["divergence"]["kl"]["mean"])
                fell_back += 1
        if kl:
            rows.append(
                {
                    "eps": eps,
                    "cases": len(kl),
                    "p95": float(np.percentile(kl, 95)),
                    "max": max(kl),
                    "over": float(np.mean(np.array(kl) > eps)),
                    "exact": fell_back / len(kl),
                    "flops": flops / exact,
                }
            )
    return rows


def draw(calibration: Calibration, records: list[Record], path: Path) -> None:
    """Predicted against measured KL, a point an answer; those above the dashed line exceed their bound."""
    signals, kl, kept = samples(records)
    predicted = [calibration.estimate(s).kl for s in signals]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.5, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for number, name in enumerate(dict.fromkeys(r["policy"] for r in kept)):
            mine = [i for i, r in enumerate(kept) if r["policy"] == name]
            axes.plot(
                [predicted[i] for i in mine], [kl[i] for i in mine], ls="", label=name,
                marker=MARKERS[number % len(MARKERS)], color=COLOURS[1 + number % (len(COLOURS) - 1)],
                alpha=0.8,
            )  # fmt: skip
        ends = np.array([min(*predicted, *kl) / 2, max(*predicted, *kl) * 2])
        axes.plot(ends, ends, color=INK, lw=0.9)
        axes.plot(ends, ends * 10**calibration.margin, color=INK, lw=0.9, ls=(0, (4, 3)))
        axes.set(xscale="log", yscale="log", xlabel="predicted KL, nats", ylabel="measured KL, nats")
        axes.set(xlim=ends, ylim=ends)
        figure.legend(loc="outside lower center", ncols=1)
        figure.savefig(path, dpi=200, facecolor="white")


def main(_: Sequence[str]) -> int:
    """Fits, judges, writes; returns the exit code."""
    console = Console()
    try:
        if not _RUN.value:
            raise ConfigError("--run is missing, expected a run directory")
        calibration = fit_run(Path(_RUN.value))
        console.print(
            f"Fitted on {calibration.cases} answers; the bound lies {10**calibration.margin:.3g}× above "
            "the prediction.",
            highlight=False,
        )
        if _HELD_OUT.value:
            document, records = read_run(Path(_HELD_OUT.value))
            if document["model"]["weights_digest"] != calibration.weights_digest:
                raise ConfigError("--held_out is a run of other weights, expected those of --run")
            ladder = [str(p) for p in LADDER]
            if _PLOT.value:
                draw(calibration, records, Path(_PLOT.value))
            _print(console, judge(calibration, records), budgets(calibration, records, ladder))
        if _OUT.value:
            path = Path(_OUT.value) / f"{calibration.weights_digest[:16]}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(calibration.to_json(), encoding="utf-8")
            console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
    except JaxkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _print(console: Console, judged: dict[str, float], rows: list[dict[str, Any]]) -> None:
    console.print(
        f"Held out, {judged['answers']:.0f} answers: the bound covers {judged['coverage']:.1%} "
        f"(aim {COVERAGE:.0%}), correlation of logs {judged['correlation']:.2f}, error "
        f"{judged['rms_decades']:.2f} decades (bias {judged['bias_decades']:+.2f}).",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("budget", "edits", "KL p95", "KL max", "over budget", "exact", "FLOPs"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            f"{r['eps']:g}", str(r["cases"]), f"{r['p95']:.3g}", f"{r['max']:.3g}", f"{r['over']:.1%}",
            f"{r['exact']:.0%}", f"{r['flops']:.2f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    app.run(main)
