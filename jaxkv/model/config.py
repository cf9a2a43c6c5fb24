"""What a decoder is, as data. Host only: no jax import."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

from jaxkv.errors import ConfigError, nearest

ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")
COMPOSABLE = "composable"
# Positions under which KV cannot be moved, and why: no model file that has them is loaded.
REFUSED_ROPES = {
    "dynamic": "dynamic NTK changes its frequencies with the text's length, so rotations do not compose",
    "longrope": "LongRoPE switches its frequencies at the original length, where rotations do not compose",
    "mrope": "M-RoPE turns by three positions, which differ across an image",
    "learned": "learned positions are added to the embedding, not rotated, and cannot be moved",
}
LAYER_TYPES = ("global", "local", "recurrent")
ACTIVATIONS = ("silu", "gelu_tanh")


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
    """Layers that keep the same history and so share pages and a table."""

    name: str
    layers: tuple[int, ...]
    window: int = 0  # positions that a query sees, its own included; 0 = all
    rope: RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """A gated DeltaNet layer (Yang et al., arXiv 2412.06464), as the Qwen3.5 hybrids have it.

    Query and key head number h serve the `num_value_heads / num_key_heads` value heads from h times that on.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_width: int  # tokens that the causal convolution sees, its own included

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise ConfigError(f"recurrent.{field.name} is {value}, expected a positive number")
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"recurrent.num_value_heads is {self.num_value_heads}, expected a multiple of num_key_heads "
                f"{self.num_key_heads}"
            )
        if self.conv_width < 2:
            raise ConfigError("recurrent.conv_width is 1, expected at least 2")

    @property
    def channels(self) -> int:
        """Features that go through the convolution: queries and keys, and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def params(self, embed_dim: int) -> int:
        """Parameters of one layer's mixer, its norm of the output included."""
        values = self.num_value_heads * self.value_dim
        projected = self.channels + values + 2 * self.num_value_heads
        small = self.channels * self.conv_width + 2 * self.num_value_heads + self.value_dim
        return embed_dim * (projected + values) + small

    def state_bytes(self, conv_itemsize: int, operators: bool = False) -> int:
        """Bytes that one layer keeps of everything before a token: a float32 matrix a value head, and
        the last inputs of the convolution; with `operators`, another matrix."""
        width = self.value_dim + (self.key_dim if operators else 0)
        state = self.num_value_heads * self.key_dim * width * 4
        return state + self.channels * (self.conv_width - 1) * conv_itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder with RMSNorm, a gated MLP, grouped-query attention and RoPE.

    The defaults are Llama's; what other families do differently is a field of its own.

    Attributes:
      layer_types: "global", "local" or "recurrent" for each layer; () is all global.
      window: positions that a local layer's query sees, its own included.
      rope_local: rotation of local layers; None is `rope`.
      qkv_bias: queries, keys and values have a bias.
      qk_norm: queries and keys of a head are normalized before they are rotated.
      post_norms: what attention and MLP return is normalized before it is added.
      activation: of the MLP's gate, "silu" or "gelu_tanh".
      embed_scale: factor of embedded tokens.
      query_scale: factor of queries; None is 1/sqrt(head_dim).
      attention_gate: what attention returns is multiplied by a sigmoid gate of the layer's input.
      recurrent: the layers of that type; None where there are none.
      image_token_ids: ids that stand for what is no text; prompts with them are refused, because their
        positions would differ by axis (M-RoPE).

    Raises:
      ConfigError: a field is out of range, or two do not go together.
    """

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
    layer_types: tuple[str, ...] = ()
    window: int = 0
    rope_local: RopeConfig | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    query_scale: float | None = None
    attention_gate: bool = False
    recurrent: RecurrentConfig | None = None
    image_token_ids: tuple[int, ...] = ()

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
        for name in ("rope", "rope_local"):
            rope = getattr(self, name)
            if rope is not None and rope.rotary_dim > self.head_dim:
                raise ConfigError(
                    f"{name}.rotary_dim is {rope.rotary_dim}, expected at most head_dim {self.head_dim}"
                )
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"activation is '{self.activation}', expected one of {', '.join(ACTIVATIONS)}"
                f"{nearest(self.activation, ACTIVATIONS)}"
            )
        for name in ("embed_scale", "query_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}, expected a positive finite number")
        self._check_layers()

    def _check_layers(self) -> None:
        types = self.layer_types
        if types and len(types) != self.num_layers:
            raise ConfigError(
                f"layer_types has {len(types)} entries, expected num_layers {self.num_layers} or none"
            )
        for kind in types:
            if kind not in LAYER_TYPES:
                raise ConfigError(
                    f"layer_types has '{kind}', expected {', '.join(LAYER_TYPES)}{nearest(kind, LAYER_TYPES)}"
                )
        if ("recurrent" in types) != (self.recurrent is not None):
            raise ConfigError(
                f"recurrent is {self.recurrent}, expected a RecurrentConfig exactly where layer_types has "
                "'recurrent'"
            )
        if types and not self.attention_layers:
            raise ConfigError("layer_types has recurrent layers only, expected at least one that attends")
        if "local" in types and self.window <= 0:
            raise ConfigError(f"window is {self.window}, expected a positive number beside local layers")
        if "local" not in types and (self.window or self.rope_local is not None):
            raise ConfigError("window or rope_local is set, expected a local layer in layer_types beside it")

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def types(self) -> tuple[str, ...]:
        """Each layer's type, one of `LAYER_TYPES`."""
        return self.layer_types or ("global",) * self.num_layers

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of the layers that attend, global before local; recurrent layers are in none."""
        return _groups(self)

    def group_of(self, layer: int) -> tuple[int, int]:
        """The group of a layer that attends, and the layer's index in it."""
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number, group.layers.index(layer)
        raise ConfigError(f"layer is {layer}, expected one that attends")

    def first_layers(self, count: int) -> ModelConfig:
        """The same decoder cut off behind `count` layers; what they cost, say. Its groups may differ."""
        types = self.layer_types[:count]
        local = "local" in types
        return dataclasses.replace(
            self,
            num_layers=count,
            layer_types=types,
            window=self.window if local else 0,
            rope_local=self.rope_local if local else None,
            recurrent=self.recurrent if "recurrent" in types else None,
        )

    @property
    def attention_scale(self) -> float:
        """Factor of queries before they meet keys."""
        return 1.0 / math.sqrt(self.head_dim) if self.query_scale is None else self.query_scale

    @property
    def attention_layers(self) -> int:
        """Number of layers that attend and so keep keys and values."""
        return sum(kind != "recurrent" for kind in self.types)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep a state instead of keys and values."""
        return tuple(i for i, kind in enumerate(self.types) if kind == "recurrent")

    def state_bytes(self, conv_itemsize: int, operators: bool = False) -> int:
        """Bytes of one snapshot: the state of all recurrent layers behind one token; 0 without any."""
        if self.recurrent is None:
            return 0
        return len(self.recurrent_layers) * self.recurrent.state_bytes(conv_itemsize, operators)

    @property
    def relocation(self) -> tuple[str, ...]:
        """For each layer `COMPOSABLE`, or why its keys cannot be moved to another position."""
        return (COMPOSABLE,) * self.num_layers  # every RopeConfig that validates is a fixed rotation

    @property
    def relocation_refused(self) -> str:
        """Why keys of some layer cannot be moved to another position, or "" when all rotations compose."""
        return next((reason for reason in self.relocation if reason != COMPOSABLE), "")

    @property
    def body_params(self) -> int:
        """Parameters without embedding and unembedding (norm weights included)."""
        d, h = self.embed_dim, self.head_dim
        projected = (self.num_heads + 2 * self.num_kv_heads) * h
        attention = d * projected + self.num_heads * h * d
        attention += projected * self.qkv_bias + 2 * h * self.qk_norm
        attention += d * self.num_heads * h * self.attention_gate
        norms = 4 * d if self.post_norms else 2 * d
        mixers = self.attention_layers * attention
        if self.recurrent is not None:
            mixers += len(self.recurrent_layers) * self.recurrent.params(d)
        return mixers + self.num_layers * (3 * d * self.mlp_dim + norms) + d

    def kv_bytes_per_token(self, itemsize: int, *, windowed: bool = True) -> int:
        """Bytes of keys and values that one token keeps, over all layers; or without local ones."""
        layers = self.attention_layers - (0 if windowed else self.types.count("local"))
        return 2 * layers * self.num_kv_heads * self.head_dim * itemsize

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-serializable form; `from_dict` reads it back.

        Fields that set a family apart are left out where they are Llama's: what was written before a
        field existed (contracts, checkpoints) says the same as what is written now.
        """
        data = dataclasses.asdict(self)
        for field in dataclasses.fields(self)[_first_quirk() :]:
            if data[field.name] == field.default:
                del data[field.name]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Reads `to_dict`'s form; an unknown or missing key is a `ConfigError` that names it."""
        data = dict(data)
        rope = data.pop("rope", None)
        if not isinstance(rope, dict):
            raise ConfigError(f"model config key 'rope' is {rope!r}, expected a mapping")
        data["rope"] = _build(RopeConfig, "rope config", rope)
        local = data.get("rope_local")
        if local is not None:
            if not isinstance(local, dict):
                raise ConfigError(f"model config key 'rope_local' is {local!r}, expected a mapping")
            data["rope_local"] = _build(RopeConfig, "rope_local config", local)
        recurrent = data.get("recurrent")
        if recurrent is not None:
            if not isinstance(recurrent, dict):
                raise ConfigError(f"model config key 'recurrent' is {recurrent!r}, expected a mapping")
            data["recurrent"] = _build(RecurrentConfig, "recurrent config", recurrent)
        for key in ("eos_token_ids", "layer_types", "image_token_ids"):
            data[key] = tuple(data.get(key, ()))
        return cast(ModelConfig, _build(cls, "model config", data))


def _first_quirk() -> int:
    return [f.name for f in dataclasses.fields(ModelConfig)].index("layer_types")


@functools.lru_cache(maxsize=64)
def _groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    found = []
    for name, window, rope in (
        ("global", 0, config.rope),
        ("local", config.window, config.rope_local or config.rope),
    ):
        layers = tuple(i for i, kind in enumerate(config.types) if kind == name)
        if layers:
            found.append(LayerGroup(name=name, layers=layers, window=window, rope=rope))
    return tuple(found)


def _build(cls: type[Any], what: str, data: dict[str, Any]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise ConfigError(f"{what} key '{key}' is unknown{nearest(key, list(fields))}")
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING:
            raise ConfigError(f"{what} key '{name}' is missing")
    return cls(**data)
