"""The plumbing of the kernel benchmark on a tiny shape, and what it must refuse to time."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import registry
from experiments.kernels import bench, candidates, problem, sweep, timing
from experiments.kernels.config import KernelsConfig, defaults, resolve
from jaxkv.errors import ConfigError
from pallas_kernels import shapes

TINY: dict[str, Any] = {
    "heads": ("smollm2",),
    "batch": (1,),
    "context": (256,),
    "deltas": (1, 2),
    "page_size": (16,),
    "vary_batch": 1,
    "vary_context": 256,
    "prefill": (8,),
    "moves": (2,),
    "dtype": "float32",
    "candidates": ("pallas", "xla", "copy"),
    "copy_bytes": 4096,
    "samples": 2,
    "sample_ms": 1.0,
}


def _run(path: Path, **values: Any) -> Any:
    config = defaults(**{**TINY, **values})
    return registry.find(config).run(config, str(path), given=tuple({**TINY, **values}))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a test of what a CPU measures")
def test_a_run_on_a_cpu_says_so_and_leaves_a_table_rows_and_its_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _run(tmp_path / "run")
    text = capsys.readouterr().out
    assert "No accelerator" in text
    assert "pallas skipped: no Pallas kernel runs on cpu" in text
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert result.failed == 0
    assert result.finished == len(rows)
    measured = [r for r in rows if r["status"] == "ok"]
    assert {(r["kernel"], r["candidate"]) for r in measured} == {
        ("copy", "copy"),
        *((kernel, candidate) for kernel in ("decode", "prefill") for candidate in ("xla", "copy")),
        ("relocate", "xla"),
    }
    for row in measured:
        assert row["seconds"] > 0
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["candidate"] == "copy" or row["error"] < bench.TOLERANCE["float32"]
    assert {r["candidate"] for r in rows if r["status"] == "skipped"} == {"pallas"}
    with (tmp_path / "run" / "rows.csv").open() as file:
        assert [r["case"] for r in csv.DictReader(file)] == [r["case"] for r in rows]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["environment"]["jax"] == jax.__version__
    with pytest.raises(ConfigError, match="holds a run already"):
        _run(tmp_path / "run")


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = shapes.benchmark_case("smollm2", 1, 256, dtype="float32")
    config = dataclasses.replace(KernelsConfig(), **{**TINY, "candidates": ("xla",)})

    def broken(*arrays: Any, **_: Any) -> Any:
        q = arrays[0]
        return jnp.full((q.shape[0], *q.shape[2:]), jnp.nan)

    monkeypatch.setattr(candidates.pallas_kernels, "paged_attention", broken)
    monkeypatch.setattr(candidates.pallas_kernels, "relocate_pages", lambda kv, *_, **__: kv + 0.25)
    (row,) = bench.attention_rows(case, config, "cpu", 1.0)
    assert (row.status, row.seconds) == ("wrong", None)
    (move,) = sweep.move_cases(config)
    (row,) = bench.relocation_rows(move, config, "cpu", 1.0)
    assert (row.status, row.seconds) == ("wrong", None)


def test_a_candidate_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such symbol\nmore")

    monkeypatch.setattr(candidates, "_cudnn", fail)
    case = shapes.benchmark_case("smollm2", 1, 256, dtype="float32")
    config = dataclasses.replace(KernelsConfig(), **{**TINY, "candidates": ("cudnn", "sdpa", "xla")})
    cudnn, sdpa, xla = bench.attention_rows(case, config, "cpu", 1.0)
    assert (cudnn.status, cudnn.reason) == ("failed", "RuntimeError: no such symbol")
    assert sdpa.status == "skipped"
    assert xla.status == "ok"


def test_judged_queries_are_those_of_the_definition() -> None:
    """The answers that a case is judged by, against all of them at once."""
    case = shapes.benchmark_case("smollm2", 2, 300, length=5, deltas=3, dtype="float32", ragged=True)
    wanted = problem.problem(case, 1)
    found = candidates.attention("xla", wanted, "cpu")
    out = np.asarray(found[0](*found[1]), np.float64)
    assert wanted.judged == ((0, 4), (1, 4), (0, 0))
    assert problem.error(out, wanted) < bench.TOLERANCE["float32"]
    out[1, 4, 0, 0, 0] += 1.0
    assert problem.error(out, wanted) == pytest.approx(1.0, abs=1e-4)
    out[0, 0] = np.nan
    assert problem.error(out, wanted) == float("inf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("context", [1000, 8000])
def test_a_part_that_is_lost_is_wrong_however_long_the_context(context: int, dtype: str) -> None:
    """One of 33 parts of a split: what it changes shrinks with the context, as answers do."""
    case = shapes.benchmark_case("smollm2", 1, context, dtype=dtype)
    wanted = problem.problem(case, 1)
    call, arrays = candidates.attention("xla", wanted, "cpu")
    assert problem.error(jax.jit(call)(*arrays), wanted) <= bench.allowed(wanted)
    q, kv, page, first, lo, hi, *rest = arrays
    lost = np.array(hi)
    lost[:, : -(-page.shape[1] // 33)] = 0
    found = jax.jit(call)(q, kv, page, first, lo, jnp.asarray(lost), *rest)
    assert problem.error(found, wanted) > bench.allowed(wanted)


def test_every_chained_call_runs() -> None:
    seen = timing.seconds_per_call(lambda x, y: x + y, jnp.zeros(()), jnp.ones(()), samples=3, sample_ms=0.01)
    assert len(seen) == 3
    assert min(seen) > 0
    total = jax.jit(
        lambda x, n: jax.lax.fori_loop(0, n, lambda _, s: candidates.chained(lambda q: q[:, 0])(s), x)
    )
    np.testing.assert_array_equal(total(jnp.ones((1, 2, 1, 1, 1, 1)), 3), np.ones((1, 2, 1, 1, 1, 1)))


def test_the_sweep_crosses_what_it_says_and_leaves_out_what_is_too_large() -> None:
    config = KernelsConfig(max_gib=1.0)
    cases = sweep.attention_cases(config)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert all(case.kv_bytes <= 2**30 for case in cases)
    assert {case.batch for case in cases} == {1, 8, 64}
    assert {case.deltas for case in cases} == {1, 4, 7}
    assert {case.page_size for case in cases} == {16, 64}
    assert any(len(set(case.context)) > 1 for case in cases)
    assert len(sweep.attention_cases(KernelsConfig())) > len(cases)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heads": "llama"}, r"config\.heads holds 'llama', expected one of smollm2"),
        ({"candidates": "xla,cuda"}, r"config\.candidates holds 'cuda'"),
        ({"page_size": 24}, r"config\.page_size holds 24, expected powers of two"),
        ({"samples": 0}, r"config\.samples is 0, expected at least 1"),
        ({"prefill": 4096, "vary_context": 128}, r"config\.prefill holds 4096"),
        ({"batch": ()}, r"config\.batch is empty"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(values, platform="gpu")


def test_a_cpu_gets_small_shapes_unless_the_user_asked() -> None:
    assert resolve({}, platform="cpu").candidates == ("xla", "copy")
    assert resolve({"context": (64,)}, given=("context",), platform="cpu").context == (64,)
    assert resolve({}, platform="gpu") == KernelsConfig()


def test_an_unknown_experiment_and_unknown_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"config\.experiment is 'kernel', expected one of reuse"):
        registry.find({"experiment": "kernel"})
    kernels = registry.find({"experiment": "kernels"})
    with pytest.raises(ConfigError, match="config key 'sampels' is unknown; did you mean 'samples'"):
        kernels.check_keys(["sampels"])
    with pytest.raises(ConfigError, match="config key 'policies' is unknown"):
        kernels.run({"experiment": "kernels", "policies": "scr"}, None, given=())
    kernels.check_keys(["experiment", "samples"])
