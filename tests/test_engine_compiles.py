"""Shapes are bucketed: a mixed workload compiles a bounded number of programs, its repeat none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import jaxkv

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]


def workload(engine: jaxkv.Engine, text: Text, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for n in rng.integers(1, 140, 12):
        tokens = text(int(n), seed=seed)
        result = engine.prefill(np.concatenate([text(int(rng.integers(1, 30))), tokens]))
        engine.extend(result.sequence, text(int(rng.integers(1, 40)), seed=seed + 1))
        engine.score(result.sequence, text(int(rng.integers(2, 40)), seed=seed + 2))
        cut = int(rng.integers(0, len(result.sequence)))
        edited = np.concatenate([result.sequence.tokens[:cut], [5], result.sequence.tokens[cut:]])
        engine.edit(result.sequence, edited, jaxkv.SCR(min_span=4, tail=2))
        engine.generate(result.sequence, max_tokens=int(rng.integers(5, 9)))


def test_a_mixed_workload_compiles_a_bounded_number_of_programs_and_its_repeat_none(
    make_engine: Engines, text: Text, compiled: list[str]
) -> None:
    engine = make_engine(poison_free_pages=False)
    workload(engine, text, 0)
    workload(engine, text, 1)
    # Steps of 1, 16 and 32 tokens, last or all logits, with and without moved keys.
    assert engine.stats()["shapes"] <= 3 * 2 * 2
    assert len(compiled) <= 40, "steps, loops and small host-side programs"
    compiled.clear()
    workload(make_engine(poison_free_pages=False), text, 2)
    assert compiled == [], "new lengths and contents must not compile again"
