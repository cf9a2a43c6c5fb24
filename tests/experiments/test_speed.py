"""The serving-speed experiment on a tiny model: what is measured and written, never how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.speed import limits
from experiments.speed.config import defaults, resolve
from experiments.speed.measure import start_up
from experiments.speed.run import run
from experiments.subject import load_subject
from jaxkv.errors import ConfigError
from jaxkv.io.checkpoint import save_checkpoint

pytestmark = pytest.mark.once


def test_a_run_measures_every_case_with_ratios_and_refuses_to_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = defaults(smoke=True)
    result = run(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "cases.jsonl").read_text().splitlines()]
    assert result.finished == len(rows)
    assert {row["case"] for row in rows} == {
        "prefill 32",
        "prefill 64",
        "decode at 64, batch 1",
        "decode at 64, batch 2",
        "edit, exact",
        "edit, scr(min_span=16)",
    }
    assert all(row["median_seconds"] > 0 and row["against_jaxkv"] == 1 for row in rows)
    edits = {row["case"]: row for row in rows if row["case"].startswith("edit")}
    # 256 tokens, 16 replaced by 17 at a quarter: exact computes what is behind, scr the new and the tail.
    assert edits["edit, exact"]["forwarded"] == 257 - 64 + 1 - 1
    assert edits["edit, scr(min_span=16)"]["forwarded"] < 64
    document = json.loads((tmp_path / "run" / "config.json").read_text())
    assert document["bytes"]["pages"] > document["bytes"]["weights"] > 0
    assert document["rates"].keys() == {"matmul_flops", "row_bytes", "copy_bytes"}
    assert document["compiled"]["count"] > 0
    rounds = json.loads((tmp_path / "run" / "rounds.json").read_text())
    assert {each["what"]: each["seconds"] for each in rounds} == {row["case"]: row["seconds"] for row in rows}
    assert "GFLOP/s" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds a run already"):
        run(config, tmp_path / "run")


def test_bad_values_are_named() -> None:
    for values, message in (
        ({"peers": ("vllm",)}, "config.peers holds 'vllm', expected one of none"),
        ({"batches": (0,)}, "config.batches is 0, expected at least 1"),
        ({"policies": ("scrr",)}, "scrr"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(defaults(**values))
    with pytest.raises(ConfigError, match=r"config\.peer_gguf is 'no\.gguf'"):
        run(defaults(smoke=True, peers=("llama.cpp-float32",), peer_gguf="no.gguf"))


@pytest.mark.slow
def test_fresh_processes_say_what_each_stage_took(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "saved", load_subject(resolve(defaults(smoke=True))))
    start = start_up(resolve(defaults(smoke=True, model=str(saved)), ("model",)))
    for which in ("first", "second"):
        assert start[which].keys() == {"import", "load", "first token", "process"}
        stages = start[which]["import"] + start[which]["load"] + start[which]["first token"]
        assert 0 < stages < start[which]["process"]
    assert start["weights"] > 0
    assert start["load_peak"] >= 0
    with pytest.raises(RuntimeError, match=r"the fresh process failed: .*nowhere"):
        start_up(resolve(defaults(smoke=True, model="nowhere"), ("model",)))


def test_rates_count_what_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "seconds", lambda _call, _repeats: 0.5)
    assert limits.copy_rate(1) == 4 * 2**20
    assert limits.matmul_rate(2, 3, 5, "float32", 1) == 2 * (2 * 2 * 3 * 5 * limits.CHAIN)
    assert limits.read_rate(64, 64, 1) == 2 * (1 << 20)
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 30)
    assert limits.read_rate(8, 8, 1) == 2 * 4 * 64 * limits.MOST_MATRICES
