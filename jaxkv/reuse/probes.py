"""What a policy may ask of the device before it decides. Host values; an engine answers them.

A policy's `select` returns `Selection(ask=probe)`; it is called again with the answer in
`edit.evidence[probe]`. What an answer cost is in the ledger as `probe`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from jaxkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far the cached K and V of survivors are from fresh ones at one layer.

    The tokens behind the common prefix run through the first `layer` + 1 layers over the new past.
    Answer: f32[n], for each position of the new sequence ‖ΔK‖²/mean‖K‖² + ‖ΔV‖²/mean‖V‖², keys
    compared after un-rotation; nan where nothing cached survives. Cost: (layer + 1) / L of computing
    the whole suffix, and as many free slots while it runs.

    Source: the check layer of CacheBlend (arXiv 2405.16444).
    """

    layer: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.layer, bool) or not isinstance(self.layer, int) or self.layer < 1:
            raise ConfigError(
                f"layer is {self.layer!r}, expected a whole number of at least 1: layer 0 is never stale"
            )


@dataclasses.dataclass(frozen=True)
class Attention:
    """How much each survivor attended the deleted text, in the old sequence.

    Nothing is computed forward. A token's normed hidden state h is recovered from its own cached
    key and value by least squares, [k v] ≈ h [W_k W_v], and its query is then h W_q; its softmax
    over the cached keys, read at the layers of `depths`, is summed over deleted positions. Answer:
    f32[n], for each position of the new sequence the largest such mass over layers and heads; 0 for
    inserted tokens and where nothing was deleted. Cost: one attention without values, a layer.
    """

    depths: tuple[float, ...] = (0.3, 0.5)  # shares of the model's layers

    def __post_init__(self) -> None:
        if not self.depths or not all(0 <= depth < 1 for depth in self.depths):
            raise ConfigError(f"depths are {self.depths!r}, expected shares of at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A text's tokens. Answer: i32[k]; empty when the model has no tokenizer. Costs nothing."""

    text: str


@dataclasses.dataclass(frozen=True)
class Trial:
    """What another policy's answer would be worth: it is executed, and its KL predicted.

    Answer: an `Estimate` (`jaxkv.reuse.estimate`). The work is not lost: a policy that returns
    `Selection(take=policy)` gets the executed result.
    """

    policy: Any


Probe: TypeAlias = Deviation | Attention | Encoded | Trial
