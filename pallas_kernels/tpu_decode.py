"""Attention of one query a sequence on a TPU. Bound by memory: what counts is that copies never pause.

A sequence is one unit, and the ring of blocks runs on from one sequence to the next. The few query rows
leave most of the matrix unit idle, so with narrow pages each float32 query and weight goes in as two
bfloat16 numbers, stacked as rows: the result is exact to about 2^-16 at no extra pass over the keys.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.tpu_prefill import run

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
    interpret: Any = False,
) -> Array:
    """`reference.paged_attention` on a TPU for T = 1.

    Raises:
      NotImplementedError: a size or dtype that the kernel does not take; the sentence names it.
    """
    if q.shape[2] != 1:
        raise NotImplementedError(f"q has {q.shape[2]} tokens a sequence, tpu_decode takes 1")
    return run(
        *(q, kv, page, first, lo, hi, delta_index, positions, scale, window, soft_cap),
        split=True,
        interpret=interpret,
        name="tpu_decode",
    )
