"""Which replica takes a request: a pure choice from what each has cached of it and has to do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxkv.errors import ConfigError, nearest

ROUTES = ("longest_match", "least_work", "round_robin", "random")


def check_route(route: str) -> str:
    """Returns `route`, or raises a ConfigError for one that is not in ROUTES."""
    if route not in ROUTES:
        raise ConfigError(
            f"route is {route!r}, expected one of {', '.join(ROUTES)}{nearest(str(route), ROUTES)}"
        )
    return route


def choose(
    route: str, matched: Sequence[int], work: Sequence[int], length: int, *, number: int, seed: int = 0
) -> int:
    """The replica for one request.

    Args:
      route: "longest_match" takes the replica that has most of the prompt, of several the one with least
        work; "least_work" the one that would be done first, its own work and what is missing of the prompt
        counted; "round_robin" and "random" look at neither.
      matched: leading tokens of the prompt that each replica has or is computing.
      work: tokens that each replica has yet to compute.
      length: tokens of the prompt.
      number: how many requests were routed before.
      seed: of "random", with `number`.
    """
    count = len(matched)
    if route == "round_robin":
        return number % count
    if route == "random":
        return int(np.random.default_rng([seed, number]).integers(count))
    if route == "least_work":
        return min(range(count), key=lambda i: (work[i] + length - matched[i], -matched[i], i))
    return min(range(count), key=lambda i: (-matched[i], work[i], i))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Leading tokens that two prompts share."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
