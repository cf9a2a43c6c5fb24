"""The run directory survives kills, refuses what does not belong, and lets one process in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.records import RunDirectory, refuse_changes
from jaxkv.errors import ConfigError, FormatError


def line(case: str, policy: str = "scr", status: str = "ok", **more: object) -> dict:
    return {"case": case, "policy": policy, "status": status, **more}


def test_records_come_back_and_of_two_lines_the_later_counts(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "a" / "b") as directory:
        directory.append(line("x", status="failed", error="E"))
        directory.append(line("y"))
        assert directory.finished() == {("y", "scr")}
        directory.append(line("x", value=0.1))
        assert directory.records() == [line("x", value=0.1), line("y")]
        assert directory.finished() == {("x", "scr"), ("y", "scr")}


@pytest.mark.parametrize("torn", ['{"case": "z", "pol', "{", '{"case":"z","policy":"p","status":"ok"}'])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    with RunDirectory(tmp_path) as directory:
        directory.append(line("x"))
    with (tmp_path / "cases.jsonl").open("a") as file:
        file.write(torn)  # no newline: the write did not finish
    with RunDirectory(tmp_path) as directory:
        assert directory.finished() == {("x", "scr")}
        directory.append(line("y"))
    lines = (tmp_path / "cases.jsonl").read_text().splitlines()
    assert [json.loads(each)["case"] for each in lines] == ["x", "y"]


@pytest.mark.parametrize("bad", ["nonsense", "[]", '{"case": "x"}'])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, bad: str) -> None:
    good = json.dumps(line("x"))
    (tmp_path / "cases.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
    with RunDirectory(tmp_path) as directory, pytest.raises(FormatError, match="line 2 is not a"):
        directory.records()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path),
        pytest.raises(ConfigError, match="in use by another run"),
        RunDirectory(tmp_path),
    ):
        pass
    with RunDirectory(tmp_path):
        pass  # free again


def test_directories_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file, expected a directory"), RunDirectory(file):
        pass


def test_config_json_is_read_back_or_refused(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        assert directory.read_config() is None
        directory.write_config({"config": {"a": 1}})
        assert directory.read_config() == {"config": {"a": 1}}
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(FormatError, match="is not JSON"):
            directory.read_config()
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(FormatError, match=r"is not the config\.json of a run"):
            directory.read_config()
        (tmp_path / "config.json").unlink()
        directory.append(line("x"))
        with pytest.raises(ConfigError, match=r"cases\.jsonl without config\.json"):
            directory.read_config()


def test_changes_are_refused_by_key() -> None:
    refuse_changes(Path("d"), {"config.a": [1, 2]}, {"config.a": [1, 2]})
    with pytest.raises(ConfigError) as error:
        refuse_changes(Path("d"), {"config.a": [1, 2]}, {"config.a": [3]})
    assert "workdir 'd' holds a run with config.a=1,2, this run has 3" in str(error.value)
    with pytest.raises(ConfigError, match=r"config\.gone=1, this run has None"):
        refuse_changes(Path("d"), {"config.gone": 1}, {})
