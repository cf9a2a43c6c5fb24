"""The launcher from outside: exit codes, one-sentence errors, and a kill in mid-run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = "--config=configs/quickstart.py"
SMALL = [
    QUICKSTART,
    "--config.smoke=True",
    "--config.edits=delete",
    "--config.positions=0.5",
    "--config.layers_every=0",
    "--config.greedy_tokens=0",
]


# Enough measurements that a signal sent after the first ones finds the run in its middle.
LONG = [
    *(flag for flag in SMALL if "edits" not in flag and "positions" not in flag),
    "--config.edits=delete,insert,replace",
    "--config.positions=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8",
    "--config.noise_every=1",
]
LONG_CASES = 8 * 3


# A process that a shell put in the background was started with SIGINT ignored, and so are its children.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.launch", run_name="__main__", alter_sys=True)
"""


# Each command line in a fork of one process that has imported what the launcher imports (that takes seconds)
# and has started no thread. Standard input: a list of [arguments, file for stderr]; output: the exit codes.
FORKS = """
import json, os, runpy, sys, traceback
import experiments.registry, experiments.runner, jaxkv.processes
codes = []
for arguments, errors in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            sys.argv = ["launch", *arguments]
            runpy.run_module("experiments.launch", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as done:
            code = done.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
BAD = [
    ([QUICKSTART, "--config.polices=scr"], "'polices' is unknown; did you mean 'policies'?"),
    ([QUICKSTART, "--config.context=many"], "config.context holds 'many', expected a whole"),
    ([QUICKSTART, "--config.policies=scrr"], "policy 'scrr' is unknown"),
    ([QUICKSTART, "--config.seed=x"], "--config.seed=x"),
    ([QUICKSTART, "--config.corpus=/no/such/file"], "config.corpus is '/no/such/file'"),
    ([QUICKSTART, "--wrkdir=x"], "'wrkdir'"),
    ([QUICKSTART, "extra"], "argument 'extra' is unexpected"),
    (["--config=configs/missing.py"], "configs/missing.py"),
    ([], "--config is missing"),
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.launch", *arguments]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lets the processes of this module share what they compile."""
    cache = str(tmp_path_factory.mktemp("compiled"))
    own = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **own}


def launch(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit code and stderr of each command line of `BAD`."""
    path = tmp_path_factory.mktemp("bad")
    commands = [
        ([*arguments, f"--workdir={path / 'run'}"], str(path / f"{number}.err"))
        for number, (arguments, _) in enumerate(BAD)
    ]
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        cwd=ROOT,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        (code, Path(errors).read_text())
        for code, (_, errors) in zip(json.loads(done.stdout), commands, strict=True)
    ]


@pytest.mark.skipif(os.name != "posix", reason="forks")
@pytest.mark.parametrize("number", range(len(BAD)), ids=[message for _, message in BAD])
def test_bad_flags_are_one_sentence_and_exit_code_2(number: int, refusals: list[tuple[int, str]]) -> None:
    code, error = refusals[number]
    assert code == 2
    assert BAD[number][1] in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1


def test_a_command_line_in_a_process_of_its_own_is_refused_alike(
    tmp_path: Path, refusals: list[tuple[int, str]]
) -> None:
    result = launch(*BAD[0][0], f"--workdir={tmp_path / 'run'}")
    assert (result.returncode, result.stderr) == refusals[0]


def test_a_fault_in_the_config_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def get_config():\n    return unknown_name\n")
    result = launch(f"--config={path}")
    assert result.returncode == 2
    assert "name 'unknown_name' is not defined" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_model_that_is_not_there_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "model.gguf"
    result = launch(QUICKSTART, f"--config.model={missing}", f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 1
    assert str(missing) in result.stderr
    assert "Traceback" not in result.stderr


def test_help_works() -> None:
    result = launch("--helpfull")
    assert "Run directory" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.once
def test_killed_in_mid_run_and_resumed(tmp_path: Path, environment: dict[str, str]) -> None:
    """SIGKILL, then a torn line on top: the same command finishes, repeating nothing."""
    workdir = tmp_path / "run"
    cases = workdir / "cases.jsonl"
    arguments = [*LONG, f"--workdir={workdir}", "--config.policies=drop,scr,first_k(8),forget"]
    expected = LONG_CASES * (1 + 1 + 4)  # noise, exact and four policies
    process = subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 240
        while not (cases.exists() and cases.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "no measurement was written"
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    whole = cases.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    assert 2 <= kept.count(b"\n") < expected
    with cases.open("ab") as file:
        file.write(b'{"case":"delete-50%-48-c320-d0","policy":"for')
    result = launch(*arguments, env=environment)
    assert result.returncode == 0, result.stderr
    assert "Resuming" in result.stderr
    assert cases.read_bytes().startswith(kept)
    records = [json.loads(line) for line in cases.read_text().splitlines()]
    keys = [(r["case"], r["policy"]) for r in records]
    assert len(keys) == len(set(keys)) == expected
    assert all(r["status"] == "ok" for r in records)
    assert "Report:" in result.stdout
    assert (workdir / "report.html").is_file()


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT as a terminal does")
def test_ctrl_c_is_exit_code_130(tmp_path: Path, environment: dict[str, str]) -> None:
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *LONG, f"--workdir={workdir}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not (workdir / "cases.jsonl").exists():
            assert process.poll() is None, "the run ended before it could be interrupted"
            assert time.monotonic() < deadline, "no measurement was written"
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "run the same command to resume" in error
    assert "Traceback" not in error
