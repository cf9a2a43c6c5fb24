"""A run directory shared by several processes: each appends to a file of its own, process 0 merges."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.records import Key, Record, RunDirectory
from jaxkv.errors import ConfigError, FormatError

ORDER: list[Key] = [(case, policy) for case in ("a", "b", "c") for policy in ("exact", "scr")]


def record(case: str, policy: str, value: int = 0) -> Record:
    return {"case": case, "policy": policy, "status": "ok", "value": value}


def test_parts_are_read_together_and_merged_in_the_order_of_one_process(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, 0, 2) as zero, RunDirectory(tmp_path, 1, 2) as one:
        one.append(record("b", "exact"))
        zero.append(record("a", "exact"))
        one.append(record("b", "scr"))
        zero.append(record("c", "exact"))
        zero.append(record("a", "scr"))
        zero.append(record("c", "scr"))
        assert zero.finished() == one.finished() == set(ORDER)
        zero.merge(ORDER)
    names = {path.name for path in tmp_path.iterdir()}
    assert "cases.jsonl" in names
    assert "cases-1.jsonl" not in names
    with RunDirectory(tmp_path) as alone:
        assert [(r["case"], r["policy"]) for r in alone.records()] == ORDER


def test_a_merge_of_one_file_changes_nothing(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as alone:
        alone.append(record("b", "exact"))
        alone.append(record("a", "exact"))
        before = alone.cases_path.read_bytes()
        alone.merge(ORDER)
        assert alone.cases_path.read_bytes() == before


def test_what_a_dead_process_left_counts_for_fewer_ones(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, 1, 2) as one:
        one.append(record("b", "exact"))
    with (tmp_path / "cases-1.jsonl").open("ab") as file:
        file.write(b'{"case":"b","pol')
    with RunDirectory(tmp_path) as alone:
        assert alone.finished() == {("b", "exact")}, "a torn line of another process is left alone"
        alone.append(record("b", "scr"))
        alone.merge(ORDER)
        assert [(r["case"], r["policy"]) for r in alone.records()] == [("b", "exact"), ("b", "scr")]
    with RunDirectory(tmp_path, 1, 2) as one:  # its own torn line is cut off when it comes back
        one.append(record("c", "scr"))
        assert ("c", "scr") in one.finished()


def test_a_damaged_part_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "cases-1.jsonl").write_text("{}\n")
    with RunDirectory(tmp_path) as alone, pytest.raises(FormatError, match=r"cases-1\.jsonl' line 1"):
        alone.records()
    with RunDirectory(tmp_path) as alone, pytest.raises(ConfigError, match=r"without config\.json"):
        alone.read_config()


def test_a_process_of_another_run_that_is_still_at_work_is_noticed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, 1, 2):
        with pytest.raises(ConfigError, match="in use by another run"), RunDirectory(tmp_path):
            pass
        with pytest.raises(ConfigError, match="in use by another run"), RunDirectory(tmp_path, 1, 2):
            pass
        with RunDirectory(tmp_path, 0, 2):
            pass
    with RunDirectory(tmp_path):
        assert not list(tmp_path.glob(".lock-*"))
