"""What reuse costs on the host: match, pin and allocate for a warm prompt, publish, and a miss.

    python -m experiments.benchmark_host [--tokens 32768] [--repeat 300] [--json host.json]

Nothing runs on a device. Each figure is the median of `repeat` calls, after a warm-up; p10 and p90 stand
beside it. Run it on an idle machine.

A peer, where it can be imported, runs its own structure on the same prompt:

    pip install sglang     (its RadixCache, match only; needs torch)

Without it the table has our rows only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.table

from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.sequence import PAGE
from jaxkv.schedule import place

VOCAB, NEW_TOKENS = 49_152, 64
BRANCHES, BRANCH_TOKENS = 10_000, 100
A, B = b"domain A", b"domain B"
Row = dict[str, Any]


def warm_index(
    tokens: int, depth: int, page: int, branches: int = 0, seed: int = 0
) -> tuple[PagePool, PrefixIndex, Any]:
    """An index that holds one prompt as a chain of `depth` nodes, beside `branches` other texts."""
    rng = np.random.default_rng([depth, seed])
    pool = PagePool(tokens // page + branches * -(-BRANCH_TOKENS // page) + 64, page)
    index = PrefixIndex(pool)
    prompt = rng.integers(0, VOCAB, tokens, np.int32)
    births = np.arange(0, tokens, page, dtype=np.int32)
    rows = _written(pool, births, page)
    for end in np.linspace(0, tokens, depth + 1).astype(int)[1:] // page * page:
        index.insert(A, prompt[:end], rows[: end // page])
    pool.release(rows[:, PAGE])
    births = np.arange(0, BRANCH_TOKENS, page, dtype=np.int32)
    for _ in range(branches):
        rows = _written(pool, births, page)
        rows[-1, 2] = BRANCH_TOKENS - births[-1]
        index.insert(A, rng.integers(0, VOCAB, BRANCH_TOKENS, np.int32), rows)
        pool.release(rows[:, PAGE])
    return pool, index, np.concatenate([prompt, rng.integers(0, VOCAB, NEW_TOKENS, np.int32)])


def _written(pool: PagePool, births: Any, page: int) -> Any:
    pages = pool.allocate(births)
    pool.fill(pages, page)
    zeros = np.zeros_like(pages)
    return np.stack([pages, zeros, zeros + page, births], axis=1).astype(np.int32)


def timed(call: Callable[[], Any], undo: Callable[[Any], Any], repeat: int) -> Row:
    """Milliseconds of `call`; `undo` gets its result and is not counted."""
    times = []
    for number in range(repeat + 10):
        started = time.perf_counter()
        result = call()
        ended = time.perf_counter()
        undo(result)
        if number >= 10:
            times.append((ended - started) * 1e3)
    low, middle, high = np.quantile(times, [0.1, 0.5, 0.9])
    return {"median_ms": float(middle), "p10_ms": float(low), "p90_ms": float(high)}


def turn(tokens: int, depth: int, branches: int, repeat: int, page: int = 16) -> list[Row]:
    """Match + pin + allocate of a warm prompt, and publishing what is new in it."""
    pool, index, prompt = warm_index(tokens, depth, page, branches)
    new = np.arange(tokens, tokens + NEW_TOKENS, dtype=np.int32)

    def admit() -> Any:
        match = index.match(A, prompt, limit=len(prompt) - 1)
        return match, place(pool, match.segments, new)

    def back(admitted: Any) -> None:
        match, placement = admitted
        assert match.length == tokens
        pool.release(match.pages)
        pool.release(placement.fresh)

    where = f"{tokens} tokens, depth {depth}" + (f", beside {branches} branches" if branches else "")
    rows = [{"what": "match + pin + allocate", "where": where, **timed(admit, back, repeat)}]
    rows.append(
        {
            "what": "match + pin",
            "where": where,
            **timed(
                lambda: index.match(A, prompt, limit=len(prompt) - 1), lambda m: pool.release(m.pages), repeat
            ),
        }
    )
    match, placement = admit()
    pool.fill(placement.segments[:, PAGE], placement.segments[:, 2])

    def forget(_: Any) -> None:
        node = index.node_at(A, prompt)
        assert node is not None
        index._remove(node, "evicted")

    # As an engine does: where the index has the warm part is known from the match.
    published = timed(lambda: index.publish(A, prompt, placement.segments, since=match.place), forget, repeat)
    rows.append({"what": f"publish {NEW_TOKENS} new tokens", "where": where, **published})
    return rows


def misses(tokens: int, repeat: int) -> list[Row]:
    """A miss in one domain, where another domain has cached the very prompt and where it has another one.

    `auc` is the probability that the miss takes longer in the first index than in the second: 0.5 tells an
    observer nothing. Each turn asks both, in random order, for the same array.
    """
    rng = np.random.default_rng(0)
    pool, has, prompt = warm_index(tokens, 16, 16)
    other, lacks, _ = warm_index(tokens, 16, 16, seed=1)
    own = np.full(16, (int(prompt[0]) + 1) % VOCAB, np.int32)  # B's text begins otherwise
    for of, index in ((pool, has), (other, lacks)):
        index.insert(B, own, _written(of, np.zeros(1, np.int32), 16))
    indexes = {"in another domain": has, "nowhere": lacks}
    times: dict[str, list[float]] = {name: [] for name in indexes}
    for _ in range(repeat * 10):
        order = list(times)
        rng.shuffle(order)
        for name in order:
            index = indexes[name]
            started = time.perf_counter()
            match = index.match(B, prompt)
            times[name].append((time.perf_counter() - started) * 1e3)
            assert match.length == 0
    one, two = np.array(times["in another domain"]), np.sort(times["nowhere"])
    below, ties = np.searchsorted(two, one, "left"), np.searchsorted(two, one, "right")
    auc = float(((below + ties) / 2).mean() / len(two))
    return [
        {
            "what": "miss, content " + name,
            "where": f"{tokens} tokens",
            "median_ms": float(np.median(found)),
            "p10_ms": float(np.quantile(found, 0.1)),
            "p90_ms": float(np.quantile(found, 0.9)),
            "auc": auc,
        }
        for name, found in times.items()
    ]


def peers(tokens: int, repeat: int) -> list[Row]:
    """SGLang's radix cache on the same prompt, where it is installed."""
    try:
        torch = importlib.import_module("torch")
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        cache = radix.RadixCache.create_simulated()
        prompt = np.random.default_rng(0).integers(0, VOCAB, tokens).tolist()
        cache.insert(radix.RadixKey(prompt), torch.arange(tokens))
    except (ImportError, AttributeError, TypeError) as error:  # not installed, or a release with other names
        return [{"what": f"SGLang was not measured: {type(error).__name__}: {error}", "where": ""}]
    found = timed(lambda: cache.match_prefix(radix.RadixKey(prompt)), lambda _: None, repeat)
    return [{"what": "SGLang RadixCache.match_prefix", "where": f"{tokens} tokens, depth 1", **found}]


def main(arguments: list[str] | None = None) -> list[Row]:
    """Runs all, prints a table, and returns the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--repeat", type=int, default=300)
    parser.add_argument("--branches", type=int, default=BRANCHES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for depth, branches in ((1, 0), (16, 0), (128, 0), (16, options.branches), (128, options.branches)):
        rows += turn(options.tokens, depth, branches, options.repeat)
    rows += misses(options.tokens, options.repeat)
    rows += peers(options.tokens, options.repeat)
    table = rich.table.Table("what", "where", "median ms", "p10", "p90", "auc")
    for row in rows:
        figures = [f"{row[name]:.3f}" if name in row else "" for name in ("median_ms", "p10_ms", "p90_ms")]
        table.add_row(row["what"], row["where"], *figures, f"{row['auc']:.3f}" if "auc" in row else "")
    rich.console.Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
