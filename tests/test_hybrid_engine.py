"""An engine over a hybrid: exact against float64, resumed at snapshots that are where they say they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_reference import hybrid_logits
from tiny import NUM_PAGES, PAGE_SIZE, sharp_params
from tiny_hybrid import CHUNK, hybrid_config, hybrid_model
from tolerances import tolerance

import jaxkv
from jaxkv.cache.states import read_states
from jaxkv.carry import breaks

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


def snapshots(engine: jaxkv.Engine) -> dict[int, int]:
    """Slots by position: of one text."""
    states = engine._memory.states
    assert states is not None
    found = sorted((s.position, s.slot) for s in states.snapshots._all.values())
    assert len(dict(found)) == len(found)
    return dict(found)


def content(engine: jaxkv.Engine, slot: int) -> list[tuple[np.ndarray, np.ndarray]]:
    pool = engine._memory.pages[-1]
    layers = pool.state.shape[0] // pool.num_slots
    read = [read_states(pool, layer, jnp.array([slot], jnp.int32)) for layer in range(layers)]
    return [(np.asarray(conv[0]), np.asarray(state[0])) for conv, state, _ in read]


def test_prefill_extend_score_and_generate_equal_float64(make: Make, hybrid: jaxkv.Model, text: Any) -> None:
    engine, tokens = make(), text(75)
    expected, _ = hybrid_logits(hybrid.params, hybrid.config, tokens)
    result = engine.prefill(tokens[:1])
    at = 1
    for count in (1, 7, 1, 20, 33):  # odd chunks and single tokens
        result = engine.extend(result.sequence, tokens[at : at + count])
        at += count
        np.testing.assert_allclose(result.logits, expected[at - 1], atol=tolerance("logits"), rtol=0)
    assert result.reuse.kind == "exact"
    scored = engine.score(result.sequence, tokens[at:])
    np.testing.assert_allclose(scored, expected[at - 1 : -1], atol=tolerance("logits"), rtol=0)
    drawn = engine.generate(result.sequence, max_tokens=40, stop=()).tokens
    whole = np.concatenate([tokens[:at], drawn])
    greedy = hybrid_logits(hybrid.params, hybrid.config, whole)[0].argmax(-1)
    np.testing.assert_array_equal(drawn, greedy[at - 1 : -1])


def test_rows_of_a_batch_do_not_mix_and_sources_stay(make: Make, hybrid: jaxkv.Model, text: Any) -> None:
    engine = make()
    rows = [engine.prefill(text(n, seed=n)).sequence for n in (5, 40, 17)]
    before = [content(engine, row.state) for row in rows]
    together = engine.generate_batch(rows, max_tokens=9)
    for row, result, old in zip(rows, together, before, strict=True):
        alone = engine.generate(row, max_tokens=9)
        np.testing.assert_array_equal(result.tokens, alone.tokens)
        for (conv, state), (now, after) in zip(old, content(engine, row.state), strict=True):
            np.testing.assert_array_equal(conv, now)  # a state that somebody holds is never written again
            np.testing.assert_array_equal(state, after)
    again = engine.extend(engine.fork(together[0].sequence), text(3)).sequence
    expected = hybrid_logits(hybrid.params, hybrid.config, again.tokens)[0][-1]
    np.testing.assert_allclose(again.logits, expected, atol=tolerance("logits"), rtol=0)


def test_a_generation_that_stops_at_once_keeps_its_source_state(make: Make, text: Any) -> None:
    engine = make()
    sequence = engine.prefill(text(20)).sequence
    first = int(np.asarray(sequence.logits).argmax())
    result = engine.generate(sequence, max_tokens=5, stop=(first,))
    assert not len(result.tokens)
    assert result.sequence.state == sequence.state
    engine.release(sequence)
    longer = engine.generate(result.sequence, max_tokens=3, stop=())
    np.testing.assert_array_equal(longer.tokens[:1], [first])


@pytest.mark.parametrize("length", [EVERY - 1, EVERY, EVERY + 1, 2 * EVERY + 1, 71])
def test_a_snapshot_is_at_exactly_its_token(make: Make, hybrid: jaxkv.Model, text: Any, length: int) -> None:
    """CASE 36: prompts of 0, 1 and -1 modulo the interval; chunks that are no divisor of it."""
    engine = make(snapshot_every=24)
    tokens = text(length)
    engine.prefill(tokens)
    found = snapshots(engine)
    assert sorted(found) == sorted({*range(24, length, 24), length})
    for position, slot in found.items():
        _, states = hybrid_logits(hybrid.params, hybrid.config, tokens[:position])
        for (before, state), (conv, kept) in zip(states, content(engine, slot), strict=True):
            np.testing.assert_allclose(conv.T, before, atol=tolerance("logits"), rtol=0)
            np.testing.assert_allclose(kept, state, atol=tolerance("logits"), rtol=0)


def test_requests_of_different_offsets_in_one_loop(make: Make, hybrid: jaxkv.Model, text: Any) -> None:
    """CASE 36: prompts prefilled in one round at different offsets, then decoded together."""
    engine = make(serving=jaxkv.ServingConfig(prefill_budget=128))
    prompts = [text(45, seed=1), text(9, seed=2), np.concatenate([text(45, seed=1)[:40], text(7, seed=3)])]
    asked = [engine.submit(p, max_tokens=6, sampling=jaxkv.Sampling()) for p in prompts]
    answers = {r.request.id: r.tokens for r in engine.run()}
    for prompt, request in zip(prompts, asked, strict=True):
        whole = np.concatenate([prompt, answers[request.id]])
        greedy = hybrid_logits(hybrid.params, hybrid.config, whole)[0].argmax(-1)
        np.testing.assert_array_equal(answers[request.id], greedy[len(prompt) - 1 : -1])
    engine.check()
    assert engine.stats()["sequences"] == 0


def test_a_match_resumes_at_the_deepest_snapshot_and_replays(
    make: Make, hybrid: jaxkv.Model, text: Any
) -> None:
    engine, tokens = make(), text(75)
    engine.prefill(tokens)
    free = engine.stats()["pages_free"]
    again = engine.prefill(tokens)  # the last token's logits are needed: the state behind it is too deep
    assert (again.reuse.matched, again.reuse.forwarded) == (64, 11)
    assert again.reuse.ledger.forwarded_by_cause == {"last": 1, "replayed": 10}
    assert engine.stats()["pages_free"] == free  # nothing was written twice
    other = tokens.copy()
    other[50:] = (other[50:] + 1) % hybrid.config.vocab_size
    second = engine.prefill(other)
    assert (second.reuse.matched, second.reuse.match_end.position) == (32, 50)
    third = other.copy()
    third[50:] = (third[50:] + 1) % hybrid.config.vocab_size
    last = engine.prefill(third)  # the branch point was seen twice: there is a snapshot now
    assert (last.reuse.matched, last.reuse.forwarded) == (50, 25)
    for result, prompt in ((again, tokens), (second, other), (last, third)):
        expected = hybrid_logits(hybrid.params, hybrid.config, prompt)[0][-1]
        np.testing.assert_allclose(result.logits, expected, atol=tolerance("logits"), rtol=0)


def test_a_longer_prompt_resumes_where_the_request_before_ended(make: Make, text: Any) -> None:
    engine, tokens = make(), text(90)
    first = engine.prefill(tokens[:41])
    reply = engine.generate(first.sequence, max_tokens=6, stop=()).tokens
    turn = np.concatenate([tokens[:41], reply, tokens[41:60]])
    result = engine.prefill(turn)
    assert result.reuse.matched == 47
    assert result.reuse.forwarded == 19


def test_an_edit_resumes_at_the_nearest_snapshot_before_it(
    make: Make, hybrid: jaxkv.Model, text: Any
) -> None:
    """CASE 39."""
    engine, tokens = make(), text(110)
    source = engine.prefill(tokens).sequence
    edited = np.delete(tokens, slice(70, 80))
    result = engine.edit(source, edited, jaxkv.Exact())
    assert (result.reuse.kind, result.reuse.matched) == ("exact", 64)
    assert result.reuse.ledger.forwarded_by_cause == {"inserted": 30, "replayed": 6}
    expected = hybrid_logits(hybrid.params, hybrid.config, edited)[0][-1]
    np.testing.assert_allclose(result.logits, expected, atol=tolerance("logits"), rtol=0)
    appended = engine.edit(source, np.concatenate([tokens, tokens[:5]]), jaxkv.Exact())
    assert (appended.reuse.matched, appended.reuse.forwarded) == (110, 5)  # its own state is the nearest
    early = engine.edit(source, np.delete(tokens, 3), jaxkv.Exact())
    assert (early.reuse.matched, early.reuse.forwarded) == (0, 109)
    same = engine.edit(source, tokens, jaxkv.Exact())
    np.testing.assert_allclose(same.logits, source.logits, atol=tolerance("logits"), rtol=0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16], ids=["bfloat16"])
def test_cold_equals_warm_bit_for_bit_on_the_chunk_grid(make: Make, text: Any, dtype: Any) -> None:
    """CASE 37: what is saved has the dtype of what the cold path goes on with, convolution inputs too."""
    config = hybrid_config(num_layers=2, layer_types=("recurrent", "global"))
    params = sharp_params(config, dtype=dtype)
    name = jnp.dtype(dtype).name
    model = jaxkv.Model(
        config=config, params=params, tokenizer=None, name="tiny", dtype=name,
        weights_digest=jaxkv.params_digest(params), source="random",
    )  # fmt: skip
    engine = make(model=model, reuse_granularity="chunk")
    pool = engine._memory.pages[-1]
    assert (pool.dtype, pool.state.dtype) == (name, jnp.float32)
    tokens = text(101)
    cold = engine.prefill(tokens, reuse=False)
    engine.prefill(np.concatenate([tokens[:70], text(9, seed=4)]))
    warm = engine.prefill(tokens)
    assert warm.reuse.matched == 64
    np.testing.assert_array_equal(np.asarray(cold.logits), np.asarray(warm.logits))
    drawn = [engine.generate(r.sequence, max_tokens=12, stop=()) for r in (cold, warm)]
    np.testing.assert_array_equal(drawn[0].tokens, drawn[1].tokens)
    np.testing.assert_array_equal(*(np.asarray(g.sequence.logits) for g in drawn))


def test_a_snapshot_pins_its_slot_and_nothing_else(make: Make, text: Any) -> None:
    """CASE 38: the pool is all the memory of states there is, and accounting says how much."""
    engine = make()
    before = sum(a.nbytes for a in jax.live_arrays())
    sequences = [engine.prefill(text(70, seed=s)).sequence for s in range(3)]
    for sequence in sequences:
        engine.release(sequence)
    del sequences, sequence
    stats = engine.stats()
    assert stats["snapshots"] == 9
    assert stats["states_free"] == stats["states_total"] - 9
    pool = engine._memory.pages[-1]
    assert pool.nbytes == stats["states_total"] * stats["state_bytes"]
    assert stats["state_bytes"] == engine.config.state_bytes(4)
    # Nothing but the pool outlives the calls: no chunk's activations, no parent buffer of a state.
    assert sum(a.nbytes for a in jax.live_arrays()) == before
    engine.forget_domain("default")
    stats = engine.stats()
    assert (stats["snapshots"], stats["states_free"]) == (0, stats["states_total"])
    assert stats["pages_free"] == stats["pages_total"]


def test_snapshots_make_way_for_running_sequences(make: Make, text: Any) -> None:
    """One slot a sequence: what only the index holds goes first, and what is in use never does."""
    engine = make()
    engine.release(engine.prefill(text(96)).sequence)
    assert sorted(snapshots(engine)) == [32, 64, 96]
    held = [engine.prefill(np.array([token])).sequence for token in range(16)]
    stats = engine.stats()
    assert (stats["snapshots_evicted"], stats["states_free"], stats["snapshots"]) == (3, 0, 16)
    free = stats["pages_free"]
    for call in (lambda: engine.prefill([20]), lambda: engine.generate(held[0], max_tokens=2, stop=())):
        with pytest.raises(jaxkv.CapacityError, match=r"all 16 states are in use.*num_states"):
            call()
        engine.check()
    assert engine.stats()["pages_free"] == free
    engine.release(held.pop())
    assert len(engine.generate(held[0], max_tokens=2, stop=()).tokens) == 2


def test_few_slots_keep_few_snapshots_of_one_prompt() -> None:
    assert breaks(0, 100, every=32, grid=1, most=4) == (32, 64, 96, 100)
    assert breaks(40, 100, every=32, grid=1, most=4, points=(50,)) == (50, 64, 96, 100)
    assert breaks(0, 1000, every=32, grid=1, most=4) == (256, 512, 768, 1000)
    assert breaks(0, 100, every=32, grid=16, most=4, points=(50,)) == (32, 64, 96, 100)
    assert breaks(99, 100, every=32, grid=16, most=4) == (100,)


def test_a_snapshot_is_worth_the_replay_that_it_saves() -> None:
    from jaxkv.cache.snapshots import Candidate, Snapshots, StateSlots, before

    index = jaxkv.PrefixIndex(pool := jaxkv.PagePool(32, 8), snapshots=Snapshots(StateSlots(8), 1000))
    store = index.snapshots
    assert store is not None
    tokens = np.arange(64, dtype=np.int32)
    pages = pool.allocate(np.arange(0, 64, 8))
    pool.fill(pages, 8)
    rows = np.stack([pages, np.zeros(8), np.full(8, 8), np.arange(0, 64, 8)], 1).astype(np.int32)
    index.insert(b"r", tokens, rows)
    slots = [store.slots.allocate() for _ in range(3)]
    index.keep_states(b"r", tokens, list(zip((20, 24, 60), slots, strict=True)))
    policy = jaxkv.CostPerByte(token_flops=1.0, attention_flops=0.0)
    kept = {s.position: s for s in store._all.values()}
    assert [before(kept[p]) for p in (20, 24, 60)] == [0, 20, 24]
    worth = {p: policy.key(Candidate(s, 1000), 1)[0] for p, s in kept.items()}
    assert worth == pytest.approx({20: 0.020, 24: 0.004, 60: 0.036})
    for slot in slots:
        store.slots.release(slot)
    assert store.evict(1, policy) == 1
    assert sorted(s.position for s in store._all.values()) == [20, 60]
    index.check()
    match = index.match(b"r", np.append(tokens[:40], 90).astype(np.int32))
    assert (match.length, match.resume) == (40, 20)
    assert store.slots.refcount[match.state] == 2
    store.slots.release(match.state)
    pool.release(match.pages)
    freed = index.drop(b"r")
    assert not len(store)
    assert store.slots.free_count == 8
    assert not len(freed)  # the test's own references


def test_what_hybrids_do_not_have_is_refused_in_a_sentence(make: Make, text: Any) -> None:
    engine = make()
    sequence = engine.prefill(text(20)).sequence
    probing = jaxkv.SCR(min_span=4) | jaxkv.TopDeviation()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("quota_bytes is 99, expected at least", lambda: engine.set_quota("a", 99)),
        ("an error estimate", lambda: engine.signals(sequence, engine.prefill(text(21)))),
        ("the probe Deviation", lambda: engine.edit(sequence, text(20)[1:], probing)),
        ("num_states is 1", lambda: make(num_states=1)),
        ("snapshot_every is 24", lambda: make(snapshot_every=24, reuse_granularity="chunk")),
    ]
    for message, call in calls:
        with pytest.raises(jaxkv.ConfigError, match=message) as error:
            call()
        assert "expected" in str(error.value)
        assert str(error.value).count("\n") == 0


def test_plain_models_have_no_states(make_engine: Make) -> None:
    with pytest.raises(jaxkv.ConfigError, match="num_states is 4, expected None"):
        make_engine(num_states=4)
    assert "snapshots" not in make_engine().stats()


def test_a_prompt_with_an_image_is_refused(make: Make) -> None:
    engine = make(model=hybrid_model(image_token_ids=(90, 91)))
    with pytest.raises(jaxkv.TokenError, match=r"tokens\[2\] is 91, which stands for an image"):
        engine.prefill([1, 2, 91])


def test_a_lost_pool_leaves_no_state_behind(make: Make, hybrid: jaxkv.Model, text: Any) -> None:
    """As after a step that failed with its pages donated: everything is released, and the engine goes on."""
    engine = make()
    sequence = engine.prefill(text(20)).sequence
    jax.tree.map(lambda leaf: leaf.delete(), engine._memory.pages[-1])
    with pytest.raises(jaxkv.HandleError, match="was released"):
        engine.extend(sequence, text(1))
    stats = engine.stats()
    assert (stats["snapshots"], stats["states_free"]) == (0, stats["states_total"])
    again = engine.prefill(text(20))
    expected = hybrid_logits(hybrid.params, hybrid.config, text(20))[0][-1]
    np.testing.assert_allclose(again.logits, expected, atol=tolerance("logits"), rtol=0)


def test_an_interrupted_call_keeps_the_states_of_live_sequences(make: Make, text: Any) -> None:
    engine = make()
    sequence = engine.prefill(text(20)).sequence
    before = content(engine, sequence.state)
    engine._memory.interrupted = True  # what Ctrl-C leaves
    engine.check()
    assert engine.stats()["snapshots"] == 0  # only what was handed out is certain
    assert engine.stats()["states_free"] == engine.stats()["states_total"] - 1
    for (conv, state), (now, after) in zip(before, content(engine, sequence.state), strict=True):
        np.testing.assert_array_equal(conv, now)
        np.testing.assert_array_equal(state, after)
