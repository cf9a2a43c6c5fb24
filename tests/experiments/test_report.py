"""Report: figures recomputed from cases.jsonl, a page that stands alone, a truthful sentence."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.records import NOISE
from experiments.report.answer import answer, figure, multiple
from experiments.report.columns import interval
from experiments.report.labels import merge_points, overlaps, place_labels
from experiments.report.page import inline_svg
from experiments.report.plots import draw_all
from experiments.report.summary import summarize, to_csv
from experiments.runner import RunResult

pytestmark = pytest.mark.once


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def stderr(values: list[float]) -> float:
    m = mean(values)
    return math.sqrt(math.fsum((x - m) ** 2 for x in values) / (len(values) - 1) / len(values))


def test_summary_csv_equals_figures_recomputed_from_cases_jsonl(small_run: RunResult) -> None:
    records = [json.loads(x) for x in (small_run.path / "cases.jsonl").read_text().splitlines()]
    with (small_run.path / "summary.csv").open() as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["exact", "drop", "scr", "first_k(8)"]
    floor = mean([r["divergence"]["kl"]["mean"] for r in records if r["policy"] == NOISE])
    exact = [r for r in records if r["policy"] == "exact"]
    for policy, row in rows.items():
        mine = [r for r in records if r["policy"] == policy and r["status"] == "ok"]
        kl = [r["divergence"]["kl"]["mean"] for r in mine]
        assert float(row["kl"]) == pytest.approx(mean(kl))
        assert float(row["kl_se"]) == pytest.approx(stderr(kl))
        assert float(row["kl_low"]) <= float(row["kl"]) <= float(row["kl_high"])
        tokens = sorted(x for r in mine for x in r["kl_tokens"])
        assert float(row["kl_max"]) == tokens[-1]
        assert tokens[len(tokens) // 2 - 1] <= float(row["kl_p50"]) <= tokens[len(tokens) // 2]
        top1 = [r["divergence"]["top1_agreement"] for r in mine]
        assert float(row["top1"]) == pytest.approx(mean(top1))
        assert float(row["top1_se"]) == pytest.approx(stderr(top1))
        delta = mean([r["divergence"]["delta_nll"] for r in mine])
        assert float(row["delta_nll"]) == pytest.approx(delta)
        assert float(row["perplexity_ratio"]) == pytest.approx(math.exp(delta))
        assert float(row["forwarded"]) == mean([r["reuse"]["forwarded"] for r in mine])
        same = {r["case"] for r in mine}
        whole = sum(r["flops"] for r in exact if r["case"] in same)
        work = sum(r["flops"] for r in mine) / whole
        assert float(row["flops_relative"]) == pytest.approx(work)
        time = [r["timings_ms"]["first_token"] for r in mine]
        assert float(row["ttft_ms"]) == pytest.approx(mean(time))
        if floor:
            assert float(row["noise_multiple"]) == pytest.approx(mean(kl) / floor)
        assert float(row["noise_floor_kl"]) == pytest.approx(floor)


def test_standard_errors_by_edit_and_distance_are_those_over_cases() -> None:
    rows = [
        record("scr", 0.1, case="a", kl_tokens=[0.1, 0.3], distance=15),
        record("scr", 0.4, case="b", kl_tokens=[0.5, 0.7], distance=15),
        record("scr", 0.7, case="c", kl_tokens=[0.2, 0.2], distance=2000),
    ]
    summary = summary_of(*rows)
    assert summary.by_edit["scr"] == {"delete": pytest.approx(0.4)}
    assert summary.by_edit_se["scr"] == {"delete": pytest.approx(stderr([0.1, 0.4, 0.7]))}
    near, middle, *_, far = summary.kl_by_distance_se["scr"]
    assert near == pytest.approx(stderr([0.1, 0.5]))
    assert middle == pytest.approx(stderr([0.3, 0.7]))
    assert math.isnan(far), "one case has no spread"


def test_the_page_refers_to_nothing_outside(small_run: RunResult) -> None:
    text = (small_run.path / "report.html").read_text()
    links = re.findall(r"""(?:src|href|action|data)\s*=\s*["']([^"']*)""", text)
    assert links
    assert all(link.startswith("#") for link in links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", text))
    for word in ("@import", "<script", "<link", "<iframe", "<!DOCTYPE svg", "{{", "{%"):
        assert word not in text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text


def test_the_page_shows_every_policy_digest_and_version(small_run: RunResult) -> None:
    text = (small_run.path / "report.html").read_text()
    data = json.loads((small_run.path / "config.json").read_text())
    for policy in data["config"]["policies"]:
        assert f"<th>{policy}</th>" in text
    assert data["corpus"]["sha256"][:16] in text
    assert data["environment"]["jax"] in text


# ---- made-up records, for what the figures of a real run may turn out to be ----------------------


def record(policy: str, kl: float, *, case: str = "a", flops: float = 1.0, **more: Any) -> dict:
    return {
        "case": case,
        "policy": policy,
        "status": "ok",
        "edit": "delete",
        "position": "50%",
        "kind": "exact" if policy in ("exact", NOISE) else "approximate",
        "divergence": {
            "kl": {"mean": kl},
            "reverse_kl": {"mean": kl},
            "top1_agreement": 0.9,
            "top5_overlap": 0.9,
            "delta_nll": kl,
            "logit_cosine": 1.0,
        },
        "kl_tokens": [kl, kl],
        "distance": 5,
        "reuse": {"prompt": 9, "matched": 1, "relocated": 5, "forwarded": 3, "dropped": 0},
        "flops": flops,
        "ledger": {"flops_by_cause": {"inserted": flops}},
        "timings_ms": {"first_token": 100 * flops, "forward": 90 * flops},
        "layers": None,
        "greedy": None,
        **more,
    }


def summary_of(*records: dict) -> Any:
    policies = list(dict.fromkeys(r["policy"] for r in records if r["policy"] != NOISE))
    return summarize(records, policies)


def test_what_a_policy_chose_is_counted_and_others_choose_nothing() -> None:
    budget = "budget(0.01)"
    summary = summary_of(
        record("exact", 0.0, chosen="exact"),
        record(budget, 1e-3, chosen=f"{budget}: scr"),
        record(budget, 1e-3, case="b", chosen=f"{budget}: scr"),
        record(budget, 0.0, case="c", chosen="exact"),
        record("mine:LineStarts(198)", 1e-3, chosen="scr|line_starts(198,2)"),
    )
    assert summary.chosen == {budget: {"scr": 2, "exact": 1}}


def test_one_case_has_no_interval() -> None:
    mean, low, high = interval([0.1])
    assert mean == 0.1
    assert math.isnan(low)
    assert math.isnan(high)
    assert interval([0.1, 0.3])[0] == pytest.approx(0.2)


GRID = [
    record(NOISE, 1e-10),
    record("exact", 1e-10),
    record("drop", 1.2, flops=0.01),
    record("scr", 0.0007, flops=0.05),
    record("first_k(32)", 0.0005, flops=0.08),
    record("forget", 1e-10, flops=0.95),
]
HEAD = [
    record("exact", 1e-10, case="h", position="head"),
    record("drop", 3.0, case="h", position="head", flops=0.01),
    record("scr", 0.7, case="h", position="head", flops=0.05),
    record("first_k(32)", 0.002, case="h", position="head", flops=0.08),
]


def test_the_answer_names_the_repair_its_price_and_where_plain_reuse_fails() -> None:
    text = answer(summary_of(*GRID, *HEAD), "m")
    assert text.startswith("On m, Suffix Cache Reuse that repairs the first 32 tokens behind each")
    assert "12× cheaper than exact" in text
    assert "mean KL 0.00125 nats (1.2e7× the noise floor)" in text
    assert "without repair it fails when the head of the context is edited (KL 0.7" in text
    assert text.count(". ") == 0


def test_the_answer_follows_the_figures() -> None:
    bad = [record("first_k(32)", 0.5, case="h", position="head", flops=0.08)]
    assert "both fail" in answer(summary_of(*GRID, *HEAD[:3], *bad), "m")
    mild = [record("scr", 0.003, case="h", position="head", flops=0.05), HEAD[0], HEAD[3]]
    text = answer(summary_of(*GRID, *mild), "m")
    assert "fail" not in text
    assert "0.003 when the head is edited" in text
    assert "without repair the KL is 0.0007" in answer(summary_of(*GRID), "m")
    dear = [record("exact", 0.0), record("scr", 0.001, flops=1.6)]
    assert "1.6× dearer" in answer(summary_of(*dear), "m")
    assert "without repair (scr)" in answer(summary_of(*dear), "m")
    assert "only exact policies and controls" in answer(summary_of(*GRID[:3]), "m")
    assert "No case was run" in answer(summary_of(), "m")
    failed = {"case": "a", "policy": "scr", "status": "failed", "error": "E: x"}
    assert "all 1 measurements failed" in answer(summarize([failed], ["scr"]), "m")
    assert "random weights" in answer(summary_of(*GRID), "tiny-random")


def test_a_divergence_of_zero_is_drawn_and_written() -> None:
    zero = summary_of(record(NOISE, 0.0), record("exact", 0.0), record("scr", 0.0, flops=0.1))
    assert math.isnan(zero.rows[0].noise_multiple)
    assert figure(0.0) == "0"
    assert multiple(math.nan) == "–"
    figures = draw_all(zero)
    assert set(figures) == {"pareto", "kl_by_position", "first_token"}
    for name, plot in figures.items():
        assert inline_svg(name, plot).startswith("<svg role=")
    assert "nan" not in to_csv(zero)


def test_pareto_labels_do_not_overlap_and_twins_share_one() -> None:
    rows = [record("scr", 7e-4, flops=0.05), record("scr(form=copy)", 7.001e-4, flops=0.05)]
    close = [record(f"first_k({k})", 7e-4 / k, flops=0.05 * k**0.5) for k in (4, 8, 16)]
    plot = draw_all(summary_of(*GRID[:3], *rows, *close))["pareto"]
    names = [text.get_text() for text in plot.axes[0].texts]
    assert "scr, scr(form=copy)" in names
    assert overlaps(plot.axes[0]) == 0


def test_labels_are_placed_beside_crowded_points() -> None:
    plot = Figure(figsize=(4, 3))
    FigureCanvasAgg(plot)
    axes = plot.add_subplot()
    points = [(0.5 + 0.03 * i, 0.5, f"policy {i}") for i in range(5)]
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    plot.draw_without_rendering()
    assert len(merge_points(axes, points)) == 5
    assert len(merge_points(axes, [(0.5, 0.5, "a"), (0.501, 0.5, "b"), (0.9, 0.5, "c")])) == 2
    place_labels(axes, points)
    assert overlaps(axes) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.234, "1.23"),
        (0.000712, "0.000712"),
        (3.21e-9, "3.2e-9"),
        (0.0, "0"),
        (math.nan, "–"),
    ],
)
def test_figures_are_readable(value: float, text: str) -> None:
    assert figure(value) == text


def test_missing_pieces_do_not_break_the_summary(tmp_path: Path) -> None:
    """A policy that failed everywhere, a case without exact, no noise floor, no seam."""
    alone = record("scr", 0.1, case="b", distance=None)
    failed = {"case": "a", "policy": "drop", "status": "failed", "error": "E: x"}
    summary = summarize([alone, failed], ["exact", "drop", "scr"])
    (row,) = summary.rows
    assert row.policy == "scr"
    assert math.isnan(row.flops_relative)
    assert math.isnan(summary.noise)
    assert all(math.isnan(x) for x in summary.kl_by_distance["scr"])
    assert summary.failures == (("a", "drop", "E: x"),)
    assert draw_all(summary)
    (tmp_path / "s.csv").write_text(to_csv(summary))
    assert dataclasses.asdict(summary)
    assert answer(summary, "m")
