"""What a training run is, typed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from experiments import fields
from experiments.config import TINY_MODEL
from jaxkv.errors import ConfigError, nearest
from jaxkv.model.config import ModelConfig, RecurrentConfig, RopeConfig

KINDS = ("hybrid", "sliding", "plain")
VOCAB = 256  # UTF-8 bytes are the tokens

SMOKE: dict[str, Any] = {
    "steps": 4, "batch": 2, "length": 48, "embed_dim": 32, "num_heads": 2, "mlp_dim": 32, "held_out": 2,
    "evaluate": 2,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(fields.Fields):
    """A small byte model, trained from random weights on real text."""

    experiment: str = "train_tiny"
    name: str = "train_tiny"
    model: str = TINY_MODEL  # not read: the model is made here

    kind: str = "hybrid"  # or "sliding", or "plain": global attention in every layer
    steps: int = 400
    minutes: float = 5.0  # without compilation; ends before `steps` if it must: then the machine decides
    batch: int = 4
    length: int = 256  # bytes of a row
    learning_rate: float = 4e-3  # peak, after `warmup`; falls along a cosine to a tenth
    warmup: int = 40  # steps
    weight_decay: float = 0.05
    clip: float = 1.0  # norm of the gradient
    evaluate: int = 50  # steps between losses on held-out text
    held_out: int = 16  # rows of it

    num_layers: int = 4
    embed_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_dim: int = 256
    window: int = 64  # positions, of local layers
    max_positions: int = 8192

    def __post_init__(self) -> None:
        self.check(
            {
                "seed": 0, "steps": 1, "minutes": 0.01, "batch": 1, "length": 2, "warmup": 0, "evaluate": 1,
                "held_out": 1, "num_layers": 2, "embed_dim": 8, "num_heads": 1, "num_kv_heads": 1,
                "mlp_dim": 1, "window": 1, "max_positions": 2, "weight_decay": 0.0,
            },
            {},
        )  # fmt: skip
        if self.kind not in KINDS:
            raise ConfigError(
                f"config.kind is '{self.kind}', expected one of {', '.join(KINDS)}{nearest(self.kind, KINDS)}"
            )
        for name in ("learning_rate", "clip"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"config.{name} is {getattr(self, name)}, expected more than 0")
        if self.embed_dim % (8 * self.num_heads):
            raise ConfigError(
                f"config.embed_dim is {self.embed_dim}, expected a multiple of 8 × num_heads {self.num_heads}"
            )
        self.model_config()

    def model_config(self) -> ModelConfig:
        """The architecture: each fourth layer (or, of fewer, the last) attends everything."""
        head_dim = self.embed_dim // self.num_heads
        other = {"hybrid": "recurrent", "sliding": "local", "plain": "global"}[self.kind]
        types = tuple(
            "global" if i % 4 == 3 or i == self.num_layers - 1 else other for i in range(self.num_layers)
        )
        special: dict[str, Any] = {}
        if self.kind == "hybrid":
            special = {
                "family": "qwen3_5",
                "rope": RopeConfig(theta=10_000.0, rotary_dim=head_dim // 4),
                "qk_norm": True,
                "attention_gate": True,
                "recurrent": RecurrentConfig(
                    num_key_heads=2,
                    num_value_heads=4,
                    key_dim=head_dim,
                    value_dim=head_dim,
                    conv_width=4,
                ),
            }
        if self.kind == "sliding":
            special = {"window": self.window}
        values: dict[str, Any] = {
            "vocab_size": VOCAB,
            "num_layers": self.num_layers,
            "embed_dim": self.embed_dim,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "mlp_dim": self.mlp_dim,
            "max_positions": self.max_positions,
            "rope": RopeConfig(theta=10_000.0, rotary_dim=head_dim),
            "layer_types": types if self.kind != "plain" else (),
            "tie_embeddings": True,
            "norm_eps": 1e-6,
        }
        return ModelConfig(**{**values, **special})


KNOWN_KEYS = fields.known_keys(TrainConfig)


def defaults(**values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict with every key, holding `values`."""
    return fields.defaults_of(TrainConfig, **values)


def resolve(config: Mapping[str, Any], given: Collection[str] = ()) -> TrainConfig:
    """Checks `config` and fills in what it leaves out; see `experiments.fields.build`."""
    return fields.build(TrainConfig, config, SMOKE, given)
