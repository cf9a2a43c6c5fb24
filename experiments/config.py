"""What an experiment is, typed and checked. `ConfigDict`s, as in `configs/`, stop here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from experiments.workloads import WORKLOADS
from experiments.workloads.agent_loop import AGENT_EDITS
from experiments.workloads.edit_grid import EDITS
from jaxkv.cache.dtypes import check_dtype
from jaxkv.checks import check_geometry
from jaxkv.errors import ConfigError, nearest
from jaxkv.reuse.policies import policy_from_name
from pallas_kernels import IMPLEMENTATIONS

TINY_MODEL = "tiny-random"
ACROSS = ("model", "corpus", "workload")

# What smoke=True replaces, unless the caller set the key: the same code in well under a minute,
# without network and without a trained model.
SMOKE: dict[str, Any] = {
    "model": TINY_MODEL,
    "context": (320,),
    "edits": ("delete", "insert"),
    "positions": (0.0, 0.5),
    "sizes": (48,),
    "thin": 1,
    "documents": 1,
    "continuation": 16,
    "page_size": 16,
    "chunk_size": 16,
    "noise_offset": 7,
    "moves": (4,),
    "turns": 2,
    "num_items": 2,
    "distances": (0, 40),
}
# What quick=True replaces in the same way: minutes on two cores instead of an hour.
QUICK: dict[str, Any] = {
    "context": (1024,),
    "sizes": (64,),
    "positions": (0.0, 0.5),
    "edits": ("delete", "insert", "replace"),
    "thin": 1,
    "documents": 1,
    "greedy_tokens": 16,
    "continuation": 48,
    "noise_every": 3,
    "layers_every": 3,
    "moves": (16,),
    "turns": 3,
    "num_items": 4,
    "distances": (0, 250),
}


# What each of configs/families measures.
FAMILY_EDITS: dict[str, Any] = {
    "context": (600,),
    "edits": ("delete", "insert"),
    "positions": (0.25,),
    "sizes": (48,),
    "documents": 1,
    "continuation": 32,
    "chunk_size": 128,
    "policies": ("exact", "drop", "no_rotation", "scr", "scr(form=copy)", "first_k(32)"),
}

_DEFAULT_EDITS = ("delete", "insert", "replace")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One experiment. A tuple may be given as comma-separated text or as its single value."""

    name: str = "experiment"  # names the default run directory
    workload: str = "edit_grid"
    model: str = "smollm2-135m"  # anything jaxkv.load takes, or "tiny-random"
    dtype: str = "float32"
    corpus: str = "topics"  # "topics", "stdlib" or the path of a text file
    seed: int = 0
    mesh: str = ""  # devices that the engine is spread over, as in "model:4"; one device when empty
    smoke: bool = False  # a tiny random model, seconds
    quick: bool = False  # fewer and shorter cases, minutes
    compare: tuple[str, ...] = ()  # run directories: nothing is measured, these are compared
    across: tuple[str, ...] = ()  # what they may differ in on purpose: model, corpus, workload

    context: tuple[int, ...] = (2048,)  # tokens before the edit
    edits: tuple[str, ...] = _DEFAULT_EDITS  # agent_loop: all of its own while this is the default
    positions: tuple[float, ...] = (0.0, 0.25, 0.5, 0.9)  # share of the context before the edit
    sizes: tuple[int, ...] = (200, 16)  # tokens that an edit deletes, inserts or moves
    thin: int = 1  # keep every thin-th cell of the grid, in a checkerboard
    documents: int = 2  # texts, dealt out to the cells in rotation
    continuation: int = 64  # teacher-forced tokens behind the context
    add_bos: bool = False  # start each context with the tokenizer's BOS token
    turns: int = 6  # edits of an agent_loop conversation
    moves: tuple[int, ...] = (256,)  # consecutive edits of a drift case
    places: int = 1  # drift: places that the edits take in turn; each is a distance at which something stands
    num_items: int = 12  # recall and residue: items at each distance
    distances: tuple[int, ...] = (0, 250, 1000)  # recall and residue: tokens from a fact to its dependent
    kv_dtype: tuple[str, ...] = ("model",)  # dtypes of the pages, each measured; "model" is the model's own

    policies: tuple[str, ...] = (
        "exact",
        "drop",
        "no_rotation",
        "scr",
        "first_k",
        "sinks",
        "forget",
    )
    page_size: int = 16
    chunk_size: int = 512
    num_pages: int = 0  # 0: what the longest case needs
    implementation: str = "auto"  # of attention and page writes, as of `jaxkv.Engine`
    interpret: bool = False  # run a forced Pallas implementation on the CPU, slowly
    noise_offset: int = 23  # tokens that shift all chunks of the run that gives the noise floor
    noise_every: int = 1  # measure the noise floor on every n-th case; 0: never
    layers_every: int = 1  # K, V and attention errors on every n-th case; 0: never
    greedy_tokens: int = 0  # greedy tokens compared with exact; 0: none
    rotation_every: int = 0  # measure what rotation alone costs on every n-th case; 0: never
    heal_steps: int = 0  # heal every answer in so many steps where layers are measured; 0: never
    signals: bool = False  # record the signals that predict KL, for experiments.calibrate

    def __post_init__(self) -> None:
        check_geometry(
            num_pages=self.num_pages or 1,
            page_size=self.page_size,
            chunk_size=self.chunk_size,
            reuse_granularity="token",
            max_deltas=2,
        )
        _one_of("workload", self.workload, tuple(WORKLOADS))
        _one_of("dtype", self.dtype, ("float32", "bfloat16"))
        _one_of("implementation", self.implementation, IMPLEMENTATIONS)
        for name in ("name", "model", "corpus"):
            if not getattr(self, name):
                raise ConfigError(f"config.{name} is empty, expected text")
        if "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"config.name is '{self.name}', expected a plain file name")
        known = AGENT_EDITS if self.workload == "agent_loop" else EDITS
        for edit in self.edits:
            if self.workload in ("edit_grid", "agent_loop") and edit not in _DEFAULT_EDITS:
                _one_of("edits", edit, known)
        for dtype in self.kv_dtype:
            check_dtype(dtype, "config.kv_dtype", also=("model",))
        for position in self.positions:
            if not 0 <= position <= 1:
                raise ConfigError(f"config.positions holds {position}, expected shares from 0 to 1")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            for x in value if isinstance(value, tuple) else (value,):
                if x < least:
                    raise ConfigError(f"config.{name} is {x}, expected at least {least}")
        optional = ("compare", "across")
        for name in (*_AXES, *optional):
            value = getattr(self, name)
            if not value and name not in optional:
                raise ConfigError(f"config.{name} is empty, expected at least one value")
            if len(set(value)) < len(value):
                raise ConfigError(f"config.{name} is {_show(value)}, expected each value once")
        for kind in self.across:
            _one_of("across", kind, ACROSS)
        if len(self.compare) == 1:
            raise ConfigError(f"config.compare holds '{self.compare[0]}' alone, expected two runs or more")
        if self.noise_offset % self.chunk_size == 0:
            raise ConfigError(
                f"config.noise_offset is {self.noise_offset}, expected no multiple of chunk_size "
                f"{self.chunk_size}: it is there to shift the chunks"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values of all fields that say what is measured."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        # What is left as it is does not tell runs apart: runs of before these keys can be resumed.
        ordinary = {"mesh": "", "implementation": "auto", "interpret": False}
        said = {key: value for key, value in values.items() if key not in ("compare", "across")}
        return {key: value for key, value in said.items() if key not in ordinary or value != ordinary[key]}

    @property
    def digest(self) -> str:
        """First 8 hex digits of a SHA-256 over all fields: names the default run directory."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


_AXES = ("context", "edits", "positions", "sizes", "policies", "moves", "distances", "kv_dtype")
_LEAST = {
    "seed": 0,
    "context": 2,
    "sizes": 1,
    "thin": 1,
    "documents": 1,
    "continuation": 1,
    "page_size": 1,
    "chunk_size": 1,
    "num_pages": 0,
    "noise_offset": 1,
    "noise_every": 0,
    "layers_every": 0,
    "greedy_tokens": 0,
    "rotation_every": 0,
    "heal_steps": 0,
    "turns": 1,
    "moves": 1,
    "places": 1,
    "num_items": 1,
    "distances": 0,
}
KNOWN_KEYS = tuple(f.name for f in dataclasses.fields(ExperimentConfig))


def defaults(**values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict with every known key, so that each can be overridden, holding `values`."""
    check_keys(values)
    fields = {f.name: f.default for f in dataclasses.fields(ExperimentConfig)}
    return ml_collections.ConfigDict({**fields, **values})


def check_keys(keys: Collection[str]) -> None:
    """Raises ConfigError for the first key that no experiment has."""
    for key in keys:
        if key not in KNOWN_KEYS:
            raise ConfigError(f"config key '{key}' is unknown{nearest(key, KNOWN_KEYS)}")


def resolve(config: Mapping[str, Any], given: Collection[str] = ()) -> ExperimentConfig:
    """Checks `config` and fills in what it leaves out.

    Args:
      config: a ConfigDict or any mapping.
      given: keys that the user set on purpose; smoke=True leaves them as they are.

    Raises:
      ConfigError: an unknown key, or a value of the wrong type or out of range, by name.
    """
    values = dict(config.items())
    check_keys(values)
    for name, reduced in (("quick", QUICK), ("smoke", SMOKE)):
        if values.get(name):
            values |= {key: value for key, value in reduced.items() if key not in given}
    typed: dict[str, Any] = {}
    for field in dataclasses.fields(ExperimentConfig):
        if field.name in values:
            typed[field.name] = convert(field.name, str(field.type), values[field.name])
    # The edit under `exact` is what every cost and time is compared with, so it always runs, first.
    policies = [_policy_name(p) for p in typed.get("policies", ExperimentConfig.policies)]
    if values.get("smoke") and "policies" not in given:
        policies = [p for p in policies if not p.startswith("budget")]  # random weights have no calibration
    typed["policies"] = ("exact", *(p for p in policies if p != "exact"))
    return ExperimentConfig(**typed)


def _policy_name(text: str) -> str:
    """The name under which a policy is recorded. One of the user's own keeps the name that finds it."""
    return text if ":" in text else str(policy_from_name(text))


def typed_values(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` that a config dataclass `kind` has fields for, converted to the fields' types.

    Raises:
      ConfigError: a value of another type, by name.
    """
    fields = [field for field in dataclasses.fields(kind) if field.name in values]
    return {field.name: convert(field.name, str(field.type), values[field.name]) for field in fields}


def convert(name: str, kind: str, value: Any) -> Any:
    """`value` as the type that a field's annotation names; a ConfigError naming the field if it is none."""
    if kind.startswith("tuple["):
        element = kind[len("tuple[") :].split(",")[0]
        return tuple(_scalar(name, element, item) for item in _items(value))
    return _scalar(name, kind, value)


def _scalar(name: str, kind: str, value: Any) -> Any:
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value.strip()
    if kind in ("int", "float") and not isinstance(value, bool):
        if isinstance(value, str):
            value = _number(value.strip())
        if kind == "int" and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) or (kind == "float" and isinstance(value, float)):
            return float(value) if kind == "float" else value
    expected = {
        "str": "text",
        "int": "a whole number",
        "float": "a number",
        "bool": "True or False",
    }
    raise ConfigError(f"config.{name} holds {value!r}, expected {expected[kind]}")


def _number(text: str) -> int | float | str:
    """Reads `200`, `0.25`, `25%` and `head`; other text comes back as it is."""
    if text == "head":
        return 0.0
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return text


def _items(value: Any) -> list[Any]:
    """Elements of a tuple field: `scr,first_k(32)` and `("scr", "first_k(32)")` are the same."""
    if isinstance(value, str):
        return _split(value)
    if isinstance(value, tuple | list):
        return [item for part in value for item in (_split(part) if isinstance(part, str) else [part])]
    return [value]


def _split(text: str) -> list[str]:
    """Splits at commas outside parentheses: a policy's arguments stay together."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"config.{name} holds '{value}', expected one of {', '.join(known)}{nearest(value, known)}"
        )


def _show(value: tuple[Any, ...]) -> str:
    return ",".join(str(x) for x in value)
