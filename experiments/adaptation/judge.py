"""Divergence and plain perplexity on held-out edits, through the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.adaptation.edits import Draw, TextEdit
from jaxkv.cache.sequence import Sequence as CachedSequence
from jaxkv.divergence import divergence
from jaxkv.engine import Engine
from jaxkv.io.models import Model
from jaxkv.reuse.policies import Policy
from jaxkv.typing import Float64, Int32

_PIECE = 256  # tokens whose logits are held at once


def held_out_edits(draw: Draw, held: Int32, count: int, seed: int) -> list[TextEdit]:
    """`count` edits of held-out text; kinds and positions take turns, places and sizes are drawn."""
    rng = np.random.default_rng([seed, 6])
    edits = []
    for i in range(count):
        kind = draw.kinds[i % len(draw.kinds)]
        position = draw.positions[i // len(draw.kinds) % len(draw.positions)]
        size = int(rng.choice(draw.sizes))
        at = int(rng.integers(0, len(held) - draw.context - draw.continuation + 1))
        borrow = int(rng.integers(0, len(held) - size + 1))
        edits.append(draw.edit(kind, position, size, held, at, borrow))
    return edits


def judge(
    model: Model, edits: Sequence[TextEdit], policy: Policy, *, page_size: int, chunk_size: int
) -> Iterator[dict[str, Any]]:
    """For each edit: reused against exact answers of the same weights, and the NLL of the text as it was."""
    longest = max(max(len(e.old), len(e.new)) + len(e.continuation) for e in edits)
    engine = Engine(
        model,
        num_pages=5 * (math.ceil(longest / page_size) + 2),
        page_size=page_size,
        chunk_size=chunk_size,
        prefix_cache=False,
    )
    for edit in edits:
        source = engine.prefill(edit.old).sequence
        result = engine.edit(source, edit.new, policy)
        exact = engine.prefill(edit.new).sequence
        found = divergence(
            np.asarray(engine.score(exact, edit.continuation)),
            np.asarray(engine.score(result.sequence, edit.continuation)),
            edit.continuation,
        )
        for sequence in (source, result.sequence, exact):
            engine.release(sequence)
        nll = text_nll(engine, np.concatenate([edit.old, edit.continuation]))
        yield {
            "edit": edit.kind,
            "position": edit.position,
            "relocated": result.reuse.relocated,
            "forwarded": result.reuse.forwarded,
            "contract": engine.contract.digest().hex()[:16],
            "divergence": found.to_dict(),
            "plain_nll": float(nll.mean()),
            "plain_tokens": len(nll),
        }


def text_nll(engine: Engine, tokens: Int32) -> Float64:
    """NLL of each token of a text but the first, nats, f64[n-1], from exact state."""
    sequence: CachedSequence = engine.prefill(tokens[:1]).sequence
    parts = []
    for start in range(1, len(tokens), _PIECE):
        piece = tokens[start : start + _PIECE]
        logits = np.asarray(engine.score(sequence, piece), np.float64)
        peak = logits.max(axis=1, keepdims=True)
        norm = peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))
        parts.append(norm - np.take_along_axis(logits, piece[:, None].astype(np.int64), axis=1)[:, 0])
        if start + _PIECE < len(tokens):
            following = engine.extend(sequence, piece).sequence
            engine.release(sequence)
            sequence = following
    engine.release(sequence)
    return np.concatenate(parts)
