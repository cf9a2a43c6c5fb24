"""What an adaptation is, typed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from experiments import fields
from experiments.adaptation.edits import KINDS, Draw
from experiments.config import TINY_MODEL
from jaxkv.errors import ConfigError
from jaxkv.reuse.policies import policy_from_name

SMOKE: dict[str, Any] = {
    "model": TINY_MODEL,
    "context": 48,
    "continuation": 8,
    "sizes": (8,),
    "policy": "scr(min_span=16,tail=4)",
    "steps": 6,
    "warmup": 1,
    "batch": 2,
    "held_out": 6,
    "checkpoint_every": 3,
    "page_size": 8,
    "chunk_size": 32,
}


_POSITIVE = (
    "context", "continuation", "sizes", "steps", "batch", "rank", "held_out", "checkpoint_every", "page_size",
    "chunk_size",
)  # fmt: skip
_NOT_NEGATIVE = ("seed", "positions", "warmup", "weight_decay", "plain_weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptConfig(fields.Fields):
    """A low-rank adapter that is trained on sampled edits, and judged on held-out ones."""

    experiment: str = "adapt"
    name: str = "adapt"

    policy: str = (
        "scr(min_span=32)"  # what is to be tolerated: SCR, with repairs that ask nothing of the device
    )
    context: int = 128  # tokens before the edit
    continuation: int = 24  # teacher-forced tokens behind it, compared
    edits: tuple[str, ...] = KINDS
    positions: tuple[float, ...] = (0.0, 0.25, 0.5)
    sizes: tuple[int, ...] = (8, 16, 32)

    steps: int = 24
    batch: int = 2
    rank: int = 8
    scale: float = 2.0  # of the deltas
    learning_rate: float = 2e-3  # peak, after `warmup` steps, then a cosine to a tenth of it
    warmup: int = 4
    clip: float = 1.0  # global norm of the gradients
    weight_decay: float = 0.0
    plain_weight: float = 0.5  # of the plain NLL beside the KL
    remat: bool = False  # recompute activations: less memory, more time

    held_share: float = 0.2  # share of the corpus, at its end, that training never sees
    held_out: int = 16  # held-out edits, judged through the engine before and after
    checkpoint_every: int = 8  # steps
    export: bool = False  # also write the merged model as a checkpoint that jaxkv.load takes
    page_size: int = 16  # of the engine that judges
    chunk_size: int = 128

    def __post_init__(self) -> None:
        self.check({**dict.fromkeys(_POSITIVE, 1), **dict.fromkeys(_NOT_NEGATIVE, 0)}, {"edits": KINDS})
        for name in ("scale", "learning_rate", "clip", "held_share"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"config.{name} is {getattr(self, name)}, expected a number above 0")
        if self.held_share >= 1:
            raise ConfigError(f"config.held_share is {self.held_share}, expected a share below 1")
        if max(self.positions) > 1:
            raise ConfigError(f"config.positions holds {max(self.positions)}, expected shares from 0 to 1")
        if max(self.sizes) >= self.context:
            raise ConfigError(
                f"config.sizes holds {max(self.sizes)}, expected fewer than the {self.context} tokens of "
                "config.context"
            )
        if self.warmup >= self.steps:
            raise ConfigError(
                f"config.warmup is {self.warmup}, expected fewer than config.steps, {self.steps}"
            )
        policy_from_name(self.policy)

    @property
    def draw(self) -> Draw:
        """The edits that are drawn from."""
        return Draw(
            context=self.context,
            continuation=self.continuation,
            kinds=self.edits,
            positions=self.positions,
            sizes=self.sizes,
        )


KNOWN_KEYS = fields.known_keys(AdaptConfig)


def defaults(**values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict with every key of an adaptation, holding `values`."""
    return fields.defaults_of(AdaptConfig, experiment="adapt", **{"name": "adapt", **values})


def resolve(config: Mapping[str, Any], given: Collection[str] = ()) -> AdaptConfig:
    """The typed form of `config`.

    Raises:
      ConfigError: an unknown key, or a value of the wrong type or out of range, by name.
    """
    return fields.build(AdaptConfig, config, SMOKE, given)
