"""What an engine answers with: values, never handles into its state."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jaxkv.cache.match import MatchEnd
from jaxkv.cache.sequence import Sequence, slots_of
from jaxkv.model.config import ModelConfig
from jaxkv.reuse.diff import Span
from jaxkv.reuse.ledger import Ledger, make_ledger
from jaxkv.reuse.plan import LAST, ReusePlan
from jaxkv.typing import Array, Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse:
    """What a call reused, of which kind, at what cost, and why the match ended where it did.

    `prompt = matched + relocated + forwarded + dropped`, in tokens.
    """

    kind: Literal["exact", "approximate"]
    policy: str
    prompt: int
    matched: int  # leading tokens whose KV was kept in place
    relocated: int  # tokens whose KV was kept at another past, so approximate
    forwarded: int  # tokens computed
    dropped: int  # tokens without KV (the drop policy)
    match_end: MatchEnd
    spans: tuple[Span, ...]
    ledger: Ledger
    timings: dict[str, float]  # seconds: plan, relocate, forward

    @property
    def seams(self) -> tuple[int, ...]:
        """Positions at which relocated spans begin."""
        return tuple(span.new for span in self.spans)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    sequence: Sequence
    logits: Array  # f32[V], of the token behind the sequence
    reuse: Reuse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    tokens: Int32  # i32[n], without the stop token
    text: str | None  # None when the model has no tokenizer
    sequence: Sequence  # the prompt and the generated tokens
    finish_reason: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVState:
    """Keys and values of a sequence, read back. Keys are un-rotated, so moves do not show in them."""

    positions: Int32  # i32[n], ascending; positions without KV are absent
    keys: Float32  # f32[L, n, K, H], of the layers that attend
    values: Float32  # f32[L, n, K, H]


def report(
    work: ReusePlan,
    sequence: Sequence,
    end: MatchEnd,
    *,
    config: ModelConfig,
    page_size: int,
    moved: int,
    timings: dict[str, float],
    refreshed: bool = False,
) -> Reuse:
    """What executing `work` reused and cost. `moved` counts tokens whose KV was copied.

    `refreshed`: the last token's logits were computed again, beside what the plan says.
    """
    positions, _ = slots_of(sequence.table_segments, page_size)
    # A computed token attends every key that stands at or before its own position.
    causes = {cause: (at, np.searchsorted(positions, at, side="right")) for cause, at in work.causes.items()}
    last = [len(work.tokens) - 1]
    return Reuse(
        kind="exact" if sequence.exact and work.answers else "approximate",
        policy=work.policy,
        prompt=len(work.tokens),
        matched=work.matched,
        relocated=work.relocated,
        forwarded=len(work.forward),
        dropped=work.dropped,
        match_end=end,
        spans=work.spans,
        ledger=make_ledger(
            config,
            matched=work.matched,
            relocated=work.relocated,
            dropped=work.dropped,
            causes=causes,
            beyond_prompt={LAST: (last, [len(positions)])} if refreshed else None,
            probe_flops=work.probe_flops,
            kv_dtype=sequence.contract.kv_dtype,
            moved=moved,
        ),
        timings=timings,
    )
