"""Dimension letters and array aliases. Every shape comment and docstring in jaxkv uses them.

    B  sequences in a step             L  layers
    T  query tokens of one sequence    P  page size, in slots
    S  key tokens                      M  page-table entries of one sequence
    N  query heads                     R  distinct deltas of one sequence
    K  key/value heads                 W  segments of one sequence
    G  N / K, query heads per KV head  H  head dimension
    D  model dimension                 F  feed-forward dimension
    V  vocabulary

Words: a *page* has P write-once *slots*; a *segment* places a run of slots of one page at positions
of one sequence; *delta* is the distance between where a slot stands and where it was born.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# jax.Array is not imported: host modules (cache, reuse) annotate with these and never load jax.
Array: TypeAlias = Any  # jax.Array or a tracer
Int32: TypeAlias = npt.NDArray[np.int32]
Float32: TypeAlias = npt.NDArray[np.float32]
Float64: TypeAlias = npt.NDArray[np.float64]
Bool: TypeAlias = npt.NDArray[np.bool_]
