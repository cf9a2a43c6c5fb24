"""Two real processes on this machine, joined by `jax.distributed` with collectives over TCP."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tolerances import tolerance

import jaxkv
from jaxkv import processes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SWEEP = [
    "--config=configs/quickstart.py",
    "--config.smoke=True",
    "--config.edits=delete,insert",
    "--config.positions=0.1,0.5,0.9",
    "--config.policies=scr",
    "--config.noise_every=2",
    "--config.layers_every=0",
    "--config.greedy_tokens=0",
]
CASES, MEASUREMENTS = 6, 6 * 2 + 3  # exact and scr; the noise floor on every second case


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lets the processes of this module share what they compile."""
    cache = str(tmp_path_factory.mktemp("compiled"))
    own = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    paths = [str(ROOT), str(ROOT / "tests"), str(HERE), os.environ.get("PYTHONPATH", "")]
    own |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sweep(workdir: Path, count: int, environment: dict[str, str]) -> list[subprocess.Popen[str]]:
    place = [f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}"]
    command = ["-m", "experiments.launch", *SWEEP, f"--workdir={workdir}"]
    return [
        start(
            [*command, *(place if count > 1 else []), *([f"--process_id={i}"] if count > 1 else [])],
            environment,
        )
        for i in range(count)
    ]


def end(running: list[subprocess.Popen[str]], seconds: float = 240) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    found = []
    try:
        for process in running:
            out, error = process.communicate(timeout=seconds)
            found.append((process.returncode, out, error))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


def records(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "cases.jsonl").read_text().splitlines()]


def table(workdir: Path) -> str:
    """summary.csv without the columns that hold times."""
    rows = list(csv.DictReader((workdir / "summary.csv").read_text().splitlines()))
    timed = [name for name in rows[0] if name.endswith("_ms") or name in ("ttft_se", "speedup")]
    assert len(timed) == 6
    return "\n".join(",".join(value for name, value in row.items() if name not in timed) for row in rows)


def test_one_engine_over_two_processes_answers_alike_in_both(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    from on_mesh import EVEN, engine_of, model_of
    from spanning import answers

    port = free_port()
    arguments = [str(HERE / "spanning.py"), f"127.0.0.1:{port}", "2"]
    done = end([start([*arguments, str(i), str(tmp_path)], environment) for i in range(2)])
    for code, _, error in done:
        assert code == 0, error[-3000:]
    first, second = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert first == second
    assert first["warm"] == 31, "all but the token whose logits are asked for"
    alone = answers(engine_of(model_of(**EVEN, num_layers=1)))
    assert first["tokens"] == alone["tokens"]
    for name in ("prefill", "generated"):
        np.testing.assert_allclose(first[name], alone[name], atol=tolerance("logits"), rtol=0)
    assert first["keys"] == pytest.approx(alone["keys"], rel=1e-5)
    here = jaxkv.load(tmp_path / "model", progress=False)
    for a, b in zip(
        jax.tree.leaves(here.params), jax.tree.leaves(model_of(**EVEN, num_layers=1).params), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_same_command_resumes(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Then the report is that of a single process, byte for byte, times aside."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert end(sweep(alone, 1, environment))[0][0] == 0
    running = sweep(shared, 2, environment)
    theirs = shared / "cases-1.jsonl"
    deadline = time.monotonic() + 200
    while not (theirs.exists() and theirs.read_bytes().count(b"\n") >= 2):
        assert running[1].poll() is None, running[1].communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no measurement was written"
        time.sleep(0.002)
    running[1].kill()
    killed = time.monotonic()
    code, _, error = end(running)[0]
    assert code == 1, error
    assert "of 2 processes, 1 ended" in error
    assert "run the same command in every process to resume" in error
    assert "Traceback" not in error
    assert time.monotonic() - killed < 120, "the survivor finishes its own cases and then waits no longer"
    kept = theirs.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert 2 <= kept.count(b"\n") < MEASUREMENTS // 2
    assert not (shared / "summary.csv").exists()

    done = end(sweep(shared, 2, environment))
    assert [code for code, _, _ in done] == [0, 0], done
    assert "Resuming" in done[1][2]
    assert not list(shared.glob("cases-*"))
    found = records(shared)
    again = {json.dumps(record) for record in found}
    assert {json.dumps(json.loads(line)) for line in kept.splitlines()} <= again, "measured once"
    order = [(r["case"], r["policy"]) for r in found]
    assert order == [(r["case"], r["policy"]) for r in records(alone)]
    assert len(set(order)) == len(order) == MEASUREMENTS
    assert len({case for case, _ in order}) == CASES
    assert table(shared) == table(alone)


@pytest.mark.slow
def test_other_experiments_run_in_one_process(tmp_path: Path, environment: dict[str, str]) -> None:
    arguments = ["-m", "experiments.launch", "--config=configs/prefix_trace.py", f"--workdir={tmp_path}"]
    place = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    done = end([start([*arguments, *place, f"--process_id={i}"], environment) for i in range(2)])
    for code, _, error in done:
        assert code == 2, error
        assert "num_processes is 2, expected 1" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", None, 0), "num_processes is missing, expected coordinator, num_processes, process_id"),
        ((None, 2, 0), "coordinator is missing"),
        (("host", 2, 0), "coordinator is 'host', expected host:port"),
        (("host:99999", 2, 0), "coordinator is 'host:99999'"),
        (("host:1", 0, 0), "num_processes is 0, expected at least 1"),
        (("host:1", 2, 2), "process_id is 2, expected 0 to 1"),
    ],
)
def test_bad_places_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(jaxkv.ConfigError, match=message):
        processes.join(*arguments)


def test_importing_the_library_does_not_start_jax() -> None:
    """Processes must join before JAX starts."""
    code = (
        "import jaxkv, experiments.runner; from jax._src import xla_bridge as x; "
        "assert not x.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_process_alone_waits_for_nobody() -> None:
    assert processes.join(None, None, None) == processes.here() == processes.Place(0, 1)
    processes.wait_for_all("nothing happened")
    assert processes.Place(1, 3).owns(4)
    assert [i for i in range(6) if processes.Place(1, 3).owns(i)] == [1, 4]
