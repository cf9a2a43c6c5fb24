"""Bad input: one clear sentence of ours, and the engine exactly as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CHUNK, NUM_PAGES, PAGE_SIZE, VOCAB

import jaxkv
from jaxkv import CapacityError, ConfigError, HandleError, TokenError

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]

BAD_TOKENS: list[tuple[Any, str]] = [
    ([], "empty"),
    (np.zeros(0, np.float32), "empty"),
    (np.zeros((0, 3), np.int32), "shape"),
    ([3, VOCAB, 5], rf"\[1\] is {VOCAB}.*0..{VOCAB - 1}"),
    ([3, 5, -1], r"\[2\] is -1"),
    (np.array([2**40]), str(2**40)),
    (np.array([2**63], np.uint64), str(2**63)),
    ([1.0, 2.0], "float64"),
    (jnp.ones(3), "float32"),
    ([True, False], "bool"),
    (["a", "b"], "dtype"),
    ([None], "dtype"),
    (None, "dimension"),
    (7, "dimension"),
    ("text", "dimension"),
    ([[1, 2], [3, 4]], "shape"),
    ([[1, 2], [3]], "dimension"),
]


def snapshot(engine: jaxkv.Engine) -> tuple[Any, ...]:
    engine.check()
    memory = engine._memory
    return (
        engine.stats(),
        memory.pool.refcount.tolist(),
        memory.pool.filled.tolist(),
        np.asarray(memory.pages[0].kv).view(np.uint32).tobytes(),
    )


@pytest.mark.parametrize(("tokens", "says"), BAD_TOKENS, ids=lambda v: str(v)[:20])
def test_bad_tokens_change_nothing(engine: jaxkv.Engine, text: Text, tokens: Any, says: str) -> None:
    source = engine.prefill(text(20)).sequence
    before = snapshot(engine)
    for call in (
        lambda: engine.prefill(tokens),
        lambda: engine.edit(source, tokens, jaxkv.SCR()),
        lambda: engine.extend(source, tokens),
        lambda: engine.score(source, tokens),
        lambda: engine.attention_outputs(source, tokens),
    ):
        with pytest.raises(TokenError, match=says):
            call()
    assert snapshot(engine) == before


def test_a_text_longer_than_the_model_changes_nothing(
    engine: jaxkv.Engine, model: jaxkv.Model, text: Text
) -> None:
    """CASE 12."""
    limit = model.config.max_positions
    source = engine.prefill(text(limit - 3)).sequence
    before = snapshot(engine)
    for call in (
        lambda: engine.prefill(text(limit + 1)),
        lambda: engine.edit(source, text(limit + 1), jaxkv.Exact()),
        lambda: engine.extend(source, text(4)),
        lambda: engine.score(source, text(5)),
        lambda: engine.attention_outputs(source, text(4)),
        lambda: engine.generate(source, max_tokens=4),
    ):
        with pytest.raises(CapacityError, match=f"{limit + 1} tokens.*{limit} positions"):
            call()
    assert snapshot(engine) == before


def test_a_text_longer_than_the_pool_changes_nothing(engine: jaxkv.Engine, text: Text) -> None:
    """CASE 12: nor does what does not fit cost anyone else their cache."""
    source = engine.prefill(text(20)).sequence
    engine.release(engine.prefill(text(60, seed=1)).sequence)
    held = engine.prefill(text((NUM_PAGES - 14) * PAGE_SIZE, seed=2)).sequence
    assert engine.stats()["pages_free"] == 3
    before = snapshot(engine)
    for call in (
        lambda: engine.prefill(text(120, seed=3)),
        lambda: engine.extend(source, text(120, seed=3)),
        lambda: engine.edit(source, text(120, seed=3), jaxkv.SCR()),
        lambda: engine.generate(source, max_tokens=120),
        lambda: engine.score(source, text(120, seed=3)),
        lambda: engine.edit(held, text((NUM_PAGES - 14) * PAGE_SIZE, seed=2)[3:], jaxkv.SCR(form="copy")),
    ):
        with pytest.raises(CapacityError, match="pages are needed"):
            call()
        assert snapshot(engine) == before


def test_a_released_sequence_is_refused_everywhere(engine: jaxkv.Engine, text: Text) -> None:
    source = engine.prefill(text(20)).sequence
    engine.release(source)
    before = snapshot(engine)
    for call in calls_with(engine, source):
        with pytest.raises(HandleError, match="released"):
            call()
    assert snapshot(engine) == before


def test_another_engines_sequence_is_refused_everywhere(make_engine: Engines, text: Text) -> None:
    engine, other = make_engine(), make_engine()
    foreign = other.prefill(text(20)).sequence
    for call in calls_with(engine, foreign):
        with pytest.raises(HandleError, match="another engine"):
            call()
    assert engine.stats()["pages_live"] == 0
    assert other.stats()["sequences"] == 1


def test_what_is_no_sequence_is_refused_everywhere(engine: jaxkv.Engine, text: Text) -> None:
    result = engine.prefill(text(20))
    for bad in (None, 3, text(20), result):
        for call in calls_with(engine, bad):
            with pytest.raises(HandleError, match="expected a jaxkv Sequence"):
                call()


def calls_with(engine: jaxkv.Engine, sequence: Any) -> list[Callable[[], Any]]:
    return [
        lambda: engine.extend(sequence, [1]),
        lambda: engine.edit(sequence, [1, 2], jaxkv.Exact()),
        lambda: engine.generate(sequence, max_tokens=4),
        lambda: engine.generate_batch([sequence], max_tokens=4),
        lambda: engine.score(sequence, [1]),
        lambda: engine.score(sequence, [1, 2]),
        lambda: engine.attention_outputs(sequence, [1]),
        lambda: engine.read_kv(sequence),
        lambda: engine.fork(sequence),
        lambda: engine.release(sequence),
    ]


@pytest.mark.parametrize("policy", ["scr", None, 3, jaxkv.SCR, jaxkv.Exact, jaxkv.FirstK, object()])
def test_what_is_no_policy_is_refused(engine: jaxkv.Engine, text: Text, policy: Any) -> None:
    source = engine.prefill(text(20)).sequence
    before = snapshot(engine)
    with pytest.raises(ConfigError, match="policy is"):
        engine.edit(source, text(20)[3:], policy)
    assert snapshot(engine) == before


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"page_size": 7}, "page_size is 7"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 512, "chunk_size": 512}, "page_size is 512"),
        ({"chunk_size": 12}, "chunk_size is 12"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": -8}, "chunk_size is -8"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_pages": -1}, "num_pages is -1"),
        ({"reuse_granularity": "page"}, "reuse_granularity is 'page'"),
        ({"max_deltas": 1}, "max_deltas is 1"),
        ({"kv_dtype": "float8"}, "kv_dtype is 'float8'"),
    ],
    ids=str,
)
def test_an_engine_out_of_range_names_the_argument(
    model: jaxkv.Model, bad: dict[str, Any], says: str
) -> None:
    values = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "chunk_size": CHUNK, **bad}
    with pytest.raises(ConfigError, match=says):
        jaxkv.Engine(model, **values)


def test_generation_out_of_range_names_the_argument(engine: jaxkv.Engine, text: Text) -> None:
    source = engine.prefill(text(20)).sequence
    before = snapshot(engine)
    for call, says in (
        (lambda: engine.generate(source, max_tokens=0), "max_tokens is 0"),
        (lambda: engine.generate(source, max_tokens=4, temperature=-1), "temperature is -1"),
        (lambda: engine.generate(source, max_tokens=4, top_p=0), "top_p is 0"),
        (lambda: engine.generate(source, max_tokens=4, top_k=-1), "top_k is -1"),
        (lambda: engine.generate_batch([], max_tokens=4), "sequences are empty"),
        (
            lambda: engine.generate_batch(
                [source], max_tokens=4, sampling=[jaxkv.Sampling(), jaxkv.Sampling()]
            ),
            "2 rows",
        ),
        (lambda: engine.prefill(text(20), domain=5), "domain is a int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=says):
            call()
    assert snapshot(engine) == before
