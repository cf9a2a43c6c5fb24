"""Paged = dense: any page size, chunking and fragmentation, judged by the float64 decoder.

Pages start as NaN, so a read of a slot that nobody wrote shows in the logits. The last page belongs to
nobody: what padding would hit first if it were not dropped.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Cached, Decoder
from tiny import VOCAB
from tolerances import tolerance

import jaxkv
from jaxkv.cache.pages import poison_pages
from jaxkv.steps import run_step

B, T = 3, 16
SLOTS = 512  # of the pool, whatever the page size
TOLERANCE = tolerance("logits")


class Pool:
    """Slots handed out in random runs: anywhere in a page, several runs a page, in any order."""

    def __init__(self, rng: np.random.Generator, page_size: int) -> None:
        runs = []
        for page in range(SLOTS // page_size - 1):  # the last page stays nobody's
            lo = int(rng.integers(0, page_size // 2))
            while lo < page_size:
                hi = min(lo + int(rng.integers(1, page_size + 1)), page_size)
                runs.append((page, lo, hi))
                lo = hi + int(rng.integers(0, 3))
        self.runs = [runs[i] for i in rng.permutation(len(runs))]

    def place(self, positions: np.ndarray) -> np.ndarray:
        """Segments i32[W, 4] for consecutive positions."""
        rows, at, end = [], int(positions[0]), int(positions[-1]) + 1
        while at < end:
            page, lo, hi = self.runs.pop()
            hi = min(hi, lo + end - at)
            rows.append((page, lo, hi, at - lo))
            at += hi - lo
        return np.array(rows, np.int32)


def slots_of(segments: np.ndarray, page_size: int) -> dict[int, int]:
    return {
        int(first + s): int(page * page_size + s) for page, lo, hi, first in segments for s in range(lo, hi)
    }


def table_of(
    rows: list[tuple[np.ndarray, np.ndarray]], page_size: int, max_deltas: int = 8
) -> jaxkv.PageTable:
    return jaxkv.build_table(rows, num_pages=SLOTS // page_size, page_size=page_size, max_deltas=max_deltas)


def poisoned_pages(config: jaxkv.ModelConfig, page_size: int) -> tuple[jaxkv.KVPages, ...]:
    pages = jaxkv.make_pages(config, config.groups[0], num_pages=SLOTS // page_size, page_size=page_size)
    return (poison_pages(pages, np.arange(SLOTS // page_size, dtype=np.int32)),)


def bits(pages: tuple[jaxkv.KVPages, ...], page_size: int) -> np.ndarray:
    """u32[L, slots, K, 2H]."""
    kv = np.asarray(pages[0].kv).view(np.uint32)
    n = SLOTS // page_size
    kv = kv.reshape(-1, n, *kv.shape[1:]).swapaxes(2, 3)
    return kv.reshape(kv.shape[0], SLOTS, *kv.shape[3:]).copy()


def padded_step(
    rng: np.random.Generator,
    tokens: list[np.ndarray],
    positions: list[np.ndarray],
    slots: list[list[int]],
    table: jaxkv.PageTable,
) -> jaxkv.StepInput:
    """A step whose padding holds garbage: any token, any position, only the slot says drop."""
    shape = (B, T)
    step = {
        "tokens": rng.integers(0, VOCAB, shape).astype(np.int32),
        "positions": rng.integers(0, 512, shape).astype(np.int32),
        "slots": np.full(shape, SLOTS, np.int32),
    }
    for b in range(B):
        n = len(tokens[b])
        step["tokens"][b, :n], step["positions"][b, :n] = tokens[b], positions[b]
        step["slots"][b, :n] = slots[b]
    return jaxkv.StepInput(
        tokens=step["tokens"],
        positions=step["positions"],
        lengths=np.array([len(t) for t in tokens], np.int32),
        groups=(jaxkv.GroupInput(slots=step["slots"], table=table),),
    )


@pytest.mark.parametrize("page_size", [8, 16, 64])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_chunking_and_fragmentation_equals_float64(
    model: jaxkv.Model, decoder: Decoder, page_size: int, seed: int
) -> None:
    """CASES 10, 11, 27, 28."""
    rng = np.random.default_rng(seed)
    pool, pages = Pool(rng, page_size), poisoned_pages(model.config, page_size)
    lengths = rng.integers(1, 50, B)
    tokens = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    segments = [pool.place(np.arange(n)) for n in lengths]
    slots = [slots_of(s, page_size) for s in segments]
    # The table of the whole text serves every chunk: later slots are NaN and hidden by causality.
    table = table_of([(s, np.zeros(len(s), np.int32)) for s in segments], page_size)
    exact = [decoder.logits(t) for t in tokens]
    done = np.zeros(B, int)
    while (done < lengths).any():
        counts = np.minimum(rng.integers(0, T + 1, B), lengths - done)
        # Within a step tokens may come in any order: positions say where they stand.
        at = [rng.permutation(np.arange(done[b], done[b] + counts[b])) for b in range(B)]
        where = [[slots[b][int(p)] for p in at[b]] for b in range(B)]
        step = padded_step(rng, [tokens[b][at[b]] for b in range(B)], at, where, table)
        before = bits(pages, page_size)
        out = run_step(model.params, pages, step, config=model.config, logits="all")
        pages = out.pages
        after = bits(pages, page_size)
        written = np.isin(np.arange(SLOTS), [s for row in where for s in row])
        np.testing.assert_array_equal(after[:, ~written], before[:, ~written])
        assert np.isfinite(after[:, written].view(np.float32)).all()
        for b in range(B):
            got = np.asarray(out.logits)[b, : counts[b]]
            np.testing.assert_allclose(got, exact[b][at[b]], atol=TOLERANCE, rtol=0)
        done += counts


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_any_relocation_seen_as_a_view_equals_float64(
    model: jaxkv.Model, decoder: Decoder, seed: int
) -> None:
    """Keys stay as born; runs stand anywhere else, forwards and backwards, some not at all."""
    rng, page_size = np.random.default_rng(seed), 8
    pool, pages = Pool(rng, page_size), poisoned_pages(model.config, page_size)
    lengths = rng.integers(20, T * 2 + 1, B)
    tokens = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    segments = [pool.place(np.arange(n)) for n in lengths]
    slots = [slots_of(s, page_size) for s in segments]
    table = table_of([(s, np.zeros(len(s), np.int32)) for s in segments], page_size)
    for start in (0, T):
        at = [np.arange(start, min(start + T, n)) for n in lengths]
        where = [[slots[b][int(p)] for p in at[b]] for b in range(B)]
        step = padded_step(rng, [tokens[b][at[b]] for b in range(B)], at, where, table)
        pages = run_step(model.params, pages, step, config=model.config, logits="all").pages

    rows, caches, asked, where = [], [], [], []
    for b in range(B):
        _, cached = decoder.run(tokens[b], np.arange(lengths[b]), decoder.empty())
        # Pieces of the text in another order, with gaps between them, at most seven deltas.
        cuts = np.sort(rng.choice(np.arange(1, lengths[b]), 3, replace=False))
        pieces = np.split(np.arange(lengths[b]), cuts)
        stand, parts, deltas, kept = 0, [], [], []
        for i in rng.permutation(4):
            stand += int(rng.integers(0, 40))
            piece, delta = pieces[i], stand - int(pieces[i][0])
            inside = [clip_rows(segments[b], int(piece[0]), int(piece[-1]) + 1)]
            moved = np.concatenate(inside)
            moved[:, 3] += delta
            parts.append(moved)
            deltas.append(np.full(len(moved), delta, np.int32))
            kept.append((piece, piece + delta))
            stand += len(piece)
        source = np.concatenate([k[0] for k in kept])
        stands = np.concatenate([k[1] for k in kept])
        caches.append(cached.take(source, stands))
        # New tokens in the gaps and behind everything.
        free = np.setdiff1d(np.arange(stand + 20), stands)
        asked.append(np.sort(rng.choice(free, min(9, len(free)), replace=False)))
        fresh = np.concatenate([pool.place(np.array([p])) for p in asked[b]])
        where.append([slots_of(fresh, page_size)[int(p)] for p in asked[b]])
        rows.append(
            (
                np.concatenate([*parts, fresh]),
                np.concatenate([*deltas, np.zeros(len(fresh), np.int32)]),
            )
        )
    new = [rng.integers(0, VOCAB, len(a)).astype(np.int32) for a in asked]
    step = padded_step(rng, new, asked, where, table_of(rows, page_size))
    before = bits(pages, page_size)
    out = run_step(model.params, pages, step, config=model.config, logits="all")
    after = bits(out.pages, page_size)
    written = np.isin(np.arange(SLOTS), [s for row in where for s in row])
    np.testing.assert_array_equal(after[:, ~written], before[:, ~written])
    for b in range(B):
        exact, _ = decoder.run(new[b], asked[b], caches[b])
        got = np.asarray(out.logits)[b, : len(new[b])]
        np.testing.assert_allclose(got, exact, atol=TOLERANCE, rtol=0)


def clip_rows(segments: np.ndarray, start: int, end: int) -> np.ndarray:
    """The part of position-sorted segments in start..end-1, by the plain definition."""
    rows = []
    for page, lo, hi, first in segments.tolist():
        a, b = max(lo, start - first), min(hi, end - first)
        if a < b:
            rows.append((page, a, b, first))
    return np.array(rows, np.int32).reshape(-1, 4)


def test_more_deltas_than_the_table_holds_is_refused() -> None:
    rows = np.array([(i, 0, 8, 100 * i) for i in range(9)], np.int32)
    with pytest.raises(jaxkv.CapacityError, match="max_deltas 8"):
        table_of([(rows, np.arange(9, dtype=np.int32) * 3)], 8)


def test_blocks_of_a_table_have_one_delta_and_lose_no_entry() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        n = int(rng.integers(0, 120))
        rows = np.stack([rng.permutation(128)[:n], np.zeros(n), np.full(n, 8), np.arange(n) * 8], 1)
        delta = rng.choice([0, -8, 5, 3000, -77], n).astype(np.int32)
        table = jaxkv.build_table([(rows.astype(np.int32), delta)], num_pages=128, page_size=8, max_deltas=8)
        block = table.page.shape[1] // table.delta_index.shape[1]
        seen = []
        for entry in np.flatnonzero(table.hi[0] > 0):
            value = table.deltas[0, table.delta_index[0, entry // block]]
            seen.append((table.page[0, entry], table.first[0, entry], value))
        assert sorted(seen) == sorted(zip(rows[:, 0], rows[:, 3], delta, strict=True))
        assert (table.page[0][table.hi[0] == 0] == 128).all()


@pytest.mark.parametrize("bad", [-1, 64, 10_000])
def test_a_page_id_outside_the_pool_is_rejected_on_the_host(bad: int) -> None:
    """CASE 27: reads clamp and writes drop on the device, so the host is where it must show."""
    rows = np.array([(bad, 0, 8, 0)], np.int32)
    with pytest.raises(jaxkv.JaxkvError, match=str(bad)):
        table_of([(rows, np.zeros(1, np.int32))], 8)


@pytest.mark.parametrize("bad", [-1, -8, SLOTS, SLOTS + 1, 2**30])
def test_a_write_to_a_slot_outside_the_pool_drops(model: jaxkv.Model, bad: int) -> None:
    """CASE 27: it must not land in another layer's pages or wrap around to the last one."""
    rng, page_size = np.random.default_rng(0), 8
    pages = poisoned_pages(model.config, page_size)
    before = bits(pages, page_size)
    rows = [(np.array([(0, 0, 8, 0)], np.int32), np.zeros(1, np.int32))] * B
    step = padded_step(
        rng, [np.zeros(1, np.int32)] * B, [np.zeros(1, int)] * B, [[bad]] * B, table_of(rows, 8)
    )
    out = run_step(model.params, pages, step, config=model.config, logits="all")
    np.testing.assert_array_equal(bits(out.pages, page_size), before)


def test_cached_reference_is_consistent_with_itself(decoder: Decoder) -> None:
    """The judge: running in parts, or moving everything by one distance, changes nothing."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 30)
    whole = decoder.logits(tokens)
    _, head = decoder.run(tokens[:17], np.arange(17), decoder.empty())
    tail, _ = decoder.run(tokens[17:], np.arange(17, 30), head)
    np.testing.assert_allclose(tail, whole[17:], atol=1e-10)
    moved: Cached = head.take(np.arange(17), np.arange(17) + 1000)
    far, _ = decoder.run(tokens[17:], np.arange(17, 30) + 1000, moved)
    np.testing.assert_allclose(far, whole[17:], atol=1e-9)
