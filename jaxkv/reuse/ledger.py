"""What a turn computes and moves: Eq. 9 for prefixes, and a ledger by cause for everything else.

FLOPs are counted as in "Context Language Models" (arXiv 2609.37725, Appendix C): a token costs
C_token = 2 × body parameters, and C_attn = 4 × full-attention layers × query heads × head dim for
each key that it attends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxkv.cache.dtypes import kv_token_bytes
from jaxkv.errors import ConfigError
from jaxkv.model.config import ModelConfig

Work = tuple[npt.ArrayLike, npt.ArrayLike]  # positions i32[n], keys attended by each i32[n]


def token_flops(config: ModelConfig) -> int:
    """C_token: FLOPs of one token outside attention scores, without embedding and unembedding."""
    return 2 * config.body_params


def attention_flops(config: ModelConfig) -> int:
    """C_attn: FLOPs of one token's scores and weighted sum for one key, over full-attention layers."""
    return 4 * config.types.count("global") * config.num_heads * config.head_dim


def attended_flops(config: ModelConfig, keys: npt.ArrayLike) -> float:
    """FLOPs of scores and weighted sums of tokens that have `keys` i32[n] keys before or at them.

    A local layer attends no more of them than its window.
    """
    count = np.asarray(keys, np.int64)
    per_layer = 4 * config.num_heads * config.head_dim
    total = 0
    for group in config.groups:
        seen = np.minimum(count, group.window) if group.window else count
        total += per_layer * len(group.layers) * int(seen.sum())
    return float(total)


def prefix_reuse_flops(
    c_token: float, c_attn: float, *, prompt: float, reused: float, generated: float
) -> float:
    """FLOPs of a turn that reuses a prefix (arXiv 2609.37725, Eq. 9).

    F = C_token·(U + G) + C_attn·[½(P² − R²) + G·P + ½G²], with U = P − R. The sum over tokens,
    each of which attends itself too (i + 1 keys at position i), is ½·C_attn·(U + G) more: the
    equation is its integral.

    Args:
      c_token: FLOPs a token.
      c_attn: FLOPs a token and attended key.
      prompt: P, tokens.
      reused: R, tokens of the prompt whose KV is reused.
      generated: G, tokens.
    Raises:
      ConfigError: a negative count, or more reused than prompted.
    """
    if not 0 <= reused <= prompt or generated < 0:
        raise ConfigError(
            f"reused is {reused} and generated {generated}, expected 0 to the prompt's {prompt} and 0 or more"
        )
    attended = (prompt**2 - reused**2) / 2 + generated * prompt + generated**2 / 2
    return c_token * (prompt - reused + generated) + c_attn * attended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where every token of a prompt went, and the work it caused.

    prompt = matched + relocated + forwarded + dropped, or a ConfigError.
    """

    prompt: int  # tokens
    matched: int  # KV reused in place, computed from exactly this past or kept as a prefix
    relocated: int  # KV reused at another position or under another past
    forwarded: int  # KV computed now
    dropped: int = 0  # no KV
    forwarded_by_cause: dict[str, int]  # sums to forwarded
    flops_by_cause: dict[str, float]  # these causes, and work outside the prompt (generated, probe)
    kv_bytes_moved: int = 0  # KV copied between slots
    kv_bytes_resident: int = 0  # KV of the prompt that the turn needs in memory

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name) for name in ("prompt", "matched", "relocated", "forwarded", "dropped")
        }
        for name, value in counts.items():
            if value < 0:
                raise ConfigError(f"ledger.{name} is {value}, expected 0 or more tokens")
        total = self.matched + self.relocated + self.forwarded + self.dropped
        if total != self.prompt:
            raise ConfigError(
                f"ledger.prompt is {self.prompt}, expected matched {self.matched} + relocated "
                f"{self.relocated} + forwarded {self.forwarded} + dropped {self.dropped} = {total}"
            )
        by_cause = sum(self.forwarded_by_cause.values())
        if by_cause != self.forwarded:
            raise ConfigError(
                f"ledger.forwarded_by_cause sums to {by_cause}, expected forwarded {self.forwarded}"
            )

    @property
    def flops(self) -> float:
        """FLOPs of the turn, all causes."""
        return sum(self.flops_by_cause.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-serializable form, `flops` included."""
        return {**dataclasses.asdict(self), "flops": self.flops}


def make_ledger(
    config: ModelConfig,
    *,
    matched: int,
    relocated: int,
    causes: Mapping[str, Work],
    dropped: int = 0,
    beyond_prompt: Mapping[str, Work] | None = None,
    probe_flops: float = 0.0,
    kv_dtype: str = "float32",
    moved: int = 0,
) -> Ledger:
    """Counts a turn: C_token and the FLOPs of the keys attended, for each computed token, by cause.

    Args:
      config: the model that computes.
      matched: prompt tokens whose KV stays where it is.
      relocated: prompt tokens whose KV is kept under a changed past, without those computed again.
      causes: cause to (positions i32[n], keys attended i32[n], itself included) of the prompt
      tokens
        that are computed; no position in two causes, and none twice.
      dropped: prompt tokens that get no KV.
      beyond_prompt: the same for work that is not on prompt tokens, such as generated ones.
      probe_flops: FLOPs of finding out what to reuse; the cause `probe` if there are any.
      kv_dtype: of the pages, one of `cache.dtypes.KV_DTYPES`; scales count as bytes too.
      moved: tokens whose KV is copied to other slots.
    Returns:
      The ledger of a prompt of matched + relocated + dropped + computed tokens.
    Raises:
      ConfigError: arrays of different lengths, a repeated position, no attended key, a negative
      count.
    """
    per_token = token_flops(config)
    counts: dict[str, int] = {}
    flops: dict[str, float] = {}
    seen: list[npt.NDArray[np.int64]] = []
    beyond = beyond_prompt or {}
    if both := causes.keys() & beyond.keys():
        raise ConfigError(f"cause '{min(both)}' is both in causes and in beyond_prompt, expected one")
    for cause, (positions, keys) in (*causes.items(), *beyond.items()):
        at = np.asarray(positions, np.int64).reshape(-1)
        attended = np.asarray(keys, np.int64).reshape(-1)
        if at.shape != attended.shape:
            raise ConfigError(
                f"cause '{cause}' has {at.size} positions and {attended.size} key counts, expected as many"
            )
        if attended.size and attended.min() < 1:
            raise ConfigError(f"cause '{cause}' attends {attended.min()} keys, expected 1 or more")
        flops[cause] = float(per_token * at.size) + attended_flops(config, attended)
        if cause in causes:
            counts[cause] = at.size
            seen.append(at)
    if probe_flops:
        flops["probe"] = flops.get("probe", 0.0) + probe_flops
    forwarded = sum(counts.values())
    if seen and (repeated := forwarded - np.unique(np.concatenate(seen)).size):
        raise ConfigError(f"causes repeat {repeated} positions, expected each position in one cause")
    per_token_bytes = kv_token_bytes(config, kv_dtype)
    return Ledger(
        prompt=matched + relocated + forwarded + dropped,
        matched=matched,
        relocated=relocated,
        forwarded=forwarded,
        dropped=dropped,
        forwarded_by_cause=counts,
        flops_by_cause=flops,
        kv_bytes_moved=moved * per_token_bytes,
        kv_bytes_resident=(matched + relocated + forwarded) * per_token_bytes,
    )
