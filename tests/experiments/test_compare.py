"""Runs compared: paired differences against sums by hand, refusals, the page, the command."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import runner
from experiments.compare import compare_runs
from experiments.config import defaults, resolve
from experiments.report.comparison import answer
from experiments.runner import RunResult
from jaxkv.errors import ConfigError, FormatError

pytestmark = pytest.mark.once

Change = Callable[[dict[str, Any]], None]


def copy_of(run: RunResult, path: Path, change: Change, config: Change = lambda _: None) -> Path:
    """A copy of a run's directory with other records and another config.json."""
    shutil.copytree(run.path, path)
    records = [json.loads(line) for line in (path / "cases.jsonl").read_text().splitlines()]
    for record in records:
        change(record)
    kept = [json.dumps(r) + "\n" for r in records if not r.get("drop")]
    (path / "cases.jsonl").write_text("".join(kept))
    document = json.loads((path / "config.json").read_text())
    config(document)
    (path / "config.json").write_text(json.dumps(document))
    return path


def worse(record: dict[str, Any]) -> None:
    """`drop` is 0.5 worse everywhere, `scr` better in some cases and worse in others, exact slower."""
    if record["policy"] == "drop":
        record["divergence"]["kl"]["mean"] += 0.5
        record["divergence"]["delta_nll"] += 0.25
    if record["policy"] == "scr":
        record["divergence"]["kl"]["mean"] += 0.1 if record["edit"] == "insert" else -0.1
    if record["policy"] == "exact":
        record["timings_ms"]["first_token"] *= 3
    if record["policy"] == "first_k(8)" and record["position"] == "head":
        record["drop"] = True


@pytest.fixture
def other(small_run: RunResult, tmp_path: Path) -> Path:
    return copy_of(small_run, tmp_path / "other", worse)


def test_differences_are_paired_over_the_common_cases(small_run: RunResult, other: Path) -> None:
    comparison = compare_runs([str(small_run.path), str(other)])
    rows = {row.policy: row for row in comparison.rows}
    assert list(rows) == ["exact", "drop", "scr", "first_k(8)"]
    a, b = (
        {(r["case"], r["policy"]): r for r in map(json.loads, (p / "cases.jsonl").read_text().splitlines())}
        for p in (small_run.path, other)
    )
    for policy, row in rows.items():
        cases = [case for case, name in a if name == policy and (case, name) in b]
        assert row.cases == len(cases)
        kl = [
            b[c, policy]["divergence"]["kl"]["mean"] - a[c, policy]["divergence"]["kl"]["mean"] for c in cases
        ]
        assert row.kl == pytest.approx(math.fsum(kl) / len(kl), abs=1e-15)
        assert row.kl_low <= row.kl <= row.kl_high
        assert min(kl) <= row.kl_low + 1e-15
        assert row.kl_other - row.kl_base == pytest.approx(row.kl, abs=1e-12)
    assert rows["drop"].decided
    assert rows["drop"].kl_low == pytest.approx(0.5)  # the same in every case: no spread
    assert rows["drop"].delta_nll == pytest.approx(0.25)
    assert not rows["scr"].decided, "two cases better, two worse by the same"
    assert rows["exact"].kl == 0
    assert not rows["exact"].decided
    assert rows["exact"].ms_low > 0
    assert (rows["first_k(8)"].cases, rows["first_k(8)"].unpaired) == (2, 2)
    assert all(row.flops_ratio == 1 for row in rows.values())
    text = answer(comparison)
    assert "differs from 'small' in KL under 1 of 4 policies on 4 common cases, most under drop" in text
    assert "+0.5 [+0.5, +0.5]" in text
    assert "0 are faster and 1 slower" in text


def test_a_run_compared_with_itself_differs_in_nothing(small_run: RunResult, tmp_path: Path) -> None:
    same = copy_of(small_run, tmp_path / "small", lambda _: None)
    comparison = compare_runs([str(small_run.path), str(same), str(small_run.path)])
    assert [run.label for run in comparison.runs] == ["small", "small (2)", "small (3)"]
    assert len(comparison.rows) == 8
    assert not any(row.decided or row.kl or row.ms for row in comparison.rows)
    assert comparison.changed == ()
    assert "under 0 of 4 policies" in answer(comparison)


