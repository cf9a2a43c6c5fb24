"""How does cost grow: with the context, with the size of the pool, and with what the prefix index holds?

    python -m experiments.benchmark_growth [--contexts 1024,...,32768] [--pools 64,...,4096] [--out growth]

A tiny random model, so that what is measured is the cache and not the weights. Each figure is a median of a
few calls after one that compiles. The slope of a curve is its exponent: 1 is proportional, 0 independent; it
is fitted to the last half of the points, where constants matter least. `--out` writes `growth.csv` and
`growth.png`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table

from experiments import benchmark_host
from experiments.subject import tiny_model
from jaxkv.cache.table import GroupInput, StepInput, build_table
from jaxkv.engine import Engine
from jaxkv.io.models import Model
from jaxkv.reuse.policies import SCR
from jaxkv.steps import _step

MIB = 1 << 20
PAGE_SIZE, DECODED, CONTEXT, TREE_PROMPT = 16, 8, 2048, 32_768


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement: `value` of `what` at `size` of `axis`."""

    axis: str
    size: int
    what: str
    value: float


def median_seconds(call: Callable[[], Any], repeat: int) -> float:
    """Median of `repeat` calls, after one that compiles."""
    call()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def long_model(positions: int) -> Model:
    """The tiny model with `positions` positions."""
    model = tiny_model()
    config = dataclasses.replace(model.config, max_positions=2 * positions)
    return dataclasses.replace(model, config=config)


def text(tokens: int, seed: int = 0) -> Any:
    """Byte tokens, i32[tokens]."""
    return np.random.default_rng(seed).integers(0, 256, tokens, np.int32)


