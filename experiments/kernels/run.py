"""Runs the kernel benchmark: a table on the screen, rows as JSON lines and CSV in the run directory."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from experiments.environment import environment
from experiments.kernels import bench, sweep
from experiments.kernels.bench import Row
from experiments.kernels.config import KernelsConfig, resolve
from experiments.kernels.table import print_table
from experiments.progress import counted
from experiments.records import RunDirectory
from experiments.runner import RunResult
from jaxkv.errors import ConfigError


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> RunResult:
    """Measures every case under every candidate and prints a table.

    Args:
      config: a ConfigDict or mapping, see `experiments.kernels.config`.
      workdir: run directory, new; `runs/<name>-<digest>-<time>` when None.
      given: keys that the user set on purpose; a machine without accelerator leaves them as they are.

    Returns:
      The run directory, the number of rows and how many of them failed or were wrong.

    Raises:
      ConfigError: a bad value, or a directory that holds a run.
    """
    platform = jax.default_backend()
    experiment = resolve(config, given, platform=platform)
    now = datetime.datetime.now(datetime.UTC)
    default = Path("runs") / f"{experiment.name}-{experiment.digest}-{now:%Y%m%d-%H%M%S}"
    out, progress = Console(), Console(stderr=True)
    if not out.is_terminal:
        out = Console(width=140)  # a file has no width, and a row is one line
    if platform == "cpu":
        out.print(
            "No accelerator: small shapes, measured under XLA on the CPU. "
            "These figures say nothing about the kernels.",
            highlight=False,
            soft_wrap=True,
        )
    with RunDirectory(Path(workdir) if workdir else default) as directory:
        if directory.read_config() is not None:
            raise ConfigError(f"workdir '{directory.path}' holds a run already, expected a new directory")
        directory.write_config(
            {
                "config": experiment.to_dict(),
                "config_digest": experiment.digest,
                "created": now.isoformat(timespec="seconds"),
                "environment": environment(),
            }
        )
        rows = _measure(experiment, platform, directory, progress)
        print_table(rows, out)
        out.print(f"Rows: {directory.path / 'rows.jsonl'} and rows.csv", highlight=False, soft_wrap=True)
    bad = sum(row.status in ("failed", "wrong") for row in rows)
    return RunResult(path=directory.path, finished=len(rows) - bad, failed=bad)


def _measure(config: KernelsConfig, platform: str, directory: RunDirectory, console: Console) -> list[Row]:
    ceiling_row = bench.copy_row(config.copy_bytes, config, "ceiling")
    ceiling = ceiling_row.bytes_per_second or 0.0
    ceiling_row.of_copy = 1.0
    rows = [ceiling_row]
    work: list[tuple[str, Callable[[], list[Row]]]] = [
        (case.name, lambda case=case: bench.attention_rows(case, config, platform, ceiling))  # type: ignore[misc]
        for case in sweep.attention_cases(config)
    ]
    work += [
        (moves.name, lambda moves=moves: bench.relocation_rows(moves, config, platform, ceiling))  # type: ignore[misc]
        for moves in sweep.move_cases(config)
    ]
    with counted(console) as progress:
        task = progress.add_task("Measuring", total=len(work))
        for number, (name, measure) in enumerate(work, 1):
            progress.update(task, description=name)
            if not console.is_terminal:  # a log has no bar: say where it stands
                console.print(f"Case {number} of {len(work)}: {name}", highlight=False)
            rows += measure()
            _write(rows, directory)  # what is measured is kept if the next case takes the process along
            progress.advance(task)
        progress.update(task, description="Measured")
    return rows


def _write(rows: list[Row], directory: RunDirectory) -> None:
    values = [dataclasses.asdict(row) for row in rows]
    for row in values:
        if row["error"] == float("inf"):
            row["error"] = None  # JSON has no infinity; the reason says it
    directory.write("rows.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in values))
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Row)])
    writer.writeheader()
    writer.writerows(values)
    directory.write("rows.csv", text.getvalue())
