"""The compiled steps by themselves: many decode steps in one loop, relocation, donated pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import Decoder
from tiny import VOCAB, tiny_config
from tolerances import tolerance

import jaxkv
from jaxkv.cache.pages import decode_storage, poison_pages
from jaxkv.model.sampling import SamplingInput
from jaxkv.steps import run_step

B, P, PAGES, STEPS = 4, 8, 33, 8  # eight pages for each row, and a last one for nobody
LENGTHS = np.array([5, 1, 16, 23], np.int32)


def fresh_pages(config: jaxkv.ModelConfig) -> tuple[jaxkv.KVPages, ...]:
    pages = jaxkv.make_pages(config, config.groups[0], num_pages=PAGES, page_size=P)
    return (poison_pages(pages, np.arange(PAGES, dtype=np.int32)),)


def whole_table() -> jaxkv.PageTable:
    rows = [np.array([(8 * b + i, 0, P, P * i) for i in range(8)], np.int32) for b in range(B)]
    return jaxkv.build_table(
        [(r, np.zeros(8, np.int32)) for r in rows], num_pages=PAGES, page_size=P, max_deltas=4
    )


def slot(row: Any, position: Any) -> Any:
    return 8 * P * row + position


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS]


def step_of(tokens: np.ndarray, positions: np.ndarray, lengths: np.ndarray) -> jaxkv.StepInput:
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    slots = np.where(valid, slot(np.arange(B)[:, None], positions), PAGES * P)
    return jaxkv.StepInput(
        tokens=tokens.astype(np.int32),
        positions=positions.astype(np.int32),
        lengths=lengths.astype(np.int32),
        groups=(jaxkv.GroupInput(slots=slots.astype(np.int32), table=whole_table()),),
    )


def prefilled(model: jaxkv.Model) -> tuple[Any, Any]:
    tokens = np.zeros((B, 32), np.int32)
    for b, prompt in enumerate(prompts()):
        tokens[b, : len(prompt)] = prompt
    positions = np.tile(np.arange(32), (B, 1))
    step = step_of(tokens, positions, LENGTHS)
    return jaxkv.prefill(model.params, fresh_pages(model.config), step, config=model.config)


def decode_input(logits: Any, **changes: Any) -> jaxkv.DecodeInput:
    positions = LENGTHS[:, None] + np.arange(STEPS)
    values: dict[str, Any] = {
        "logits": logits,
        "positions": LENGTHS,
        "limits": np.full(B, STEPS, np.int32),
        "stop": np.full((B, 4), -1, np.int32),
        "slots": (slot(np.arange(B)[:, None], positions).astype(np.int32),),
        "tables": (whole_table(),),
        "sampling": SamplingInput(
            temperature=np.zeros(B, np.float32),
            top_k=np.zeros(B, np.int32),
            top_p=np.ones(B, np.float32),
            seed=np.arange(B, dtype=np.uint32),
        ),
    }
    return jaxkv.DecodeInput(**{**values, **changes})


@pytest.fixture(scope="module")
def greedy(decoder: Decoder) -> list[list[int]]:
    """What float64 says, without any cache."""
    return [decoder.greedy(p, STEPS) for p in prompts()]


def many(model: jaxkv.Model, copied: bool = False, **changes: Any) -> Any:
    pages, logits = prefilled(model)
    inputs = decode_input(logits, **changes)
    return jaxkv.decode_many(model.params, pages, inputs, config=model.config, copied=copied)


both_ways = pytest.mark.parametrize("copied", [False, True], ids=["paged", "copied"])


@both_ways
def test_decode_many_is_repeated_decode_is_float64_greedy(
    model: jaxkv.Model, greedy: list[list[int]], decoder: Decoder, copied: bool
) -> None:
    pages, logits = prefilled(model)
    tokens = []
    for i in range(STEPS):
        tokens.append(np.argmax(logits, -1))
        step = step_of(tokens[-1][:, None], (LENGTHS + i)[:, None], np.ones(B, int))
        pages, logits = jaxkv.decode(model.params, pages, step, config=model.config)
    out = many(model, copied)
    np.testing.assert_array_equal(out.tokens, np.stack(tokens, 1))
    np.testing.assert_array_equal(out.tokens, greedy)
    np.testing.assert_allclose(out.logits, logits, atol=2e-5)
    for b, prompt in enumerate(prompts()):
        exact = decoder.logits([*prompt, *greedy[b]])[-1]
        np.testing.assert_allclose(out.logits[b], exact, atol=tolerance("logits"))
    # Both ways wrote the same slots, and no others.
    np.testing.assert_allclose(out.pages[0].kv, pages[0].kv, atol=2e-5)
    assert out.counts.tolist() == [STEPS] * B
    assert not out.stopped.any()


@both_ways
def test_rows_stop_at_their_own_tokens_and_limits(
    model: jaxkv.Model, greedy: list[list[int]], decoder: Decoder, copied: bool
) -> None:
    stop = np.full((B, 4), -1, np.int32)
    stop[0, 2] = greedy[0][3]  # stops before its fourth token, unless drawn earlier
    stop[1, 0] = greedy[1][0]  # stops at once
    limits = np.array([STEPS, STEPS, 3, 0], np.int32)
    out = many(model, copied, stop=stop, limits=limits)
    first = greedy[0].index(greedy[0][3])
    assert out.counts.tolist() == [first, 0, 3, 0]
    assert out.stopped.tolist() == [True, True, False, False]
    for b, count in enumerate([first, 0, 3, 0]):
        assert out.tokens[b].tolist() == greedy[b][:count] + [-1] * (STEPS - count)
        exact = decoder.logits([*prompts()[b], *greedy[b][:count]])[-1]
        np.testing.assert_allclose(out.logits[b], exact, atol=tolerance("logits"))
    # A stop token is not written: its slot is still NaN, and so is the page that nobody owns.
    kv = np.asarray(out.pages[0].kv).reshape(model.config.num_layers, PAGES, 2, P, 32)
    unwritten = [slot(0, 5 + first), slot(1, 1), slot(2, 19), slot(3, 23)]
    for s in [*unwritten, (PAGES - 1) * P, PAGES * P - 1]:
        assert np.isnan(kv[:, s // P, :, s % P]).all()
    assert np.isfinite(kv[:, slot(2, 18) // P, :, slot(2, 18) % P]).all()


def test_sampling_in_the_loop_follows_seed_and_position(model: jaxkv.Model) -> None:
    hot = {
        "temperature": np.array([1, 1, 0, 1], np.float32),
        "top_k": np.zeros(B, np.int32),
        "top_p": np.ones(B, np.float32),
    }
    runs = [
        np.asarray(many(model, sampling=SamplingInput(seed=np.array(s, np.uint32), **hot)).tokens)
        for s in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 9, 9])
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0][[0, 2]], runs[2][[0, 2]])
    assert (runs[0][[1, 3]] != runs[2][[1, 3]]).any(1).all()


def test_pages_given_to_a_step_cannot_be_used_again(model: jaxkv.Model) -> None:
    """CASE 35."""
    pages = fresh_pages(model.config)
    step = step_of(np.zeros((B, 1)), np.zeros((B, 1)), np.ones(B, int))
    _, logits = jaxkv.prefill(model.params, pages, step, config=model.config)
    moves = jaxkv.Moves(
        source=np.zeros(64, np.int32), target=np.ones(64, np.int32), delta=np.zeros(64, np.int32)
    )
    for use in (
        lambda: jaxkv.prefill(model.params, pages, step, config=model.config),
        lambda: jaxkv.decode(model.params, pages, step, config=model.config),
        lambda: run_step(model.params, pages, step, config=model.config),
        lambda: jaxkv.decode_many(model.params, pages, decode_input(logits), config=model.config),
        lambda: jaxkv.relocate(pages, (moves,), config=model.config),
    ):
        with pytest.raises(jaxkv.HandleError, match="earlier step"):
            use()


# ---- relocate ------------------------------------------------------------------------------------

ROPES = {
    "default": jaxkv.RopeConfig(theta=10_000.0, rotary_dim=16),
    "partial": jaxkv.RopeConfig(theta=10_000.0, rotary_dim=8),
    "yarn": jaxkv.RopeConfig(
        theta=10_000.0,
        rotary_dim=16,
        scaling="yarn",
        factor=4.0,
        original_max_positions=64,
        magnitude=1.1386,
    ),
}


def random_pages(config: jaxkv.ModelConfig, dtype: str = "float32") -> jaxkv.KVPages:
    pages = jaxkv.make_pages(config, config.groups[0], num_pages=PAGES, page_size=P, dtype=dtype)
    value = np.random.default_rng(0).standard_normal(pages.kv.shape).astype(np.float32)
    stored = jnp.asarray(value, dtype)
    if stored.dtype != pages.kv.dtype:
        stored = jax.lax.bitcast_convert_type(stored, pages.kv.dtype)
    replaced: jaxkv.KVPages = pages.replace(kv=stored)
    return replaced


def by_slot(pages: jaxkv.KVPages) -> np.ndarray:
    """[L, slots, K, 2H], in the storage dtype."""
    kv = np.asarray(pages.kv)
    return kv.reshape(-1, PAGES, *kv.shape[1:]).swapaxes(2, 3).reshape(-1, PAGES * P, *kv.shape[1::2])


def some_moves() -> tuple[jaxkv.Moves, int]:
    rng = np.random.default_rng(1)
    n = 50
    slots = rng.permutation(PAGES * P)[: 2 * n]
    delta = np.concatenate([[0, 1, -1, 511, -511, 256, -256], rng.integers(-500, 500, n - 7)])
    padded = np.zeros((3, 64), np.int32)
    padded[1] = PAGES * P
    padded[:, :n] = slots[:n], slots[n:], delta
    return jaxkv.Moves(source=padded[0], target=padded[1], delta=padded[2]), n


@pytest.mark.parametrize("name", list(ROPES))
def test_relocate_equals_float64_and_touches_nothing_else(name: str) -> None:
    """CASES 18, 20, 28: one rounding; values, pass-through features and other slots bit by bit."""
    config = tiny_config(rope=ROPES[name])
    pages = random_pages(config)
    before = by_slot(pages)
    moves, n = some_moves()
    (moved,) = jaxkv.relocate((pages,), (moves,), config=config)
    after = by_slot(moved)
    source, target, delta = moves.source[:n], moves.target[:n], moves.delta[:n]
    for layer in range(config.num_layers):
        exact = reference.turn(before[layer, source, :, :16].astype(np.float64), delta, config.rope)
        np.testing.assert_allclose(
            after[layer, target, :, :16], exact, atol=tolerance("relocated_key"), rtol=0
        )
    rotary = config.rope.rotary_dim
    np.testing.assert_array_equal(after[:, target][..., rotary:], before[:, source][..., rotary:])
    others = np.setdiff1d(np.arange(PAGES * P), target)
    np.testing.assert_array_equal(after[:, others], before[:, others])
    # A rotation keeps the length of a key: YaRN's magnitude is not applied a second time.
    ratio = np.linalg.norm(after[:, target][..., :16], axis=-1) / np.linalg.norm(
        before[:, source][..., :16], axis=-1
    )
    np.testing.assert_allclose(ratio, 1, atol=tolerance("key_norm_ratio"))
    # By nothing: the same bits.
    np.testing.assert_array_equal(after[:, target[0]], before[:, source[0]])


def test_relocate_of_bfloat16_rounds_once() -> None:
    config = tiny_config()
    pages = random_pages(config, "bfloat16")
    source_values = np.asarray(decode_storage(pages.kv, pages)).astype(np.float64)
    n = PAGES
    source_values = source_values.reshape(-1, n, 2, P, 32).swapaxes(2, 3).reshape(-1, n * P, 2, 32)
    before = by_slot(pages)
    moves, count = some_moves()
    (moved,) = jaxkv.relocate((pages,), (moves,), config=config)
    after = np.asarray(decode_storage(moved.kv, moved)).astype(np.float64)
    after = after.reshape(-1, n, 2, P, 32).swapaxes(2, 3).reshape(-1, n * P, 2, 32)
    source, target, delta = (x[:count] for x in (moves.source, moves.target, moves.delta))
    exact = reference.turn(source_values[0, source, :, :16], delta, config.rope)
    # Half a unit in the last of 8 bits, and a hair for the float32 before it.
    assert (np.abs(after[0, target, :, :16] - exact) <= np.abs(exact) * 2.0**-8 * 1.01 + 1e-6).all()
    np.testing.assert_array_equal(by_slot(moved)[:, target][..., 16:], before[:, source][..., 16:])
