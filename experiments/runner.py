"""Runs an experiment: cases in, a run directory out. What is finished is not done again."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.compare import compare_runs
from experiments.config import TINY_MODEL, ExperimentConfig, resolve
from experiments.environment import environment
from experiments.measure import Bench, failure
from experiments.progress import counted, saying_how_to_resume
from experiments.records import NOISE, Key, Record, RunDirectory, refuse_changes
from experiments.report.comparison import write_comparison
from experiments.report.write import write_report
from experiments.subject import load_subject
from experiments.workloads import make_cases
from experiments.workloads.case import Case
from experiments.workloads.corpus import Corpus, encode, load_corpus
from jaxkv import processes
from jaxkv.errors import ConfigError, ProcessError
from jaxkv.io.models import Model
from jaxkv.processes import Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """Where the results are, and how many measurements there are."""

    path: Path
    finished: int
    failed: int


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> RunResult:
    """Measures every case under every policy, writes the report and prints its gist.

    Args:
      config: a ConfigDict (see `experiments.config`).
      workdir: run directory; `runs/<name>-<digest of config>` when None, so that the same command
        finds its own run again.
      given: keys that the user set on purpose; smoke=True leaves them as they are.

    With `config.compare` nothing is measured: the named runs are compared, see `experiments.compare`.

    Returns:
      The run directory and the number of finished and failed measurements. A measurement that fails
      is recorded with its error and stops nothing; the next run tries it again.

    Raises:
      ConfigError: a bad value, or a directory that holds another experiment.
      FetchError, FormatError: the model can't be had.
      KeyboardInterrupt: after saying how to resume; finished measurements are kept.
    """
    experiment = resolve(config, given)
    if experiment.compare:
        return _compare(experiment, workdir)
    path = Path(workdir) if workdir else Path("runs") / f"{experiment.name}-{experiment.digest}"
    out, progress = Console(), Console(stderr=True)
    place = processes.here()
    with RunDirectory(path, place.index, place.count) as directory:
        with saying_how_to_resume(
            progress, lambda: f"{len(directory.finished())} finished measurements are kept in {path}"
        ):
            order = _measure_all(experiment, directory, progress, place)
        _wait(directory, "they measured")
        if not place.index:
            directory.merge(order)
            write_report(directory, experiment, out)
        _wait(directory, "process 0 wrote the report")
        records = directory.records()
        finished = len(directory.finished())
        return RunResult(path=path, finished=finished, failed=len(records) - finished)


def _compare(config: ExperimentConfig, workdir: str | Path | None) -> RunResult:
    """Compares runs; one "measurement" a pair of runs and policy."""
    comparison = compare_runs(config.compare, config.across)
    path = Path(workdir) if workdir else Path("runs") / f"compare-{comparison.digest}"
    with RunDirectory(path) as directory:
        write_comparison(directory, comparison, Console())
    return RunResult(path=path, finished=len(comparison.rows), failed=0)


def _wait(directory: RunDirectory, what: str) -> None:
    """Waits for the run's other processes, or says how to go on without one."""
    try:
        processes.wait_for_all(what)
    except ProcessError as error:
        count = len(directory.finished())
        raise ProcessError(
            f"{error}: {count} finished measurements are kept in {directory.path}; run the same command in "
            "every process to resume"
        ) from error


def _measure_all(
    config: ExperimentConfig, directory: RunDirectory, console: Console, place: Place
) -> list[Key]:
    """Measures this process's cases; returns the keys of all measurements, in order."""
    previous = directory.read_config()
    if previous is not None:
        refuse_changes(directory.path, _named(previous["config"]), _named(config.to_dict()))
        planned = {(case, policy) for case, policy in previous.get("measurements", [])}
        if planned and planned <= directory.finished():
            console.print(f"All measurements are finished in {directory.path}.", highlight=False)
            return [(case, policy) for case, policy in previous["measurements"]]
    if config.smoke and config.model == TINY_MODEL:
        console.print(
            "Smoke run: a tiny model with random weights that reads bytes; no download. "
            "Give --config.model to use a real one.",
            highlight=False,
            soft_wrap=True,
        )
    with console.status("Loading the corpus"):
        corpus = load_corpus(config.corpus)
    model = load_subject(config)
    with console.status("Tokenizing the corpus"):
        tokens = encode(corpus, model)
        bos = _bos(config, model)
        cases = make_cases(config, tokens, bos, model)
    _require_positions(config, cases, model)
    planned_keys = [key for i, case in enumerate(cases) for key in _keys(config, i, case)]
    document = _document(config, corpus, len(tokens), model, planned_keys)
    if previous is not None:
        refuse_changes(directory.path, _identity(previous), _identity(document))
    elif not place.index:
        directory.write_config(document)
    _wait(directory, "they loaded the model")
    _measure(config, directory, model, cases, corpus.digest[:16], console, place)
    return planned_keys


