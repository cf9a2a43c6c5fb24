"""Experiments by name: what the key `experiment` of a config file may be, and who runs it."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from experiments.runner import RunResult
from jaxkv.errors import ConfigError, nearest

DEFAULT = "reuse"  # a config file that names no experiment
# Name -> module with `run(config, workdir, *, given) -> RunResult`, module with KNOWN_KEYS.
EXPERIMENTS = {
    "reuse": ("experiments.runner", "experiments.config"),
    "kernels": ("experiments.kernels.run", "experiments.kernels.config"),
}


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> RunResult:
    """Runs the experiment that `config` names.

    Args:
      config: a ConfigDict or any mapping; its key `experiment` is a name in EXPERIMENTS.
      workdir, given: as in `experiments.runner.run`.

    Raises:
      ConfigError: an unknown experiment; and what the experiment itself raises.
    """
    values = dict(config.items())
    name = values.pop("experiment", DEFAULT)
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"config.experiment holds '{name}', expected one of {', '.join(EXPERIMENTS)}"
            f"{nearest(str(name), tuple(EXPERIMENTS))}"
        )
    module = importlib.import_module(EXPERIMENTS[name][0])
    result: RunResult = module.run(values, workdir, given=given)
    return result


def check_keys(keys: Collection[str]) -> None:
    """Raises ConfigError for the first key that no experiment has."""
    known = {"experiment": None}  # a dict keeps the order in which suggestions are looked for
    for _, module in EXPERIMENTS.values():
        known |= dict.fromkeys(importlib.import_module(module).KNOWN_KEYS)
    for key in keys:
        if key not in known:
            raise ConfigError(f"config key '{key}' is unknown{nearest(key, tuple(known))}")
