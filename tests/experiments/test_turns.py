"""Runs of the workloads with turns and tasks, end to end on the tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.calibrate import budgets, fit_run, judge, main, read_run
from experiments.config import defaults
from experiments.records import NOISE
from experiments.runner import RunResult, run
from jaxkv.errors import ConfigError

pytestmark = pytest.mark.once

Lines = Callable[[Path], list[dict[str, Any]]]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (path / "cases.jsonl").read_text().splitlines()]


def small(path: Path, **values: Any) -> RunResult:
    values = {"smoke": True, "num_pages": 160, "layers_every": 0, "continuation": 8, **values}
    return run(defaults(**values), path, given=tuple(values))


# Of the tiny model: 2 layers, 2 heads, key and value of 16 numbers each; int8 has a scale for either.
TOKEN_BYTES = {"float32": 512, "bfloat16": 256, "int8": 128 + 32}


def check_what_the_dtype_costs_alone(records: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Beside what reuse costs: of exact, both are the same; and narrower costs more."""
    assert all(r["pages"] is None for (_, dtype), r in records.items() if dtype == "float32")
    alone = {}
    for (policy, dtype), record in records.items():
        if dtype == "float32" or policy == NOISE:
            continue
        alone.setdefault(dtype, set()).add(record["pages"]["kl"])
        if policy == "exact":
            assert record["pages"]["with_reuse_kl"] == pytest.approx(record["pages"]["kl"], rel=1e-2)
    # A property of the case: no policy changes it.
    assert all(len(values) == 1 for values in alone.values())
    assert 0 < max(alone["bfloat16"]) < max(alone["int8"])
    assert {d: r["kv_token_bytes"] for (p, d), r in records.items() if p == "exact"} == TOKEN_BYTES


def test_drift_keeps_keys_in_view_form_and_loses_them_when_rotations_compose(tmp_path: Path) -> None:
    """CASES 17, 25: after any number of moves a view's keys have the bits they were born with."""
    policies = ("scr(min_span=16)", "scr(form=copy,min_span=16)", "scr(form=composed,min_span=16)")
    result = small(
        tmp_path / "a", workload="drift", context=(200,), moves=(8,), kv_dtype="float32,bfloat16,int8",
        policies=policies, noise_every=1, documents=1,
    )  # fmt: skip
    assert result.failed == 0
    records = {(r["policy"], r["kv_dtype"]): r for r in lines(result.path)}
    for dtype in ("float32", "bfloat16", "int8"):
        steps = {p: [s for s in records[p, dtype]["steps"] if "kl" in s] for p in policies}
        assert [len(s) for s in steps.values()] == [4, 4, 4]  # after 1, 2, 4, 8 edits
        # A form is canonical in a name: its arguments stay, in the order of the fields.
        view, copy, composed = ([s["key_change"] for s in each if s["key_change"]] for each in steps.values())
        assert view == [], "not one bit"
        assert max(copy) <= 1.1 * copy[0] or max(copy) < 1e-6
        if dtype != "float32":
            assert composed[-1] > 1.5 * max(copy)
    exact = [r for r in lines(result.path) if r["policy"] == "exact"]
    assert all(r["kind"] == "exact" and r["divergence"]["kl"]["max"] < 1e-9 for r in exact)
    assert all(len(r["steps"]) == 8 == r["turns"] for r in exact)
    assert all(sum(s["flops"] for s in r["steps"]) == pytest.approx(r["flops"]) for r in exact)
    check_what_the_dtype_costs_alone(records)
    assert {r["corpus"] for r in lines(result.path)} == {exact[0]["corpus"]}
    text = (result.path / "report.html").read_text()
    assert 'id="steps"' in text
    assert "Dtypes of the pages" in text
    assert "scr(min_span=16)" in text


def test_a_view_is_materialized_past_max_deltas_and_its_keys_stay_at_one_rounding(tmp_path: Path) -> None:
    """CASE 25 for scattered spans: twelve places are more distances than the engine's eight."""
    policies = ("scr(min_span=8,tail=0)", "scr(form=copy,min_span=8,tail=0)")
    result = small(
        tmp_path / "a", workload="drift", context=(200,), moves=(16,), places=12, kv_dtype="bfloat16",
        policies=policies, noise_every=0, documents=1, num_pages=400,
    )  # fmt: skip
    assert result.failed == 0
    view, copy = (next(r["steps"] for r in lines(result.path) if r["policy"] == p) for p in policies)
    assert [step["deltas"] for step in view] == [step["deltas"] for step in copy] == list(range(1, 17))
    assert [step["materialized"] for step in view] == [False] * 7 + [True] * 9, "seven distances fit a view"
    assert all(step["kv_bytes_moved"] == 0 for step in view[:7])
    assert view[7]["kv_bytes_moved"] > 0
    # Once copied, a prefix stays: the next place moves only what is behind it, in as few distances.
    assert view[8]["kv_bytes_moved"] == 0
    error = {name: {n: s["key_change"] for n, s in enumerate(steps, 1) if s.get("key_change") is not None}
             for name, steps in (("view", view), ("copy", copy))}  # fmt: skip
    assert [error["view"][n] for n in (1, 2, 4)] == [0, 0, 0], "not one bit"
    assert set(error["view"]) == {1, 2, 4, 8, 16}
    assert 0 < error["view"][8] <= 1.1 * error["copy"][1]
    assert 0 < error["view"][16] <= 1.1 * error["copy"][1]


