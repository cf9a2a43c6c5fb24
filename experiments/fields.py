"""What experiments beside the divergence runs share: typed configs, and the head of a run directory."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ml_collections

from experiments.config import convert
from experiments.environment import environment
from experiments.records import RunDirectory, refuse_changes
from experiments.workloads.corpus import Corpus
from jaxkv.errors import ConfigError, nearest
from jaxkv.io.models import Model

C = TypeVar("C", bound="Fields")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Fields that every such config has. A field of a mapping type is taken as it is."""

    experiment: str
    name: str
    model: str = "smollm2-135m"  # anything jaxkv.load takes, or "tiny-random"
    dtype: str = "float32"
    corpus: str = "topics"  # "topics", "stdlib" or the path of a text file
    seed: int = 0
    smoke: bool = False

    def check(self, least: Mapping[str, float], choices: Mapping[str, Collection[str]]) -> None:
        """Raises ConfigError for the first field below its least value or outside its choices."""
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"config.dtype is '{self.dtype}', expected float32 or bfloat16")
        for name in ("name", "model", "corpus"):
            if not getattr(self, name):
                raise ConfigError(f"config.{name} is empty, expected text")
        if "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"config.name is '{self.name}', expected a plain file name")
        for name in {**least, **choices}:
            value = getattr(self, name)
            if value == ():
                raise ConfigError(f"config.{name} is empty, expected at least one value")
            for x in value if isinstance(value, tuple) else (value,):
                if name in least and x < least[name]:
                    raise ConfigError(f"config.{name} is {x}, expected at least {least[name]}")
                if name in choices and x not in choices[name]:
                    known = tuple(choices[name])
                    raise ConfigError(
                        f"config.{name} holds '{x}', expected one of {', '.join(known)}{nearest(x, known)}"
                    )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values of all fields."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {key: value for key, value in values.items() if key != "mesh" or value}

    @property
    def digest(self) -> str:
        """First 8 hex digits of a SHA-256 over all fields: names the default run directory."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]

    def directory(self, workdir: str | Path | None) -> Path:
        """The run directory: as given, or `runs/<name>-<digest>`."""
        return Path(workdir) if workdir else Path("runs") / f"{self.name}-{self.digest}"


def known_keys(cls: type[Fields]) -> tuple[str, ...]:
    """Names of all fields."""
    return tuple(field.name for field in dataclasses.fields(cls))


def defaults_of(cls: type[Fields], **values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict with every key of an experiment, holding `values`."""
    fields = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    config = ml_collections.ConfigDict({**fields, **values})
    _check_keys(cls, config.keys())
    return config


def build(cls: type[C], config: Mapping[str, Any], smoke: Mapping[str, Any], given: Collection[str]) -> C:
    """The typed form of `config`; with smoke=True, `smoke` replaces what is not in `given`.

    Raises:
      ConfigError: an unknown key, or a value of the wrong type or out of range, by name.
    """
    values = {
        key: value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value
        for key, value in config.items()
    }
    _check_keys(cls, values)
    if values.get("smoke"):
        values |= {key: value for key, value in smoke.items() if key not in given}
    typed: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            value, kind = values[field.name], str(field.type)
            if not kind.startswith("Mapping"):
                value = convert(field.name, kind, value)
            elif not isinstance(value, Mapping):
                raise ConfigError(f"config.{field.name} holds {value!r}, expected a mapping")
            typed[field.name] = value
    return cls(**typed)


def _check_keys(cls: type[Fields], keys: Collection[str]) -> None:
    known = known_keys(cls)
    for key in keys:
        if key not in known:
            raise ConfigError(f"config key '{key}' is unknown{nearest(key, known)}")


def begin(
    directory: RunDirectory, config: Fields, corpus: Corpus, tokens: int, model: Model, **more: Any
) -> dict[str, Any]:
    """Writes `config.json`, or refuses a directory that holds a run of something else."""
    document = {
        "config": config.to_dict(),
        "config_digest": config.digest,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "corpus": {"name": corpus.name, "sha256": corpus.digest, "tokens": tokens},
        "model": {
            "name": model.name,
            "source": model.source,
            "dtype": model.dtype,
            "weights_digest": model.weights_digest,
            **model.config.to_dict(),
        },
        "environment": environment(),
        **more,
    }
    previous = directory.read_config()
    if previous is None:
        directory.write_config(document)
        return document
    refuse_changes(directory.path, previous["config"], document["config"])
    refuse_changes(directory.path, _identity(previous), _identity(document))
    return previous


def refuse_other(directory: RunDirectory, config: Fields) -> None:
    """Refuses a directory that holds a run under another config, before anything is loaded."""
    previous = directory.read_config()
    if previous is not None:
        refuse_changes(directory.path, previous["config"], config.to_dict())


def _identity(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "corpus.sha256": document["corpus"]["sha256"],
        "model.weights_digest": document["model"]["weights_digest"],
    }
