"""A run shared by two places, one after the other in this process: the same table as a run of one.

`tests/parallel/test_processes.py` does it with real processes, one of which is killed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import runner
from experiments.runner import RunResult
from jaxkv import processes
from jaxkv.errors import ProcessError

pytestmark = pytest.mark.once


def table(path: Path) -> str:
    """summary.csv without the columns that hold times."""
    rows = list(csv.DictReader((path / "summary.csv").read_text().splitlines()))
    timed = [name for name in rows[0] if name.endswith("_ms") or name in ("ttft_se", "speedup")]
    assert len(timed) == 6
    return "\n".join(",".join(value for name, value in row.items() if name not in timed) for row in rows)


def keys(path: Path) -> list[tuple[str, str]]:
    records = [json.loads(line) for line in (path / "cases.jsonl").read_text().splitlines()]
    return [(record["case"], record["policy"]) for record in records]


def test_two_places_give_the_table_of_one(
    run_small: Callable[..., RunResult],
    small_run: RunResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, met = tmp_path / "shared", []
    place = [processes.Place(0, 2)]

    def wait(what: str) -> None:
        met.append((place[0].index, what))
        if (place[0].index, what) == (0, "they measured"):  # now the other one's turn
            place[0] = processes.Place(1, 2)
            other = run_small(path)
            assert (path / "cases-1.jsonl").exists()
            assert other.finished == small_run.finished
            place[0] = processes.Place(0, 2)

    monkeypatch.setattr(runner.processes, "here", lambda: place[0])
    monkeypatch.setattr(runner.processes, "wait_for_all", wait)
    result = run_small(path)
    assert [index for index, _ in met].count(1) == 3
    assert (result.finished, result.failed) == (small_run.finished, 0)
    assert not list(path.glob("cases-*"))
    assert keys(path) == keys(small_run.path)
    assert table(path) == table(small_run.path)


def test_a_run_whose_other_process_is_gone_says_how_to_resume(
    run_small: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(what: str) -> None:
        raise ProcessError(f"of 2 processes, 1 ended while {what}, expected all to run")

    monkeypatch.setattr(runner.processes, "here", lambda: processes.Place(0, 2))
    monkeypatch.setattr(runner.processes, "wait_for_all", gone)
    with pytest.raises(ProcessError, match=r"1 ended while they loaded.*0 finished .* same command"):
        run_small(tmp_path / "run", edits=("delete",), positions=(0.5,), layers_every=0)
