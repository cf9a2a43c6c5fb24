"""What the machine can do, measured in the same run: the roofline that serving is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

COPY_BYTES = 1 << 28
CHAIN = 8
MOST_MATRICES = 128


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call whose result is waited for, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def matmul_rate(rows: int, inner: int, columns: int, dtype: str, repeats: int) -> float:
    """FLOP/s of [rows, inner] × [inner, columns], products accumulated in float32."""
    x = jnp.ones((rows, inner), dtype)
    weights = [jnp.full((inner, columns), 1e-3, dtype) for _ in range(CHAIN)]

    @jax.jit
    def chain(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [jnp.dot(x, w, preferred_element_type=jnp.float32) for w in weights]

    return 2 * rows * inner * columns * CHAIN / seconds(lambda: chain(x, weights), repeats)


def read_rate(inner: int, columns: int, repeats: int) -> float:
    """Bytes/s at which one row is multiplied by float32 matrices that no cache holds."""
    # Small matrices would be many, and compile for minutes.
    count = min(max(COPY_BYTES // (4 * inner * columns), 1), MOST_MATRICES)
    x = jnp.ones((1, inner))
    weights = [jnp.full((inner, columns), 1e-3) for _ in range(count)]

    @jax.jit
    def chain(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        total = jnp.zeros((1, columns))
        for w in weights:
            total = total + x @ w
        return total

    return 4 * inner * columns * count / seconds(lambda: chain(x, weights), repeats)


def copy_rate(repeats: int) -> float:
    """Bytes/s read and written by a copy larger than any cache."""
    x = jnp.zeros(COPY_BYTES // 4)
    add = jax.jit(lambda x: x + 1)
    return 2 * COPY_BYTES / seconds(lambda: add(x), repeats)
