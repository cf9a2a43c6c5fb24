"""Times calls chained inside one jit, so that no dispatch from Python is counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

MOST_CALLS = 2000


def seconds_per_call(
    step: Callable[..., Any], state: Any, *constants: Any, samples: int, sample_ms: float
) -> list[float]:
    """Times `step(state, *constants)`, which returns the next state: each call needs the one before.

    Args:
      step: traceable.
      state: where to start; donated.
      constants: what every call reads; not donated.
      samples: timings.
      sample_ms: about how long a timing should take.

    Returns:
      Seconds a call, one for each timing.
    """
    chained = jax.jit(
        lambda state, calls, *rest: jax.lax.fori_loop(0, calls, lambda _, s: step(s, *rest), state),
        donate_argnums=0,
    )

    def run(state: Any, calls: int) -> tuple[Any, float]:
        begin = time.perf_counter()
        state = jax.block_until_ready(chained(state, calls, *constants))
        return state, time.perf_counter() - begin

    state, _ = run(state, 1)  # compiles
    calls, taken = 1, 0.0
    while calls < MOST_CALLS:
        state, taken = run(state, calls)
        if taken * 1e3 >= sample_ms / 2:
            break
        calls = min(calls * max(2, min(10, int(sample_ms / max(taken * 1e3, 1e-3)))), MOST_CALLS)
    found = []
    for _ in range(samples):
        state, taken = run(state, calls)
        found.append(taken / calls)
    return found


def spread(values: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2
