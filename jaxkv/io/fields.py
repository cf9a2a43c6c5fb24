"""Typed reads of a model file's settings, and errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from jaxkv.errors import ConfigError, FormatError, nearest
from jaxkv.model.config import ModelConfig, RopeConfig


class Fields:
    """Typed reads from a mapping, with one-sentence errors that name the key."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix

    def fail(self, key: str, found: Any, expected: str) -> FormatError:
        return FormatError(f"{self.where}: {self.prefix}{key} is {found!r}, expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(key, value, "a non-negative integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number: nothing that a config says in floating point may be zero or less."""
        value: Any = self.data.get(key)
        value = default if value is None else value
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value < math.inf:
            raise self.fail(key, value, "a positive finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.data.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false")
        return value

    def positive(self, key: str) -> int:
        value = self.integer(key)
        if not value:
            raise self.fail(key, value, "a positive integer")
        return value

    def known(self, keys: Set[str], what: str) -> None:
        """Refuses a setting that nobody reads, unless it is null."""
        for key, value in self.data.items():
            if key not in keys and value is not None:
                raise FormatError(
                    f"{self.where}: {self.prefix}{key} is {str(value)[:40]}, expected it absent: "
                    f"not a setting of {what} that jaxkv knows{nearest(key, sorted(keys))}"
                )

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        for key, values in allowed.items():
            if key in self.data and self.data[key] not in values:
                shown = " or ".join(repr(v) for v in values if v is not None) or "it absent"
                raise self.fail(key, self.data[key], f"{shown}: other values are not supported")


def global_every(period: int, count: int) -> tuple[str, ...]:
    """Types of `count` layers of which each `period`-th is global."""
    return tuple("local" if (i + 1) % period else "global" for i in range(count))


def rope_config(where: str, values: dict[str, Any]) -> RopeConfig:
    try:
        return RopeConfig(**values)
    except ConfigError as error:
        raise FormatError(f"{where}: {error}") from error


def model_config(where: str, **values: Any) -> ModelConfig:
    try:
        config = ModelConfig(**values)
    except ConfigError as error:
        raise FormatError(f"{where}: {error}") from error
    for name, ids in (("eos", config.eos_token_ids), ("bos", (config.bos_token_id,))):
        for i in ids:
            if i is not None and i >= config.vocab_size:
                raise FormatError(
                    f"{where}: {name} token id is {i}, expected under vocab_size {config.vocab_size}"
                )
    return config
