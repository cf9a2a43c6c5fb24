"""Local layers with fewer pages than the pool: what is freed, what stays, what is refused, all exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge import ATOL, Judge
from reference import decoder_of
from tiny import PAGE_SIZE, make_model, tiny_config

import jaxkv
from jaxkv import SCR, Cause, Exact, FirstK
from jaxkv.cache.residency import Residency

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
WINDOW = 21
MIXED: dict[str, Any] = {
    "layer_types": ("local", "global"),
    "window": WINDOW,
    "rope_local": jaxkv.RopeConfig(theta=500.0, rotary_dim=16),
}
LOCAL_PAGES = 13  # a chunk of 16 and its window take 6 pages, and each live sequence's window 4


@pytest.fixture(scope="module")
def mixed() -> jaxkv.Model:
    return make_model(tiny_config(**MIXED))


@pytest.fixture(scope="module")
def judge(mixed: jaxkv.Model) -> Judge:
    return Judge(decoder_of(mixed.params, mixed.config))


@pytest.fixture
def bounded(make_engine: Engines, mixed: jaxkv.Model) -> jaxkv.Engine:
    """Free pages of every group are NaN, local ones that were taken from others included."""
    return make_engine(model=mixed, chunk_size=16, local_pages=LOCAL_PAGES)


def test_local_layers_hold_few_pages_and_logits_are_exact(
    bounded: jaxkv.Engine, judge: Judge, text: Text
) -> None:
    """A prompt of 240 tokens takes 30 pages of global layers and never more than 13 of local ones."""
    tokens = text(240)
    first = bounded.prefill(tokens[:200])
    np.testing.assert_allclose(first.logits, judge.prefill(tokens[:200]).logits, atol=ATOL)
    more = bounded.extend(first.sequence, tokens[200:])
    state = judge.prefill(tokens)
    np.testing.assert_allclose(more.logits, state.logits, atol=ATOL)
    np.testing.assert_allclose(
        bounded.score(more.sequence, text(9, seed=2)), judge.score(state, text(9, seed=2)), atol=ATOL
    )
    generated = bounded.generate(more.sequence, max_tokens=40)
    assert generated.tokens.tolist() == judge.greedy(state, 40)
    stats = bounded.stats()
    assert stats["pages_live"] >= 30
    assert stats["local_pages_total"] == LOCAL_PAGES
    assert stats["local_pages_evicted"] > 10
    # Keys and values of two heads of 16 floats, for each slot that is not there.
    assert stats["local_bytes_saved"] == (64 - LOCAL_PAGES) * PAGE_SIZE * 2 * 2 * 16 * 4
    bounded.check()


def test_bounded_and_unbounded_engines_agree_bit_for_bit(
    make_engine: Engines, mixed: jaxkv.Model, text: Text
) -> None:
    """Blocks that a window does not reach add exactly nothing, whether they are there or not."""
    results = []
    for local in (None, LOCAL_PAGES):
        engine = make_engine(model=mixed, chunk_size=16, local_pages=local, reuse_granularity="chunk")
        first = engine.prefill(text(150))
        again = engine.prefill(np.concatenate([text(150)[:140], text(30, seed=1)]))
        results.append([np.asarray(r.logits) for r in (first, again)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_prefix_is_resumed_where_the_last_window_is_held(
    bounded: jaxkv.Engine, judge: Judge, text: Text
) -> None:
    tokens = text(180)
    first = bounded.prefill(tokens)
    grown = np.concatenate([tokens, text(20, seed=3)])
    warm = bounded.prefill(grown)
    assert warm.reuse.matched == 180, "hits need no more than the last window"
    np.testing.assert_allclose(warm.logits, judge.prefill(grown).logits, atol=ATOL)
    # In the middle the window was freed: the hit is cut back to where one is held, here to nothing.
    branch = np.concatenate([tokens[:90], text(20, seed=4)])
    other = bounded.prefill(branch)
    assert other.reuse.match_end.cause is Cause.WINDOW
    assert other.reuse.matched < 90
    np.testing.assert_allclose(other.logits, judge.prefill(branch).logits, atol=ATOL)
    whole = bounded.prefill(tokens)
    assert whole.reuse.forwarded == 1
    np.testing.assert_allclose(whole.logits, first.logits, atol=ATOL)


def test_an_edit_computes_again_what_its_seam_needs(bounded: jaxkv.Engine, judge: Judge, text: Text) -> None:
    """KV of global layers is reused behind the seam; before it, the prefix whose window is gone is not."""
    old = text(160)
    first, state = bounded.prefill(old), judge.prefill(old)
    for tokens, policy in (
        (np.concatenate([old[:60], old[70:]]), SCR(min_span=8, tail=4)),
        (np.concatenate([old[:60], text(5, seed=1), old[60:]]), SCR(min_span=8, tail=4) | FirstK(6)),
        (np.concatenate([old[:158], text(5, seed=1)]), Exact()),
    ):
        result = bounded.edit(first.sequence, tokens, policy)
        logits = np.asarray(result.logits)
        if isinstance(policy, Exact):
            assert result.reuse.matched == 158
            expected = judge.prefill(tokens).logits
        else:
            causes = result.reuse.ledger.forwarded_by_cause
            assert causes["resumed"] == 60
            assert result.reuse.relocated >= 80
            expected = follow(judge, old, tokens, result)
        np.testing.assert_allclose(logits, expected, atol=ATOL)
        healed = bounded.heal(result.sequence, tokens=500)
        assert healed.sequence.exact
        np.testing.assert_allclose(healed.logits, judge.prefill(tokens).logits, atol=ATOL)
        bounded.release(healed.sequence)
        bounded.release(result.sequence)
    assert len(state.tokens) == 160


def follow(judge: Judge, old: np.ndarray, tokens: np.ndarray, result: jaxkv.StepResult) -> np.ndarray:
    """The edit in float64, with the common prefix computed anew."""
    source = judge.prefill(old)
    (span,) = result.reuse.spans
    origins = [str(run.origin) for run in result.sequence.provenance for _ in range(run.start, run.end)]
    kept = np.array([p for p, origin in enumerate(origins) if origin == "relocated"])
    forward = np.array([p for p, origin in enumerate(origins) if origin != "relocated"])
    cached = source.cached.take(kept - span.delta, kept)
    return np.asarray(judge.decoder.run(tokens[forward], forward, cached)[0][-1])


def test_what_needs_freed_kv_is_refused_by_name_and_changes_nothing(
    bounded: jaxkv.Engine, text: Text
) -> None:
    old = text(240)
    first = bounded.prefill(old).sequence
    before = bounded.stats()
    moved = np.concatenate([old[120:], text(5, seed=1), old[:120]])
    with pytest.raises(jaxkv.CapacityError, match="local layers no longer hold, expected local_pages"):
        bounded.edit(first, moved, SCR(min_span=8, tail=4))
    with pytest.raises(jaxkv.ConfigError, match="copying KV between slots needs the KV of every layer"):
        bounded.edit(first, old[5:], SCR(form="copy", min_span=8, tail=4))
    for call in (bounded.save_cache, bounded.load_cache):
        with pytest.raises(jaxkv.ConfigError, match="a saved cache needs the KV of every layer"):
            call("nowhere")
    after = bounded.stats()
    assert {k: after[k] for k in ("pages_live", "pages_free", "sequences")} == {
        k: before[k] for k in ("pages_live", "pages_free", "sequences")
    }
    kv = bounded.read_kv(first)
    assert np.isnan(kv.keys[0, :100]).all(), "what is freed reads as nothing"
    assert np.isfinite(kv.keys[1]).all()
    assert np.isfinite(kv.keys[:, -WINDOW:]).all()


def test_live_windows_are_never_taken(bounded: jaxkv.Engine, judge: Judge, text: Text) -> None:
    """Each live sequence keeps its last window; when no more fit, a new one is refused and others stay."""
    sequences = [bounded.prefill(text(60, seed=s)).sequence for s in range(2)]

    def fill() -> None:
        sequences.extend(bounded.prefill(text(60, seed=s)).sequence for s in range(2, 9))

    with pytest.raises(jaxkv.CapacityError, match="pages of local layers are needed"):
        fill()
    out = [bounded.generate(sequence, max_tokens=3) for sequence in sequences[:2]]
    for s, generation in enumerate(out):
        assert generation.tokens.tolist() == judge.greedy(judge.prefill(text(60, seed=s)), 3)
        bounded.release(generation.sequence)
    for sequence in sequences:
        bounded.release(sequence)
    last = bounded.prefill(text(60, seed=11))
    np.testing.assert_allclose(last.logits, judge.prefill(text(60, seed=11)).logits, atol=ATOL)


def test_requests_are_served_over_bounded_pages(bounded: jaxkv.Engine, judge: Judge, text: Text) -> None:
    requests = [bounded.submit(text(50, seed=s), max_tokens=6) for s in range(2)]
    results = {result.request.id: result for result in bounded.run()}
    for s, request in enumerate(requests):
        expected = judge.greedy(judge.prefill(text(50, seed=s)), 6)
        assert results[request.id].tokens.tolist() == expected


def test_a_random_life_is_exact_throughout(bounded: jaxkv.Engine, judge: Judge, text: Text) -> None:
    """Prompts that branch, texts that grow, edits, releases: whatever is exact is, and nothing leaks."""
    rng = np.random.default_rng(5)
    live: list[jaxkv.Sequence] = []
    done = {"prefill": 0, "extend": 0, "edit": 0, "refused": 0}
    for number in range(60):
        if len(live) == 2:
            bounded.release(live.pop(int(rng.integers(len(live)))))
        source = live[int(rng.integers(len(live)))] if live else None
        kind = "prefill" if source is None else str(rng.choice(["prefill", "extend", "edit"]))
        try:
            if kind == "prefill" or source is None:
                cut = int(rng.integers(1, 110))
                tokens = np.concatenate([text(110, seed=int(rng.integers(2)))[:cut], text(6, seed=number)])
                result = bounded.prefill(tokens)
            elif kind == "extend":
                tokens = text(int(rng.integers(1, 20)), seed=number)
                result = bounded.extend(source, tokens)
            else:
                cut = int(rng.integers(0, max(len(source) - 12, 1)))
                tokens = np.concatenate([source.tokens[:cut], text(3, seed=number), source.tokens[cut + 5 :]])
                result = bounded.edit(source, tokens, SCR(min_span=8, tail=4) if number % 2 else Exact())
        except jaxkv.CapacityError:
            done["refused"] += 1
            continue
        finally:
            bounded.check()
        done[kind] += 1
        assert np.isfinite(result.logits).all()
        if result.sequence.exact:
            exact = judge.prefill(result.sequence.tokens).logits
            np.testing.assert_allclose(result.logits, exact, atol=ATOL)
        live.append(result.sequence)
    assert min(done["prefill"], done["extend"], done["edit"]) >= 5
    assert done["refused"] < 20


def test_lost_pages_are_made_anew_in_every_group(bounded: jaxkv.Engine, judge: Judge, text: Text) -> None:
    first = bounded.prefill(text(60)).sequence
    for group in bounded._memory.pages:
        group.kv.delete()
    with pytest.raises(jaxkv.HandleError):
        bounded.extend(first, [1])
    again = bounded.prefill(text(60))
    assert again.reuse.matched == 0
    np.testing.assert_allclose(again.logits, judge.prefill(text(60)).logits, atol=ATOL)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"local_pages": 7},
            "local_pages is 7, expected a whole number of at least 8: a window of 21 and 32",
        ),
        ({"local_pages": True}, "local_pages is True"),
        ({"local_pages": 8, "host_tier_bytes": 2**20}, "a host or disk tier needs the KV of every layer"),
        (
            {"local_pages": 8, "num_pages": None, "capacity_bytes": 100},
            "capacity_bytes is 100, expected more than the 16384 of 8 local pages",
        ),
    ],
)
def test_bounds_that_are_refused(
    make_engine: Engines, mixed: jaxkv.Model, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(jaxkv.ConfigError, match=match):
        make_engine(model=mixed, **changes)


def test_a_model_without_local_layers_takes_no_bound(make_engine: Engines) -> None:
    with pytest.raises(jaxkv.ConfigError, match="local_pages is 8, expected None: the model has no local"):
        make_engine(local_pages=8)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_residency_keeps_its_promises(data: st.DataObject) -> None:
    """Held pages are where the map says; what must stay stays; the least recently used go first."""
    capacity, logical = 5, 12
    held = Residency(logical, capacity, page_size=4, window=6)
    for _ in range(data.draw(st.integers(1, 15))):
        pages = np.unique(data.draw(st.lists(st.integers(0, logical - 1), min_size=1, max_size=3)))
        keep = np.unique(data.draw(st.lists(st.integers(0, logical - 1), max_size=2))).astype(np.int32)
        keep = keep[held.held(keep)]
        before = held.where.copy()
        zero = np.zeros(len(pages), np.int32)
        try:
            held.hold(pages.astype(np.int32), zero, keep, [keep])
        except jaxkv.CapacityError:
            np.testing.assert_array_equal(held.where, before)
            continue
        assert held.held(pages.astype(np.int32)).all()
        assert held.held(keep).all()
        held.check(np.arange(logical, dtype=np.int32))
        if data.draw(st.booleans()):
            gone = np.unique(data.draw(st.lists(st.integers(0, logical - 1), max_size=3))).astype(np.int32)
            held.drop(gone)
            assert not held.held(gone).any()


@settings(max_examples=100, deadline=None)
@given(
    out=st.lists(st.booleans(), min_size=1, max_size=12),
    cut=st.integers(0, 3),
    window=st.integers(1, 20),
    grid=st.sampled_from([1, 4, 8]),
)
def test_the_resume_point_is_the_deepest_that_a_loop_finds(
    out: list[bool], cut: int, window: int, grid: int
) -> None:
    size, count = 4, len(out)
    held = Residency(count, count, page_size=size, window=window, grid=grid)
    pages = np.flatnonzero(~np.array(out)).astype(np.int32)
    held.hold(pages, np.zeros(len(pages), np.int32), pages, [])
    length = (count * size - cut) // grid * grid
    first = np.arange(0, length, size, dtype=np.int32)
    segments = np.stack([first // size, 0 * first, np.minimum(length - first, size), first], 1)
    there = np.repeat(~np.array(out), size)[:length]
    good = [at for at in range(0, length + 1) if at % grid == 0 and there[max(at - window, 0) : at].all()]
    assert held.resume_point(segments.astype(np.int32), length) == max(good)
