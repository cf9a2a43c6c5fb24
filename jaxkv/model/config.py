"""What a decoder is, as data. Host only: no jax import."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxkv.errors import ConfigError, nearest

ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, half-split convention.

    `scaling` names how the inverse frequencies are derived from `theta`. Every scaling named here is a
    fixed rotation per position, so rotations compose: R(a) R(b) = R(a + b), up to `magnitude`.
    """

    theta: float = 10_000.0
    rotary_dim: int
    scaling: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    magnitude: float = 1.0  # yarn's attention factor, applied once to q and once to k

    def __post_init__(self) -> None:
        if self.scaling not in ROPE_SCALINGS:
            raise ConfigError(
                f"rope.scaling is '{self.scaling}', expected one of {', '.join(ROPE_SCALINGS)}"
                f"{nearest(self.scaling, ROPE_SCALINGS)}"
            )
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ConfigError(f"rope.rotary_dim is {self.rotary_dim}, expected a positive even number")
        if self.scaling in ("llama3", "yarn") and self.original_max_positions <= 0:
            raise ConfigError(
                f"rope.original_max_positions is {self.original_max_positions}, "
                f"expected a positive number for scaling '{self.scaling}'"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that keep the same history and so share a page pool and a table."""

    name: str
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a Llama-family decoder (RMSNorm, SwiGLU, grouped-query attention, RoPE)."""

    family: str = "llama"
    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_positions: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "embed_dim",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
            "max_positions",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}, expected a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.rope.rotary_dim > self.head_dim:
            raise ConfigError(
                f"rope.rotary_dim is {self.rope.rotary_dim}, expected at most head_dim {self.head_dim}"
            )

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups, each with its own pool and table; one for a plain decoder."""
        return (LayerGroup(name="attention", layers=tuple(range(self.num_layers))),)

    @property
    def relocation_refused(self) -> str:
        """Why keys cannot be moved to another position, or "" when rotations compose."""
        return ""  # every RopeConfig that validates is a fixed rotation per position

    @property
    def body_params(self) -> int:
        """Parameters without embedding and unembedding (norm weights included)."""
        d, h = self.embed_dim, self.head_dim
        attention = d * (self.num_heads + 2 * self.num_kv_heads) * h + self.num_heads * h * d
        return self.num_layers * (attention + 3 * d * self.mlp_dim + 2 * d) + d

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token keeps, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-serializable form; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Reads `to_dict`'s form; an unknown or missing key is a `ConfigError` that names it."""
        data = dict(data)
        rope = data.pop("rope", None)
        if not isinstance(rope, dict):
            raise ConfigError(f"model config key 'rope' is {rope!r}, expected a mapping")
        data["eos_token_ids"] = tuple(data.get("eos_token_ids", ()))
        return _build(cls, "model config", {**data, "rope": _build(RopeConfig, "rope config", rope)})


def _build(cls: type[Any], what: str, data: dict[str, Any]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise ConfigError(f"{what} key '{key}' is unknown{nearest(key, list(fields))}")
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING:
            raise ConfigError(f"{what} key '{name}' is missing")
    return cls(**data)