def _require_positions(config: ExperimentConfig, cases: list[Case], model: Model) -> None:
    longest = max(case.longest for case in cases) + config.greedy_tokens
    if longest > model.config.max_positions:
        raise ConfigError(
            f"config.context holds {max(config.context)}, with edit and continuation {longest} tokens, "
            f"expected at most the {model.config.max_positions} positions of {model.name}"
        )


def _measure(
    config: ExperimentConfig,
    directory: RunDirectory,
    model: Model,
    cases: list[Case],
    corpus: str,
    console: Console,
    place: Place,
) -> None:
    """`corpus`: its digest, named in every line."""
    finished = directory.finished()
    todo = [
        (index, case, missing)
        for index, case in enumerate(cases)
        if place.owns(index)
        and (missing := [p for _, p in _keys(config, index, case) if (case.id, p) not in finished])
    ]
    total = sum(len(missing) + 1 for _, _, missing in todo)  # one more a case: its reference
    kept = len(finished)
    if kept:
        console.print(f"Resuming: {kept} measurements are there already.", highlight=False)
    longest = max(c.longest for c in cases)
    bench = Bench(model, config, longest + config.greedy_tokens)
    with counted(console, remaining=True) as progress:
        task = progress.add_task("Measuring", total=total)
        for number, (index, case, missing) in enumerate(todo, 1):
            if not console.is_terminal:  # a log has no bar: say where it stands
                console.print(f"Case {number} of {len(todo)}: {case.id}", highlight=False)
            progress.update(task, description=f"{case.id}: reference")
            try:
                reference = bench.reference(
                    case,
                    layers=_every(config.layers_every, index),
                    rotation=_every(config.rotation_every, index),
                )
            except Exception as error:
                # Without the reference nothing of this case can be judged.
                for policy in missing:
                    directory.append({**failure(case, policy, error), "corpus": corpus})
                progress.advance(task, len(missing) + 1)
                continue
            progress.advance(task)
            for policy in missing:
                progress.update(task, description=f"{case.id}: {policy}")
                record: Record
                try:
                    record = (
                        bench.noise(case, reference)
                        if policy == NOISE
                        else bench.policy(case, policy, reference)
                    )
                except Exception as error:
                    record = failure(case, policy, error)
                directory.append({**record, "corpus": corpus})
                progress.advance(task)
        progress.update(task, description="Measured")


def _keys(config: ExperimentConfig, index: int, case: Case) -> list[Key]:
    """The measurements of one case, the noise floor first."""
    noise = [NOISE] if _every(config.noise_every, index) else []
    return [(case.id, name) for name in [*noise, *config.policies]]


def _every(step: int, index: int) -> bool:
    return step > 0 and index % step == 0


def _bos(config: ExperimentConfig, model: Model) -> int | None:
    if not config.add_bos:
        return None
    return model.config.bos_token_id if model.tokenizer is None else model.tokenizer.bos_id


def _document(
    config: ExperimentConfig, corpus: Corpus, tokens: int, model: Model, keys: list[Key]
) -> dict[str, Any]:
    """Contents of `config.json`: enough to know what was run, and to run it again."""
    tokenizer = model.tokenizer
    return {
        "config": config.to_dict(),
        "config_digest": config.digest,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "corpus": {"name": corpus.name, "sha256": corpus.digest, "tokens": tokens},
        "model": {
            "name": model.name,
            "source": model.source,
            "dtype": model.dtype,
            "weights_digest": model.weights_digest,
            "tokenizer_digest": tokenizer.digest if tokenizer else None,
            **model.config.to_dict(),
        },
        "environment": environment(),
        "measurements": [list(key) for key in keys],
    }


def _identity(document: dict[str, Any]) -> dict[str, Any]:
    """What must not change between the runs that share a directory."""
    return {
        "corpus.sha256": document["corpus"]["sha256"],
        "model.weights_digest": document["model"]["weights_digest"],
        "environment.jaxkv": document["environment"]["jaxkv"],
    }


def _named(values: dict[str, Any]) -> dict[str, Any]:
    return {f"config.{key}": value for key, value in values.items()}
