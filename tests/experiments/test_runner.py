"""A run measures every case under every policy, resumes, and keeps going when something fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import runner
from experiments.measure import Bench
from experiments.records import NOISE
from experiments.runner import RunResult
from jaxkv.errors import CapacityError, ConfigError, FormatError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "cases.jsonl").read_text().splitlines()]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """A record without its wall clock."""
    return {key: value for key, value in record.items() if key != "timings_ms"}


Run = Callable[..., RunResult]
TINY: dict[str, Any] = {"edits": ("delete",), "positions": (0.5,), "layers_every": 0}


def test_every_measurement_is_there_once_and_the_report_with_it(small_run: RunResult) -> None:
    records = lines(small_run.path)
    keys = [(r["case"], r["policy"]) for r in records]
    cases = {case for case, _ in keys}
    assert len(cases) == 4
    assert len(keys) == len(set(keys)) == 4 * 4 + 2 == small_run.finished
    assert small_run.failed == 0
    assert sum(policy == NOISE for _, policy in keys) == 2
    names = {p.name for p in small_run.path.iterdir()}
    assert {"config.json", "cases.jsonl", "summary.csv", "report.html", "plots"} <= names
    plots = {p.name for p in (small_run.path / "plots").iterdir()}
    assert {"pareto.png", "pareto.svg", "first_token.png", "error_by_layer.svg"} <= plots


def test_config_json_says_what_was_run(small_run: RunResult) -> None:
    data = json.loads((small_run.path / "config.json").read_text())
    assert data["config"]["policies"] == ["exact", "drop", "scr", "first_k(8)"]
    assert data["config"]["seed"] == 0
    assert len(data["corpus"]["sha256"]) == len(data["model"]["weights_digest"]) == 64
    assert {"python", "jax", "numpy", "jaxkv", "processor"} <= set(data["environment"])
    assert len(data["measurements"]) == small_run.finished


def test_records_are_consistent(small_run: RunResult) -> None:
    for record in lines(small_run.path):
        if record["policy"] == NOISE:
            continue
        reuse, ledger = record["reuse"], record["ledger"]
        tokens = sum(reuse[name] for name in ("matched", "relocated", "forwarded", "dropped"))
        assert reuse["prompt"] == record["new_tokens"] == tokens
        assert record["flops"] == sum(ledger["flops_by_cause"].values())
        assert record["timings_ms"]["first_token"] >= record["timings_ms"]["forward"]
        kl = record["kl_tokens"]
        assert sum(kl) / len(kl) == pytest.approx(record["divergence"]["kl"]["mean"], rel=1e-5)
        assert len(kl) == 16
        assert record["greedy"]["tokens"] == 3
    exact = [r for r in lines(small_run.path) if r["policy"] == "exact"]
    assert all(r["kind"] == "exact" for r in exact)
    assert all(r["divergence"]["kl"]["max"] < 1e-9 for r in exact)
    assert all(r["greedy"]["identical"] for r in exact)


def test_layer_zero_is_never_stale_and_layer_one_is(small_run: RunResult) -> None:
    found = [r["layers"] for r in lines(small_run.path) if r["policy"] == "scr" and r["layers"]]
    assert found
    for layers in found:
        for state in ("keys", "values"):
            per_layer = layers[state]["per_layer"]
            assert per_layer[0] < 1e-5 < 1e-3 < per_layer[1]


def test_a_finished_run_is_not_measured_again(
    run_small: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = run_small(tmp_path / "a", **TINY)
    before = (first.path / "cases.jsonl").read_bytes()
    monkeypatch.setattr(runner, "load_subject", lambda _: pytest.fail("the model was loaded again"))
    second = run_small(tmp_path / "a", **TINY)
    assert second == first
    assert (first.path / "cases.jsonl").read_bytes() == before
    captured = capsys.readouterr()
    assert "All measurements are finished" in captured.err
    assert "report.html" in captured.out


def test_a_changed_config_is_refused_by_key(run_small: Run, small_run: RunResult) -> None:
    with pytest.raises(ConfigError, match=r"config\.seed=0, this run has 1: choose another"):
        run_small(small_run.path, seed=1)


def test_a_changed_corpus_is_refused(run_small: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All that is gold does not glitter. " * 100)
    values = {**TINY, "corpus": str(text), "policies": ("drop", "scr")}
    result = run_small(tmp_path / "a", **values)
    # A measurement is missing, so the run would go on, but on another text.
    kept = (result.path / "cases.jsonl").read_text().splitlines(keepends=True)[:-1]
    (result.path / "cases.jsonl").write_text("".join(kept))
    text.write_text("Not all those who wander are lost. " * 100)
    with pytest.raises(ConfigError, match=r"corpus\.sha256="):
        run_small(tmp_path / "a", **values)


def test_a_failing_policy_is_recorded_and_the_next_run_tries_it_again(
    run_small: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = Bench.policy

    def broken(self: Bench, case: Any, name: str, reference: Any) -> Any:
        if name == "scr":
            raise CapacityError("no pages\nleft")
        return measure(self, case, name, reference)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "policy", broken)
        result = run_small(tmp_path / "a", **TINY)
    assert (result.finished, result.failed) == (4, 1)
    failed = [r for r in lines(result.path) if r["status"] == "failed"]
    assert [(r["policy"], r["error"]) for r in failed] == [("scr", "CapacityError: no pages left")]
    assert "1 measurement failed" in capsys.readouterr().out
    assert "CapacityError: no pages left" in (result.path / "report.html").read_text()
    again = run_small(tmp_path / "a", **TINY)
    assert (again.finished, again.failed) == (5, 0)
    assert "failed" not in capsys.readouterr().out


def test_without_its_reference_a_case_fails_as_a_whole(
    run_small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise CapacityError("no pages")

    monkeypatch.setattr(Bench, "reference", broken)
    result = run_small(tmp_path / "a", **TINY)
    assert (result.finished, result.failed) == (0, 5)
    assert "No case finished" in (result.path / "report.html").read_text()


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_resume(
    run_small: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = Bench.policy

    def interrupted(self: Bench, case: Any, name: str, reference: Any) -> Any:
        if name == "scr":
            raise KeyboardInterrupt
        return measure(self, case, name, reference)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "policy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_small(tmp_path / "a", **TINY)
    kept = lines(tmp_path / "a")
    assert [r["policy"] for r in kept] == [NOISE, "exact", "drop"]
    error = capsys.readouterr().err
    assert "3 finished measurements are kept" in error
    assert "run the same command to resume" in error
    assert run_small(tmp_path / "a", **TINY).finished == 5
    assert lines(tmp_path / "a")[:3] == kept
    # Whatever is no time is the same in a run that nobody interrupted.
    whole = run_small(tmp_path / "b", **TINY)
    assert [timeless(r) for r in lines(tmp_path / "a")] == [timeless(r) for r in lines(whole.path)]


def test_a_line_that_claims_to_be_finished_and_is_not_is_named(
    run_small: Run, small_run: RunResult, tmp_path: Path
) -> None:
    path = tmp_path / "small"
    shutil.copytree(small_run.path, path)
    records = lines(path)
    del records[1]["divergence"]
    (path / "cases.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    case, policy = records[1]["case"], records[1]["policy"]
    with pytest.raises(FormatError, match=rf"case '{case}' under {policy} as ok without 'divergence'"):
        run_small(path)


def test_the_same_command_finds_its_own_directory(
    run_small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_small(None, **TINY)
    digest = json.loads((result.path / "config.json").read_text())["config_digest"]
    assert result.path == Path("runs") / f"small-{digest}"
    assert run_small(None, **TINY) == result


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["pallas_tpu", "triton"])
def test_a_run_on_interpreted_kernels_gives_the_figures_of_xla(
    run_small: Callable[..., RunResult], tmp_path: Path, implementation: str
) -> None:
    values = {
        "context": (40,), "edits": ("delete",), "positions": (0.5,), "sizes": (8,), "documents": 1,
        "continuation": 2, "policies": ("scr(min_span=8,tail=4)",), "chunk_size": 16, "num_pages": 12,
        "greedy_tokens": 0, "noise_every": 0, "layers_every": 0,
    }  # fmt: skip
    found, expected = (
        {r["policy"]: r for r in map(json.loads, (path / "cases.jsonl").read_text().splitlines())}
        for path in (
            run_small(tmp_path / "a", **values, implementation=implementation, interpret=True).path,
            run_small(tmp_path / "b", **values, implementation="xla").path,
        )
    )
    assert found.keys() == expected.keys() == {"exact", "scr(min_span=8,tail=4)"}
    for policy, record in found.items():
        other = expected[policy]
        assert (record["status"], record["reuse"], record["flops"]) == ("ok", other["reuse"], other["flops"])
        assert record["divergence"]["kl"]["mean"] == pytest.approx(
            other["divergence"]["kl"]["mean"], rel=1e-2, abs=1e-9
        )