def by_context(contexts: list[int], repeat: int) -> Iterator[Point]:
    """Prefill, decoding, an edit at a quarter and its plan, from 0 to n tokens."""
    longest = max(contexts)
    engine = Engine(
        long_model(longest), num_pages=4 * longest // PAGE_SIZE + 64, page_size=PAGE_SIZE, prefix_cache=False
    )
    for n in contexts:
        old = text(n)
        new = np.concatenate([old[: n // 4], text(PAGE_SIZE, 1), old[n // 4 + PAGE_SIZE - 1 :]])

        def prefill(old: Any = old) -> Any:
            result = engine.prefill(old)
            result.logits.block_until_ready()
            return result.sequence

        def decode(source: Any) -> None:
            engine.generate(source, max_tokens=DECODED, stop=())

        yield Point("context", n, "prefill, s", median_seconds(prefill, max(repeat // 3, 1)))
        source = prefill()
        spent = median_seconds(functools.partial(decode, source), repeat)
        yield Point("context", n, "decode, ms a token", 1e3 * spent / DECODED)
        plans: list[float] = []

        def edit(source: Any = source, new: Any = new, plans: list[float] = plans) -> None:
            result = engine.edit(source, new, SCR())
            result.logits.block_until_ready()
            plans.append(1e3 * result.reuse.timings["plan"])

        yield Point("context", n, "edit under scr, ms", 1e3 * median_seconds(edit, repeat))
        yield Point("context", n, "plan of the edit, ms", statistics.median(plans[1:]))


def by_pool(pools: list[int], repeat: int) -> Iterator[Point]:
    """Decoding behind the same context with pools of so many MiB, and memory of a step beside the pool."""
    model = long_model(CONTEXT)
    for mib in pools:
        engine = Engine(model, capacity_bytes=mib * MIB, page_size=PAGE_SIZE, prefix_cache=False)
        source = engine.prefill(text(CONTEXT)).sequence

        def decode(engine: Engine = engine, source: Any = source) -> None:
            engine.generate(source, max_tokens=DECODED, stop=())

        yield Point("pool, MiB", mib, "decode, ms a token", 1e3 * median_seconds(decode, repeat) / DECODED)
        yield Point("pool, MiB", mib, "temporary KiB of a step", temporary_bytes(engine) / 1024)
        engine.release(source)
        del engine, source, decode


def temporary_bytes(engine: Engine) -> int:
    """What XLA says a decode step allocates beside its inputs and outputs."""
    pages = engine._memory.pages
    table = build_table(
        [(np.zeros((0, 4), np.int32), np.zeros(0, np.int32))],
        num_pages=pages[0].num_pages,
        page_size=PAGE_SIZE,
        max_deltas=1,
    )
    one = np.zeros((1, 1), np.int32)
    step = StepInput(
        tokens=one, positions=one, lengths=np.ones(1, np.int32), groups=(GroupInput(slots=one, table=table),)
    )
    lowered = _step.lower(
        engine.model.params, pages, step, config=engine.config, logits="last", capture=False,
        backend=engine._memory.backend,
    )  # fmt: skip
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


def by_prompt(prompts: list[int], repeat: int) -> Iterator[Point]:
    """Admission and publishing of 64 new tokens behind a warm prompt of so many tokens, tree depth 16."""
    for tokens in prompts:
        for row in benchmark_host.turn(tokens, 16, 0, 20 * repeat):
            if row["what"] != "match + pin":
                yield Point("warm prompt", tokens, f"{row['what']}, ms", row["median_ms"])


def by_tree(branches: list[int], prompt: int, repeat: int) -> Iterator[Point]:
    """Admission and publishing behind a warm prompt beside so many cached branches of 100 tokens."""
    for count in branches:
        tokens = prompt + count * benchmark_host.BRANCH_TOKENS
        for row in benchmark_host.turn(prompt, 16, count, 20 * repeat):
            if row["what"] != "match + pin":
                yield Point("tokens cached", tokens, f"{row['what']}, ms", row["median_ms"])


def slope(points: list[Point]) -> float:
    """Exponent of the curve over the last half of its points; NaN where there are fewer than two."""
    if len(points) < 2:
        return float("nan")
    tail = points[-max(2, len(points) // 2) :]
    x, y = np.log([p.size for p in tail]), np.log([max(p.value, 1e-9) for p in tail])
    return float(np.polyfit(x, y, 1)[0])


def curves(points: list[Point]) -> dict[tuple[str, str], list[Point]]:
    """Points of each (axis, what), in the order of their sizes."""
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.axis, point.what), []).append(point)
    return {key: sorted(each, key=lambda p: p.size) for key, each in found.items()}


def plot(points: list[Point], path: Path) -> None:
    """One panel an axis, logarithmic both ways."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = curves(points)
    axes = list(dict.fromkeys(axis for axis, _ in found))
    figure, panels = plt.subplots(
        1, len(axes), figsize=(5 * len(axes), 4), squeeze=False, layout="constrained"
    )
    for panel, axis in zip(panels[0], axes, strict=True):
        for (of, what), each in found.items():
            if of == axis:
                sizes = [p.size for p in each]
                panel.plot(sizes, [p.value for p in each], "o-", label=f"{what} (slope {slope(each):.2f})")
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def numbers(value: str) -> list[int]:
    """ "1,2,3" as a list."""
    return [int(part) for part in value.split(",") if part]


def main(arguments: list[str] | None = None) -> list[Point]:
    """Measures all axes, prints a table, and returns the points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=numbers, default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--pools", type=numbers, default=[64, 256, 1024, 4096])
    parser.add_argument("--prompts", type=numbers, default=[2048, 8192, 32_768, 131_072])
    parser.add_argument("--branches", type=numbers, default=[100, 1000, 10_000])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    points = []
    for point in itertools.chain(
        by_context(options.contexts, options.repeat),
        by_pool(options.pools, options.repeat),
        by_prompt(options.prompts, options.repeat),
        by_tree(options.branches, min(TREE_PROMPT, max(options.prompts)), options.repeat),
    ):
        points.append(point)
        print(f"{point.axis} {point.size:,}: {point.what} {point.value:.3g}", file=sys.stderr)
    table = rich.table.Table("axis", "what", "sizes", "values", "slope")
    for (axis, what), each in curves(points).items():
        sizes, values = ([f"{n:,}" for n in (p.size for p in each)], [f"{p.value:.3g}" for p in each])
        table.add_row(axis, what, "\n".join(sizes), "\n".join(values), f"{slope(each):.2f}")
    rich.console.Console(width=110).print(table)
    print(f"jax {jax.__version__} on {jax.default_backend()}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "growth.csv").open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["axis", "size", "what", "value"])
            rows.writerows([p.axis, p.size, p.what, f"{p.value:.6g}"] for p in points)
        plot(points, options.out / "growth.png")
    return points


if __name__ == "__main__":
    main()
