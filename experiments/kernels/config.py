"""What the kernel benchmark measures, typed and checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import jax
import ml_collections

from experiments.config import typed_values
from jaxkv.errors import ConfigError, nearest
from pallas_kernels.shapes import HEADS

CANDIDATES = ("pallas", "xla", "triton", "cudnn", "sdpa", "copy")
DTYPES = ("bfloat16", "float32")

# What a machine without an accelerator measures, unless the user set the key: seconds, and XLA only.
ON_CPU: dict[str, Any] = {
    "heads": ("smollm2",),
    "batch": (1, 8),
    "context": (512, 2048),
    "page_size": (16,),
    "deltas": (1, 4),
    "prefill": (128,),
    "moves": (64,),
    "dtype": "float32",
    "candidates": ("xla", "copy"),
    "copy_bytes": 64 << 20,
    "samples": 3,
    "sample_ms": 30,
}
# quick=True: one shape of each kernel.
QUICK: dict[str, Any] = {
    "heads": ("llama-8b",),
    "batch": (8,),
    "context": (16384,),
    "page_size": (16,),
    "deltas": (1, 4),
    "prefill": (512,),
    "moves": (4096,),
    "samples": 3,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """One run of the benchmark. A tuple may be given as comma-separated text or as its single value.

    Heads, batches and contexts are crossed with the first page size, the first delta count and uniform
    lengths; the other page sizes, delta counts and ragged lengths are measured at `vary_batch` sequences of
    `vary_context` tokens.
    """

    name: str = "kernels"  # names the default run directory
    heads: tuple[str, ...] = ("smollm2", "llama-8b")  # names in pallas_kernels.shapes.HEADS
    batch: tuple[int, ...] = (1, 8, 64)
    context: tuple[int, ...] = (1024, 4096, 16384, 65536, 131072)
    page_size: tuple[int, ...] = (16, 64)
    deltas: tuple[int, ...] = (1, 4, 7)
    vary_batch: int = 8
    vary_context: int = 32768
    prefill: tuple[int, ...] = (512, 2048)  # query tokens of a prefill, at the end of vary_context tokens
    moves: tuple[int, ...] = (256, 4096)  # pages that a relocation moves
    dtype: str = "bfloat16"  # of the pages
    candidates: tuple[str, ...] = CANDIDATES
    max_gib: float = 40.0  # cases with more KV are left out
    copy_bytes: int = 2 << 30  # of the copy that is the ceiling
    samples: int = 7  # timings whose median counts
    sample_ms: float = 50.0  # a timing chains calls inside one jit for about so long
    seed: int = 0
    quick: bool = False

    def __post_init__(self) -> None:
        for name, known in (("heads", tuple(HEADS)), ("candidates", CANDIDATES)):
            for value in getattr(self, name):
                _one_of(name, value, known)
        _one_of("dtype", self.dtype, DTYPES)
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"config.name is '{self.name}', expected a plain file name")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "seed" else 1
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, int | float) and not isinstance(x, bool) and x < least:
                    raise ConfigError(f"config.{field.name} is {x}, expected at least {least}")
        for name in ("heads", "batch", "context", "page_size", "deltas", "candidates"):
            if not getattr(self, name):
                raise ConfigError(f"config.{name} is empty, expected at least one value")
        for size in self.page_size:
            if size & (size - 1) or size > 256:
                raise ConfigError(f"config.page_size holds {size}, expected powers of two up to 256")
        for length in self.prefill:
            if length > self.vary_context:
                raise ConfigError(
                    f"config.prefill holds {length}, expected at most config.vary_context {self.vary_context}"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values of all fields."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def digest(self) -> str:
        """First 8 hex digits of a SHA-256 over all fields."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]


KNOWN_KEYS = tuple(f.name for f in dataclasses.fields(KernelsConfig))


def defaults(**values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict of this experiment with every known key, so that each can be overridden."""
    _check_keys(values)
    fields = {f.name: f.default for f in dataclasses.fields(KernelsConfig)}
    return ml_collections.ConfigDict({"experiment": "kernels", **fields, **values})


def resolve(
    config: Mapping[str, Any], given: Collection[str] = (), *, platform: str | None = None
) -> KernelsConfig:
    """Checks `config`, and makes it small where there is no accelerator.

    Args:
      config: a ConfigDict or any mapping, without the key `experiment`.
      given: keys that the user set on purpose: they stay as they are.
      platform: "cpu", "gpu" or "tpu"; that of this process when None.

    Raises:
      ConfigError: an unknown key, or a value of the wrong type or out of range, by name.
    """
    platform = platform or jax.default_backend()
    values = dict(config.items())
    _check_keys(values)
    reduced = {**(QUICK if values.get("quick") else {}), **(ON_CPU if platform == "cpu" else {})}
    if platform == "cpu" and "vary_context" not in given:
        reduced |= {"vary_batch": 8, "vary_context": 2048}
    values |= {key: value for key, value in reduced.items() if key not in given}
    return KernelsConfig(**typed_values(KernelsConfig, values))


def _check_keys(keys: Collection[str]) -> None:
    for key in keys:
        if key not in KNOWN_KEYS:
            raise ConfigError(f"config key '{key}' is unknown{nearest(key, KNOWN_KEYS)}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"config.{name} holds '{value}', expected one of {', '.join(known)}{nearest(value, known)}"
        )