def test_a_residue_run_tells_histories_apart_only_where_something_stale_is_kept(tmp_path: Path) -> None:
    result = small(tmp_path / "a", workload="residue", policies="scr,forget", distances=(100,), num_items=2)
    by_policy = {p: [r for r in lines(result.path) if r["policy"] == p] for p in ("exact", "scr", "forget")}
    for clean in ("exact", "forget"):
        assert all(r["twin_kl"] < 1e-12 for r in by_policy[clean])
    assert all(r["twin_kl"] > 1e-9 for r in by_policy["scr"])
    text = (result.path / "report.html").read_text()
    assert "What is left of what was deleted" in text


def test_recall_agent_loop_rotation_and_greedy_figures_are_in_the_report(tmp_path: Path) -> None:
    recall = small(
        tmp_path / "r", workload="recall", policies="scr,dependents(8,8)", distances=(40,), num_items=2,
        greedy_tokens=4, rotation_every=1, noise_every=0,
    )  # fmt: skip
    assert recall.failed == 0
    tasks = [r["task"] for r in lines(recall.path)]
    assert all(t["kind"] == "recall" and math.isfinite(t["margin"]) for t in tasks)
    assert all(r["rotation_kl"] is None for r in lines(recall.path)), "a changed word moves nothing"
    agents = small(
        tmp_path / "a", workload="agent_loop", policies="scr,erratum", edits="strip_reasoning",
        turns=2, sizes=(40,), noise_every=1,
    )  # fmt: skip
    assert agents.failed == 0
    kinds = {r["policy"]: r["kind"] for r in lines(agents.path) if r["policy"] != NOISE}
    assert kinds == {"exact": "exact", "scr": "approximate", "erratum": "approximate"}
    grid = small(
        tmp_path / "g", policies="scr", edits="insert", positions=(0.0,), sizes=(48,), rotation_every=1,
        noise_every=0, greedy_tokens=4,
    )  # fmt: skip
    (record,) = [r for r in lines(grid.path) if r["policy"] == "scr"]
    assert 0 < record["rotation_kl"] < 1e-9 < record["divergence"]["kl"]["mean"]
    assert record["greedy"]["match"] <= 4
    every_second = small(
        tmp_path / "h", policies="scr", edits="insert", positions=(0.0,), sizes=(48, 40), rotation_every=2,
        noise_every=0, documents=1,
    )  # fmt: skip
    rotations = [r["rotation_kl"] for r in lines(every_second.path) if r["policy"] == "scr"]
    assert [value is None for value in rotations] == [False, True]
    text = (grid.path / "report.html").read_text()
    for part in ("Paired differences", "KL of rotation", "greedy tokens"):
        assert part in text


def test_a_run_with_signals_calibrates_and_another_one_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "policies": "scr,scr|sinks(4)|first_k(32),scr|sinks(4)|dependents(32,32)",
        "edits": "delete,replace", "positions": (0.0, 0.2, 0.4, 0.6), "sizes": (24,), "noise_every": 0,
        "signals": True,
    }  # fmt: skip
    fitted = small(tmp_path / "a", **values)
    # Other edits of the same model: its random weights follow from the seed.
    held = small(tmp_path / "b", **{**values, "sizes": (20,)})
    calibration = fit_run(fitted.path)
    assert calibration.cases == 24
    _, records = read_run(held.path)
    found = judge(calibration, records)
    assert found["answers"] == 24
    assert 0 <= found["coverage"] <= 1
    rows = budgets(calibration, records, ("scr", "scr|sinks(4)|first_k(32)"))
    assert [r["eps"] for r in rows] == sorted(r["eps"] for r in rows)
    assert all(r["cases"] == 8 for r in rows)
    for row in rows:  # all rungs, then exact: what it costs when nothing fits
        assert row["flops"] > 1 if row["exact"] == 1 else row["flops"] > 0
    assert rows[0]["exact"] >= rows[-1]["exact"]
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    for name, value in (
        ("run", fitted.path),
        ("held_out", held.path),
        ("out", tmp_path / "out"),
        ("plot", tmp_path / "p.png"),
    ):
        monkeypatch.setattr(flags.FLAGS, name, str(value))
    assert main([]) == 0
    assert "the bound covers" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 1000
    (written,) = (tmp_path / "out").iterdir()
    assert written.stem == calibration.weights_digest[:16]
    plain = small(tmp_path / "c", policies="scr", edits="delete", positions=(0.5,), noise_every=0)
    with pytest.raises(ConfigError, match="recorded no signals"):
        read_run(plain.path)
    with pytest.raises(ConfigError, match=r"holds no cases\.jsonl"):
        read_run(tmp_path / "nowhere")


def test_a_budget_without_calibration_is_a_failed_measurement_that_says_so(tmp_path: Path) -> None:
    result = small(tmp_path / "a", policies="budget(0.01)", edits="delete", positions=(0.5,), noise_every=0)
    (failed,) = [r for r in lines(result.path) if r["status"] == "failed"]
    assert "no calibration is known" in failed["error"]
    assert (result.finished, result.failed) == (1, 1)
