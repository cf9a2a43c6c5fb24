"""The kernels' definition against float64 loops, and the engine's blocked form against the definition."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import tolerance

import pallas_kernels
from jaxkv.cache.pages import KVPages
from jaxkv.cache.table import PageTable
from jaxkv.model.attention import paged_attention, visibility

KV_HEADS, GROUP, HEAD, SIZE = 3, 2, 8, 4


def _case(rng: np.random.Generator, *, length: int, deltas: int, batch: int = 2):
    """Random tables: pages in any order, holes, partial pages, several deltas, empty entries."""
    block, blocks, rows = 4, 3, 40
    entries = block * blocks
    page = np.stack([rng.permutation(rows)[:entries] for _ in range(batch)]).astype(np.int32)
    lo = rng.integers(0, SIZE, (batch, entries)).astype(np.int32)
    hi = rng.integers(0, SIZE + 1, (batch, entries)).astype(np.int32)
    first = rng.integers(0, 60, (batch, entries)).astype(np.int32)
    index = rng.integers(0, deltas, (batch, blocks)).astype(np.int32)
    q = rng.standard_normal((batch, deltas, length, KV_HEADS, GROUP, HEAD), np.float32)
    kv = rng.standard_normal((rows, KV_HEADS, SIZE, 2 * HEAD), np.float32)
    positions = rng.integers(0, 70, (batch, length)).astype(np.int32)
    return q, kv, page, first, lo, hi, index, positions


def _by_loops(q, kv, page, first, lo, hi, index, positions):
    batch, _, length = q.shape[:3]
    block = page.shape[1] // index.shape[1]
    out = np.zeros((batch, length, KV_HEADS, GROUP, HEAD))
    for b, t, k, g in np.ndindex(batch, length, KV_HEADS, GROUP):
        scores, values = [], []
        for m in range(page.shape[1]):
            query = q[b, index[b, m // block], t, k, g].astype(np.float64)
            for s in range(lo[b, m], hi[b, m]):
                if first[b, m] + s <= positions[b, t]:
                    row = kv[page[b, m], k, s].astype(np.float64)
                    scores.append(query @ row[:HEAD])
                    values.append(row[HEAD:])
        if scores:
            weights = np.exp(np.array(scores) - max(scores))
            out[b, t, k, g] = weights @ np.array(values) / weights.sum()
    return out


@pytest.mark.parametrize(("length", "deltas"), [(1, 1), (3, 3), (17, 2)])
def test_paged_attention_is_softmax_over_the_slots_a_query_sees(length: int, deltas: int) -> None:
    case = _case(np.random.default_rng(length), length=length, deltas=deltas)
    expected = _by_loops(*case)
    np.testing.assert_allclose(pallas_kernels.paged_attention(*case), expected, atol=tolerance("attention"))


@pytest.mark.parametrize(("length", "deltas"), [(1, 1), (3, 3), (17, 2)])
def test_blocked_attention_equals_the_definition(length: int, deltas: int) -> None:
    case = _case(np.random.default_rng(100 + length), length=length, deltas=deltas)
    q, kv, page, first, lo, hi, index, positions = case
    expected = np.asarray(pallas_kernels.paged_attention(*case))
    pages = KVPages(kv=jnp.asarray(kv), num_pages=len(kv), dtype="float32")
    table = PageTable(
        page=jnp.asarray(page),
        first=jnp.asarray(first),
        lo=jnp.asarray(lo),
        hi=jnp.asarray(hi),
        delta_index=jnp.asarray(index),
        deltas=jnp.zeros((2, deltas), jnp.int32),
    )
    lengths = jnp.full((2,), length, jnp.int32)
    seen = visibility(table, jnp.asarray(positions), lengths, SIZE)
    found = paged_attention(jnp.asarray(q), pages, table, seen, jnp.asarray(positions), layer=0)
    np.testing.assert_allclose(found, expected, atol=tolerance("attention"))


def test_append_writes_its_slots_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((6, KV_HEADS, SIZE, 2 * HEAD), np.float32)
    new = rng.standard_normal((2, 3, KV_HEADS, HEAD), np.float32)
    row, slot = np.array([4, 1, 6], np.int32), np.array([3, 0, 2], np.int32)
    found = np.asarray(pallas_kernels.append(jnp.asarray(kv), row, slot, new[0], new[1]))
    expected = kv.copy()
    for i in range(2):  # the third row is outside the array: dropped
        expected[row[i], :, slot[i], :HEAD] = new[0, i]
        expected[row[i], :, slot[i], HEAD:] = new[1, i]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rotary", [HEAD, HEAD // 2])
def test_relocate_rotates_keys_and_copies_values(rotary: int) -> None:
    rng = np.random.default_rng(1)
    kv = rng.standard_normal((6, KV_HEADS, SIZE, 2 * HEAD), np.float32)
    angle = rng.uniform(-3, 3, (2, rotary // 2))
    source = np.array([0, 5], np.int32), np.array([1, 3], np.int32)
    target = np.array([2, 3], np.int32), np.array([0, 2], np.int32)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    found = np.asarray(pallas_kernels.relocate(jnp.asarray(kv), source, target, cos, sin))
    expected = kv.astype(np.float64)
    half = rotary // 2
    for i in range(2):
        row = kv[source[0][i], :, source[1][i]].astype(np.float64)
        turned = row.copy()
        for d in range(half):
            pair = (row[:, d] + 1j * row[:, d + half]) * np.exp(1j * angle[i, d])
            turned[:, d], turned[:, d + half] = pair.real, pair.imag
        expected[target[0][i], :, target[1][i]] = turned
    np.testing.assert_allclose(found, expected, atol=tolerance("relocated_key"))
    untouched = [0, 1, 4, 5]
    np.testing.assert_array_equal(found[untouched], kv[untouched])
