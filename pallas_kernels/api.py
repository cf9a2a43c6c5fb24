"""The public operations. What they mean is in `reference.py`, who runs them is decided in `dispatch.py`.

Letters: B sequences, T query tokens, M table entries, R deltas, K KV heads, G query heads a KV head,
P page size, H head dimension, X rows of the page array (layers · pages), n tokens or moves.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels import checks
from pallas_kernels.dispatch import run

Array = Any


def paged_attention(
    q: Array,
    kv: Array,
    page: Array,
    first: Array,
    lo: Array,
    hi: Array,
    delta_index: Array,
    positions: Array,
    *,
    scale: Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
    interpret: Any = False,
) -> Array:
    """Causal attention of B sequences over the slots that their tables name.

    Slot s of entry m stands at position `first[b, m] + s` and belongs to the sequence if `lo[b, m] <= s <
    hi[b, m]`; those that do stand at 0 or later. A query sees a slot that stands at or before its own
    position and, with a window, after `position - window`. Entries come in blocks of M /
    delta_index.shape[1]; the queries of block j are `q[b, delta_index[b, j]]`, rotated by the caller at
    position - delta, so that keys are read as they were born. Slots that stand at or before a sequence's
    last query must have been written; other slots may hold anything.

    Args:
      q: f32[B, R, T, K, G, H], scaled.
      kv: [X, K, P, 2H] float32, bfloat16, float8_e4m3fn or int8, keys | values on the last axis.
      page: i32[B, M], rows of kv; any value where hi <= lo.
      first, lo, hi: i32[B, M].
      delta_index: i32[B, M/block].
      positions: i32[B, T] of the queries; a negative one sees nothing.
      scale: f32[K, X', S] for keys and values of quantized pages, as `scales.py` says; X' >= X, S >= 2P.
      window: positions a query sees, its own included; None for all.
      soft_cap: scores become `soft_cap · tanh(score / soft_cap)`.
      implementation: one of IMPLEMENTATIONS. "auto" takes the platform's kernel, or XLA where there is
        none for these arguments.
      interpret: run a forced Pallas kernel on the CPU: True, or a backend's interpreter parameters.

    Returns:
      f32[B, T, K, G, H]; zeros where a query sees nothing.

    Raises:
      ValueError: an argument is not as above.
      NotImplementedError: a forced implementation cannot do this, or cannot run here.
    """
    checks.check_attention(q, kv, page, first, lo, hi, delta_index, positions, scale, window, soft_cap)
    return run(
        "decode" if q.shape[2] == 1 else "prefill",
        "paged_attention",
        implementation,
        interpret,
        *(q, kv, page, first, lo, hi, delta_index, positions),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


def append(
    kv: Array,
    row: Array,
    slot: Array,
    keys: Array,
    values: Array,
    *,
    scale: Array | None = None,
    value_scale: Array | None = None,
    implementation: str = "auto",
    interpret: Any = False,
) -> Any:
    """Writes new tokens into their slots. In place when `kv` (and `scale`) are donated.

    Args:
      kv: [X, K, P, 2H].
      row: i32[n]; a row outside 0..X-1 drops the write.
      slot: i32[n]; so does a slot outside 0..P-1. No other (row, slot) may occur twice.
      keys, values: float[n, K, H].
      scale: f32[K, X', S]; then keys and values are quantized, each token and head by its largest
        absolute value.
      value_scale: f32[n, K]; what values are divided by instead. Numbers that were stored with it, and
        dequantized, are stored again as they were.
      implementation, interpret: as in `paged_attention`.

    Returns:
      kv, or (kv, scale) when scale is given.

    Raises:
      ValueError: an argument is not as above.
      NotImplementedError: a forced implementation cannot do this, or cannot run here.
    """
    checks.check_append(kv, row, slot, keys, values, scale, value_scale)
    options = {"scale": scale} if value_scale is None else {"scale": scale, "value_scale": value_scale}
    return run("append", "append", implementation, interpret, kv, row, slot, keys, values, **options)


def relocate_pages(
    kv: Array,
    source: Array,
    target: Array,
    cos: Array,
    sin: Array,
    *,
    scale: Array | None = None,
    implementation: str = "auto",
    interpret: Any = False,
) -> Any:
    """Copies whole pages with every key rotated: K' = R K in float32, V' = V bit for bit.

    Args:
      kv: [X, K, P, 2H].
      source: i32[n], rows of kv. No row is both a source and a target, and no target occurs twice.
      target: i32[n]; a row outside 0..X-1 drops the move.
      cos, sin: f32[n, rotary_dim/2] of each page's delta, half-split convention; the key's other
        components are copied.
      scale: f32[K, X', S]; the rotated keys are quantized anew.
      implementation, interpret: as in `paged_attention`.

    Returns:
      kv, or (kv, scale) when scale is given. In place when they are donated.

    Raises:
      ValueError: an argument is not as above.
      NotImplementedError: a forced implementation cannot do this, or cannot run here.
    """
    checks.check_relocate_pages(kv, source, target, cos, sin, scale)
    return run(
        "relocate_pages",
        "relocate_pages",
        implementation,
        interpret,
        kv,
        source,
        target,
        cos,
        sin,
        scale=scale,
    )
