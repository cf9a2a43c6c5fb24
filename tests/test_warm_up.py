"""Compiling ahead: afterwards no request compiles anything, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny import VOCAB, make_model, tiny_config
from tiny_hybrid import hybrid_config

import jaxkv

LONGEST, BATCH = 600, 2  # two widths of a copied loop's tables, two sizes of its batch

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bounded windows": ({"layer_types": ("local", "global"), "window": 16}, {"local_pages": 40}),
    "hybrid": ({"hybrid": True}, {"num_states": 16, "snapshot_every": 64}),
}


def make(kind: str) -> jaxkv.Engine:
    changes, options = MODELS[kind]
    make_config = hybrid_config if "hybrid" in changes else tiny_config
    changes = {name: value for name, value in changes.items() if name != "hybrid"}
    # A vocabulary of its own: no other test's programs may serve this one.
    config = make_config(max_positions=1024, vocab_size=VOCAB + 4, **changes)
    return jaxkv.Engine(make_model(config), num_pages=256, page_size=8, chunk_size=32, **options)


def serve(engine: jaxkv.Engine, longest: int, batch: int) -> None:
    rng = np.random.default_rng(0)

    def text(n: int) -> np.ndarray:
        return rng.integers(0, VOCAB, n).astype(np.int32)

    prompts = [text(n) for n in (1, 5, 40, 70)]
    results = [engine.prefill(tokens) for tokens in [*prompts, np.concatenate([prompts[3], text(9)])]]
    engine.extend(results[2].sequence, text(21))
    for rows in range(1, batch + 1):
        engine.generate_batch([r.sequence for r in results[:rows]], max_tokens=int(rng.integers(1, 40)))
    long = engine.prefill(text(longest - 40))
    engine.generate(long.sequence, max_tokens=40, stop=())
    for n in (3, 50, 17)[:batch]:
        engine.submit(text(n), max_tokens=6)
    engine.run()


@pytest.mark.parametrize("kind", MODELS)
def test_requests_compile_nothing_after_a_warm_up(kind: str, compiled: list[str]) -> None:
    most = (LONGEST, BATCH) if kind == "plain" else (200, 1)
    engine = make(kind)
    before = engine.stats()
    programs = engine.warm_up(tokens=most[0], batch=most[1])
    assert programs == engine.stats()["shapes"] > 0
    after = engine.stats()
    assert {name: after[name] for name in after if name != "shapes"} == {
        name: before[name] for name in before if name != "shapes"
    }
    assert engine.warm_up(tokens=most[0], batch=most[1]) == 0
    compiled.clear()
    serve(engine, *most)
    assert compiled == []
    engine.check()


def test_moved_keys_are_warmed_up_on_request(compiled: list[str]) -> None:
    engine = make("plain")
    engine.warm_up(tokens=200, moved=True)
    rng = np.random.default_rng(3)
    old = rng.integers(0, VOCAB, 160).astype(np.int32)
    source = engine.prefill(old).sequence
    new = np.concatenate([old[:40], old[44:], old[:60]])
    compiled.clear()
    result = engine.edit(source, new, jaxkv.SCR(min_span=16))
    assert result.reuse.relocated > 0
    assert len(compiled) == 0


def test_bad_arguments_are_named() -> None:
    engine = make("plain")
    with pytest.raises(jaxkv.CapacityError, match="1025"):
        engine.warm_up(tokens=1025)
    with pytest.raises(jaxkv.ConfigError, match="tokens is 0"):
        engine.warm_up(tokens=0)
    with pytest.raises(jaxkv.ConfigError, match="batch is 0"):
        engine.warm_up(tokens=10, batch=0)
