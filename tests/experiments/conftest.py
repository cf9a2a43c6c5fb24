"""A small finished run, shared by the tests that only read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import runner
from experiments.config import defaults
from experiments.runner import RunResult

SMALL: dict[str, Any] = {
    "name": "small",
    "smoke": True,
    "edits": ("delete", "insert"),
    "positions": (0.0, 0.5),
    "sizes": (48,),
    "policies": ("drop", "scr", "first_k(8)"),
    "noise_every": 2,
    "layers_every": 2,
    "greedy_tokens": 3,
    "num_pages": 100,  # pools of one size share compiled steps
}


def small_config(**values: Any) -> Any:
    """A ConfigDict of a run of a few seconds on the tiny model."""
    return defaults(**{**SMALL, **values})


@pytest.fixture(scope="session")
def run_small() -> Callable[..., RunResult]:
    """Runs `SMALL` with other values: `run_small(path, seed=1)`."""

    def run(path: Path | None, **values: Any) -> RunResult:
        return runner.run(small_config(**values), path, given=(*SMALL, *values))

    return run


@pytest.fixture(scope="session")
def small_run(run_small: Callable[..., RunResult], tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    path: Path = tmp_path_factory.mktemp("runs") / "small"
    return run_small(path)