def test_the_command_writes_page_table_and_plots(
    small_run: RunResult, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = defaults(compare=f"{small_run.path},{other}")
    result = runner.run(config, tmp_path / "out")
    assert (result.finished, result.failed) == (4, 0)
    assert {p.name for p in result.path.iterdir()} >= {"compare.html", "compare.csv", "plots"}
    with (result.path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["exact", "drop", "scr", "first_k(8)"]
    assert [row["decided"] for row in rows] == ["False", "True", "False", "False"]
    page = (result.path / "compare.html").read_text()
    assert 'id="compare_kl"' in page
    assert 'id="compare_difference"' in page
    assert all(link.startswith("#") for link in re.findall(r'href\s*=\s*"([^"]*)', page))
    assert str(tmp_path) not in page
    out = capsys.readouterr().out
    assert "under 1 of 4 policies" in out
    assert "compare.html" in out


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda d: d["model"].update(weights_digest="0" * 64), "model"),
        (lambda d: d["corpus"].update(sha256="0" * 64), "corpus"),
        (lambda d: d["config"].update(workload="drift"), "workload"),
        (lambda d: d["config"].update(seed=3), "workload"),
    ],
)
def test_runs_of_something_else_are_refused_unless_stated(
    small_run: RunResult, tmp_path: Path, change: Change, kind: str
) -> None:
    path = copy_of(small_run, tmp_path / "b", lambda _: None, change)
    paths = [str(small_run.path), str(path)]
    with pytest.raises(ConfigError, match=rf"runs of another {kind}: .*--config\.across={kind}"):
        compare_runs(paths)
    comparison = compare_runs(paths, (kind,))
    assert len(comparison.rows) == 4
    assert len(comparison.changed) == 1


def test_the_same_case_of_other_tokens_is_refused(small_run: RunResult, tmp_path: Path) -> None:
    path = copy_of(small_run, tmp_path / "b", lambda r: r.update(tokens_digest="0" * 16))
    with pytest.raises(ConfigError, match=r"has other tokens in 'small' than in 'b'"):
        compare_runs([str(small_run.path), str(path)])


def test_what_is_no_run_is_refused_in_one_sentence(small_run: RunResult, tmp_path: Path) -> None:
    first = str(small_run.path)
    with pytest.raises(ConfigError, match=r"names '.*nowhere', expected the directory of a run"):
        compare_runs([first, str(tmp_path / "nowhere")])
    empty = copy_of(small_run, tmp_path / "empty", lambda r: r.update(drop=True))
    with pytest.raises(ConfigError, match="without a common finished case"):
        compare_runs([first, str(empty)])
    cost = copy_of(
        small_run, tmp_path / "cost", lambda _: None, lambda d: d.update(config={"experiment": "edit_cost"})
    )
    with pytest.raises(ConfigError, match="a run of edit_cost, expected runs that measure divergence"):
        compare_runs([first, str(cost)])
    torn = copy_of(small_run, tmp_path / "torn", lambda r: r.pop("divergence"))
    with pytest.raises(FormatError, match="as ok without 'divergence', expected all figures"):
        compare_runs([first, str(torn)])


def test_config_keys_of_a_comparison_are_checked_and_name_no_run() -> None:
    with pytest.raises(ConfigError, match=r"config\.compare holds 'a' alone, expected two runs"):
        resolve({"compare": "a"})
    with pytest.raises(ConfigError, match=r"config\.compare is a,a, expected each value once"):
        resolve({"compare": "a,a"})
    with pytest.raises(ConfigError, match=r"config\.across holds 'modell'.*did you mean 'model'"):
        resolve({"across": "modell"})
    assert resolve({"compare": "a,b"}).digest == resolve({}).digest
