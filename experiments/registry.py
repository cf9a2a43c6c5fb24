"""Experiments by name. A config's key `experiment` says which one it is for."""

from __future__ import annotations

import dataclasses
import importlib
import runpy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.errors import ConfigError, nearest

if TYPE_CHECKING:
    from jaxkv.processes import Place

DEFAULT = "reuse"  # a config that names no experiment
KEY = "experiment"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Modules of an experiment; they are loaded when they are used."""

    runner: str  # has run(config, workdir, *, given)
    config: str  # has KNOWN_KEYS and resolve(config, given)
    split: bool = False  # whether several processes can share a run

    @property
    def known_keys(self) -> tuple[str, ...]:
        """Keys that its configs have."""
        keys: tuple[str, ...] = importlib.import_module(self.config).KNOWN_KEYS
        return keys

    def check_keys(self, keys: Collection[str]) -> None:
        """Raises ConfigError for the first key that it does not have."""
        for key in keys:
            if key not in self.known_keys and key != KEY:
                raise ConfigError(f"config key '{key}' is unknown{nearest(key, self.known_keys)}")

    def require_place(self, place: Place) -> None:
        """Raises ConfigError if it can't be shared by processes and is to be."""
        if place.count > 1 and not self.split:
            raise ConfigError(
                f"num_processes is {place.count}, expected 1: this experiment runs in one process"
            )

    def resolve(self, config: Mapping[str, Any], given: Collection[str] = ()) -> Any:
        """The typed form of a config."""
        return importlib.import_module(self.config).resolve(self._own(config), given)

    def run(self, config: Mapping[str, Any], workdir: str | None, *, given: Collection[str]) -> Any:
        """Runs it; the result has `path`, `finished` and `failed`."""
        return importlib.import_module(self.runner).run(self._own(config), workdir, given=given)

    def _own(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config` without the key that chose the experiment, where its configs do not have it."""
        return {k: v for k, v in config.items() if k != KEY or KEY in self.known_keys}


EXPERIMENTS = {
    "reuse": Experiment("experiments.runner", "experiments.config", split=True),
    "prefix_trace": Experiment("experiments.prefix_trace", "experiments.trace_config"),
    "serving": Experiment("experiments.speed.run", "experiments.speed.config"),
    "kernels": Experiment("experiments.kernels.run", "experiments.kernels.config"),
    "adapt": Experiment("experiments.adapt", "experiments.adapt_config"),
    "edit_cost": Experiment("experiments.edit_cost", "experiments.cost_config"),
    "train_tiny": Experiment("experiments.train_tiny", "experiments.train_config"),
}


def find(config: Mapping[str, Any]) -> Experiment:
    """The experiment that a config is for.

    Raises:
      ConfigError: no experiment has that name.
    """
    name = config.get(KEY, DEFAULT)
    if name not in EXPERIMENTS:
        known = tuple(EXPERIMENTS)
        raise ConfigError(
            f"config.experiment is '{name}', expected one of {', '.join(known)}{nearest(str(name), known)}"
        )
    return EXPERIMENTS[name]


def peek(argv: Sequence[str]) -> Experiment:
    """The experiment of the config file that a command line names, before its flags are parsed.

    Overrides are checked against its keys. Whatever is wrong with the file itself is told when the
    flags are parsed, so here it counts as the default experiment.
    """
    path = ""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and flag == "config":
            path = value if equals else following
    file, _, parameter = path.partition(":")
    try:
        make = runpy.run_path(file)["get_config"]
        config = make(parameter) if parameter else make()
        name = config.get(KEY, DEFAULT)
    except Exception:  # a config file is code: anything may go wrong in it
        name = DEFAULT
    return EXPERIMENTS.get(name, EXPERIMENTS[DEFAULT])
