"""Snapshots in saved caches and tiers: bit by bit what was saved, or not there at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recurrent_reference import hybrid_logits
from tiny import NUM_PAGES, PAGE_SIZE
from tiny_hybrid import CHUNK, hybrid_model
from tolerances import tolerance

import jaxkv
from jaxkv.transfer import read_state

EVERY = 32
Make = Callable[..., jaxkv.Engine]


@pytest.fixture(scope="module")
def hybrid() -> jaxkv.Model:
    return hybrid_model()


@pytest.fixture
def make(hybrid: jaxkv.Model) -> Iterator[Make]:
    made: list[jaxkv.Engine] = []

    def engine(**changes: Any) -> jaxkv.Engine:
        values: dict[str, Any] = {
            "num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "chunk_size": CHUNK, "num_states": 16,
            "snapshot_every": EVERY, "poison_free_pages": True,
        }  # fmt: skip
        made.append(jaxkv.Engine(changes.pop("model", hybrid), **{**values, **changes}))
        return made[-1]

    yield engine
    for one in made:
        one.check()


def contents(engine: jaxkv.Engine) -> dict[int, tuple[np.ndarray, ...]]:
    """Snapshots of one text by position, as bytes on the host."""
    states = engine._memory.states
    assert states is not None
    return {s.position: read_state(engine._memory.pages, s.slot) for s in states.snapshots._all.values()}


def same(a: dict[int, tuple[np.ndarray, ...]], b: dict[int, tuple[np.ndarray, ...]]) -> None:
    assert sorted(a) == sorted(b)
    for position, arrays in a.items():
        for one, two in zip(arrays, b[position], strict=True):
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one.view(np.uint8), two.view(np.uint8))


def bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("granularity", ["token", "chunk"])
def test_a_loaded_cache_answers_bit_by_bit_like_the_saved_one(
    make: Make, hybrid: jaxkv.Model, text: Any, tmp_path: Path, granularity: str
) -> None:
    engine, tokens = make(reuse_granularity=granularity), text(80)
    engine.prefill(tokens)
    asked = np.append(tokens, 5)
    warm = engine.prefill(asked)
    saved = engine.save_cache(tmp_path / "c")
    kept = engine.stats()["snapshots"]
    assert (saved.snapshots, saved.tokens) == (kept, engine.stats()["index_tokens"])
    other = make(reuse_granularity=granularity)
    loaded = other.load_cache(tmp_path / "c")
    assert (loaded.snapshots, loaded.tokens, loaded.left_out) == (kept, saved.tokens, {})
    same(contents(engine), contents(other))
    again = other.prefill(asked)
    assert again.reuse.matched == 80
    bits(again.logits, warm.logits)
    said = [e.generate(r.sequence, max_tokens=6, stop=()).tokens for e, r in ((engine, warm), (other, again))]
    np.testing.assert_array_equal(*said)
    expected = hybrid_logits(hybrid.params, hybrid.config, asked)[0][-1]
    np.testing.assert_allclose(again.logits, expected, atol=tolerance("logits"), rtol=0)
    assert other.load_cache(tmp_path / "c").snapshots == 0
