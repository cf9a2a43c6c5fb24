"""int8 and float8 pages: what is stored, how often it is rounded, and that it is what the contract says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from judge import Judge
from reference import Decoder
from tiny import CHUNK, PAGE_SIZE, tiny_config
from tolerances import tolerance

import jaxkv
from jaxkv import core
from jaxkv.cache.dtypes import KV_DTYPES
from jaxkv.cache.pages import decode_storage, read_slots, write_slots
from jaxkv.model.backend import Backend
from pallas_kernels.judge import factors as factors_by_slot

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
QUANTIZED = ("int8", "float8_e4m3fn")
STORE = {"int8": reference.stored_int8, "float8_e4m3fn": reference.stored_float8}
PAGES, P, SHORT = 6, 8, {"int8": "int8", "float8_e4m3fn": "fp8"}
MB = 2**20
quantized = pytest.mark.parametrize("dtype", QUANTIZED)
# Through an engine or a kernel float8 takes the same way as int8: its turn comes in the slow tier.
engines = pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])


def empty(dtype: str, **changes: Any) -> jaxkv.KVPages:
    config = tiny_config(**changes)
    return jaxkv.make_pages(config, config.groups[0], num_pages=PAGES, page_size=P, dtype=dtype)


def rows(n: int, seed: int = 0, kv_heads: int = 2) -> np.ndarray:
    """Keys | values f32[n, K, 32] whose sizes differ from row to row; the first is zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, kv_heads, 32)) * 10.0 ** rng.uniform(-6, 3, (n, kv_heads, 1))
    x[0] = 0
    return x.astype(np.float32)


def written(pages: jaxkv.KVPages, x: np.ndarray, slots: np.ndarray, layer: int = 1) -> jaxkv.KVPages:
    return write_slots(pages, layer, jnp.asarray(slots), jnp.asarray(x[..., :16]), jnp.asarray(x[..., 16:]))


def stored_bits(engine: jaxkv.Engine, sequence: jaxkv.Sequence) -> list[bytes]:
    """Numbers and scales of the pages that a sequence holds, bit by bit."""
    (pages,) = engine._memory.pages
    held = np.unique(sequence.held_pages)
    at = (np.arange(pages.kv.shape[0] // pages.num_pages)[:, None] * pages.num_pages + held).reshape(-1)
    assert pages.scale is not None
    return [np.asarray(pages.kv)[at].tobytes(), np.asarray(pages.scale)[:, at].tobytes()]


@quantized
def test_what_is_written_is_read_back_to_the_nearest_step_of_its_row(dtype: str) -> None:
    """Against the definition in float64: each slot and head has its own step, zeros stay zeros."""
    x, slots = rows(30), np.random.default_rng(1).permutation(PAGES * P)[:30].astype(np.int32)
    pages = written(empty(dtype), x, slots)
    found = np.asarray(read_slots(pages, 1, jnp.asarray(slots))).astype(np.float64)
    for part in (slice(0, 16), slice(16, 32)):
        exact, mine = x[..., part].astype(np.float64), found[..., part]
        most = np.abs(exact).max(-1, keepdims=True)
        share = np.abs(mine - exact) / np.where(most > 0, most, 1)
        assert share.max() <= tolerance(f"stored_{SHORT[dtype]}")
        # The same numbers as the definition, but for those that lie on the border of two steps.
        expected = STORE[dtype](exact)
        same = np.abs(mine - expected) <= 1e-6 * most
        assert same.mean() > 0.99
        np.testing.assert_allclose(np.abs(mine).max(-1, keepdims=True), most, rtol=1e-6)
    assert not found[0].any()
    others = np.setdiff1d(np.arange(PAGES * P), slots)
    assert not np.asarray(read_slots(pages, 1, jnp.asarray(others))).any()
    assert not np.asarray(read_slots(pages, 0, jnp.asarray(slots))).any()


@quantized
def test_a_dropped_write_changes_neither_numbers_nor_scales(dtype: str) -> None:
    """CASE 28."""
    pages = written(empty(dtype), rows(PAGES * P), np.arange(PAGES * P, dtype=np.int32), layer=0)
    after = written(pages, rows(3, seed=1), np.array([PAGES * P, -1, PAGES * P + 5], np.int32), layer=0)
    np.testing.assert_array_equal(np.asarray(after.kv), np.asarray(pages.kv))
    np.testing.assert_array_equal(np.asarray(after.scale), np.asarray(pages.scale))


@quantized
def test_relocate_rounds_a_key_once_and_copies_values_bit_by_bit(dtype: str) -> None:
    """The copy form: dequantized, turned in float32, quantized once, against float64."""
    config = tiny_config(rope=jaxkv.RopeConfig(theta=10_000.0, rotary_dim=8))
    slots = np.arange(PAGES * P, dtype=np.int32)
    pages = empty(dtype, rope=config.rope)
    for layer in range(2):
        pages = written(pages, rows(len(slots), seed=layer), slots, layer)
    source, target = np.random.default_rng(2).permutation(slots)[:40].reshape(2, 20)
    delta = np.random.default_rng(3).integers(-500, 500, 20).astype(np.int32)
    before = [np.asarray(read_slots(pages, layer, slots)).astype(np.float64) for layer in range(2)]
    value_bits = numbers(pages)[:, source][..., 16:], factors(pages)[:, source][..., 1]
    untouched = np.setdiff1d(slots, target)
    other_bits = numbers(pages)[:, untouched], factors(pages)[:, untouched]
    (moved,) = jaxkv.relocate(
        (pages,), (jaxkv.Moves(source=source, target=target, delta=delta),), config=config
    )
    np.testing.assert_array_equal(numbers(moved)[:, target][..., 16:], value_bits[0])
    np.testing.assert_array_equal(factors(moved)[:, target][..., 1], value_bits[1])
    np.testing.assert_array_equal(numbers(moved)[:, untouched], other_bits[0])
    np.testing.assert_array_equal(factors(moved)[:, untouched], other_bits[1])
    for layer in range(2):
        exact = reference.turn(before[layer][source][..., :16], delta, config.rope)
        after = np.asarray(read_slots(moved, layer, target)).astype(np.float64)[..., :16]
        most = np.abs(exact).max(-1, keepdims=True)
        share = np.abs(after - exact) / np.where(most > 0, most, 1)
        assert share.max() <= tolerance(f"stored_{SHORT[dtype]}")


def numbers(pages: jaxkv.KVPages) -> np.ndarray:
    """[L, slots, K, 2H] as float32, without scales."""
    kv = np.asarray(decode_storage(pages.kv, pages).astype(jnp.float32))
    return kv.reshape(-1, PAGES, *kv.shape[1:]).swapaxes(2, 3).reshape(-1, PAGES * P, 2, 32)


def factors(pages: jaxkv.KVPages) -> np.ndarray:
    """[L, slots, K, 2]."""
    scale = factors_by_slot(pages.scale, len(pages.kv), P)
    return scale.reshape(-1, PAGES, *scale.shape[1:]).swapaxes(2, 3).reshape(-1, PAGES * P, 2, 2)


@engines
def test_a_kernel_that_appends_writes_the_same_bits(dtype: str) -> None:
    from jaxkv.model.attention import append_of

    config = tiny_config()
    pages = jaxkv.make_pages(
        config, config.groups[0], num_pages=PAGES, page_size=P, dtype=dtype, platform="tpu"
    )
    x, slots = jnp.asarray(rows(9)), jnp.asarray([3, 4, 40, 41, 11, 48, 47, 17, 0], jnp.int32)
    keys, values = x[..., :16], x[..., 16:]
    plain = write_slots(pages, 1, slots, keys, values)
    kernel = append_of(Backend("pallas_tpu", interpret=True))
    found = write_slots(pages, 1, slots, keys, values, kernel)
    np.testing.assert_array_equal(numbers(found), numbers(plain))
    np.testing.assert_array_equal(factors(found), factors(plain))


@engines
def test_answers_are_those_of_a_decoder_that_stores_kv_so(
    make_engine: Engines, decoder: Decoder, text: Text, dtype: str
) -> None:
    """Prefill in chunks, generation, and an edit in view form with repair, against float64."""
    atol = tolerance("logits_stored")
    storing = dataclasses.replace(decoder, store=STORE[dtype])
    engine, judge, old = make_engine(kv_dtype=dtype), Judge(storing), text(96)
    first, state = engine.prefill(old), judge.prefill(old)
    np.testing.assert_allclose(first.logits, state.logits, atol=atol)
    generated = engine.generate(first.sequence, max_tokens=5, stop=())
    assert generated.tokens.tolist() == judge.greedy(state, 5)
    new = np.concatenate([old[:30], text(7, seed=1), old[41:]]).astype(np.int32)
    edited = engine.edit(first.sequence, new, jaxkv.SCR(min_span=8, tail=4) | jaxkv.FirstK(3))
    assert edited.reuse.relocated > 30
    np.testing.assert_allclose(edited.logits, judge.edit(state, edited).logits, atol=atol)
    # And without quantization the answer is another, by what rounding does.
    plain = decoder.logits(old)[-1]
    assert atol < np.abs(first.logits - plain).max() <= tolerance(f"logits_{SHORT[dtype]}")


@engines
def test_moving_in_view_form_changes_no_bit(make_engine: Engines, text: Text, dtype: str) -> None:
    engine, old = make_engine(kv_dtype=dtype, prefix_cache=False), text(90)
    sequence = engine.prefill(old).sequence
    before, state = stored_bits(engine, sequence), engine.read_kv(sequence)
    there = engine.edit(
        sequence, np.concatenate([text(20, seed=1), old]), jaxkv.SCR(min_span=8, tail=0)
    ).sequence
    back = engine.edit(there, old, jaxkv.SCR(min_span=8, tail=0)).sequence
    assert stored_bits(engine, sequence) == before
    np.testing.assert_array_equal(engine.read_kv(back).keys[:, :89], state.keys[:, :89])
    np.testing.assert_array_equal(engine.read_kv(back).values[:, :89], state.values[:, :89])


@engines
def test_copies_start_from_the_keys_as_born(make_engine: Engines, text: Text, dtype: str) -> None:
    """A copy of a copy would be rounded twice: two moves by 7 give the bits of one by 14."""
    engine, old = make_engine(kv_dtype=dtype, prefix_cache=False), text(60)
    policy = jaxkv.SCR(min_span=8, tail=0, form="copy")
    sequence = engine.prefill(old).sequence
    once = engine.edit(sequence, np.concatenate([text(14, seed=1), old]), policy).sequence
    half = engine.edit(sequence, np.concatenate([text(14, seed=1)[7:], old]), policy).sequence
    twice = engine.edit(half, np.concatenate([text(14, seed=1), old]), policy).sequence
    assert once.copies is not None
    a, b = engine.read_kv(once), engine.read_kv(twice)
    np.testing.assert_array_equal(a.keys[:, 14:73], b.keys[:, 14:73])
    np.testing.assert_array_equal(a.values[:, 14:73], b.values[:, 14:73])


@engines
def test_warm_equals_cold_bit_by_bit_in_pool_and_tiers(
    make_engine: Engines, text: Text, tmp_path: Path, dtype: str
) -> None:
    """What is spilled and restored has its scales with it."""

    def make(**tiers: Any) -> jaxkv.Engine:
        return make_engine(kv_dtype=dtype, reuse_granularity="chunk", **tiers)

    tokens = np.concatenate([text(3 * CHUNK), [7]])
    cold = np.asarray(make().prefill(tokens).logits)
    for tiers in ({"host_tier_bytes": 64 * MB}, {"disk_tier": tmp_path}):
        engine = make(**tiers)
        for _ in range(2):
            result = engine.prefill(tokens)
            np.testing.assert_array_equal(np.asarray(result.logits), cold)
        assert result.reuse.matched == 3 * CHUNK
        del result
        for seed in range(60, 63):
            engine.release(engine.prefill(text(40 * PAGE_SIZE, seed=seed)).sequence)
        warm = engine.prefill(tokens)
        assert warm.reuse.matched == 3 * CHUNK
        assert engine.stats()["tokens_restored"] == 3 * CHUNK
        np.testing.assert_array_equal(np.asarray(warm.logits), cold)


def test_another_scale_format_is_no_hit_and_is_named(
    make_engine: Engines, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE 3, in memory, in the disk tier and in a saved cache."""
    engine = make_engine(kv_dtype="int8", disk_tier=tmp_path / "tier")
    engine.prefill(text(40))
    assert engine.prefill(text(40)).reuse.matched == 39
    engine.save_cache(tmp_path / "saved")
    for seed in range(60, 63):
        engine.release(engine.prefill(text(40 * PAGE_SIZE, seed=seed)).sequence)
    assert engine.stats()["tokens_spilled"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(core, "scale_format", lambda _: "float32 a page")
        other = make_engine(kv_dtype="int8", disk_tier=tmp_path / "tier")
    assert other.prefill(text(40)).reuse.matched == 0
    with pytest.raises(
        jaxkv.ContractError, match=r"scale_format is 'float32 amax/127 a slot.*expected 'float32 a page'"
    ):
        other.load_cache(tmp_path / "saved")
    same = make_engine(kv_dtype="int8", disk_tier=tmp_path / "tier")
    assert same.prefill(text(40)).reuse.matched == 39
    # In one engine, as after an update in place.
    same._memory.past.append(same.contract)
    same._contract = dataclasses.replace(same.contract, scale_format="float32 a page")
    end = same.prefill(text(40)).reuse.match_end
    assert (end.cause, end.fields) == (jaxkv.Cause.CONTRACT, ("scale_format",))


def test_a_cache_of_another_dtype_is_refused_by_name(
    make_engine: Engines, text: Text, tmp_path: Path
) -> None:
    """CASE 3."""
    engine = make_engine(kv_dtype="int8")
    engine.prefill(text(40))
    engine.save_cache(tmp_path)
    for dtype in ("float32", "float8_e4m3fn"):
        with pytest.raises(
            jaxkv.ContractError, match=rf"kv_dtype is 'int8', expected '{dtype}' \(1 more field differs\)"
        ):
            make_engine(kv_dtype=dtype).load_cache(tmp_path)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_bytes_are_counted_as_they_lie_in_memory(make_engine: Engines, text: Text, dtype: str) -> None:
    engine = make_engine(kv_dtype=dtype)
    held = sum(array.nbytes for array in jax.tree.leaves(engine._memory.pages))
    page_bytes = int(engine.stats()["page_bytes"])
    assert page_bytes * engine.stats()["pages_total"] == held
    assert page_bytes == PAGE_SIZE * jaxkv.kv_token_bytes(engine.config, dtype)
    assert engine.contract.kv_dtype == dtype
    assert bool(engine.contract.scale_format) == (dtype in QUANTIZED)
    fitting = make_engine(kv_dtype=dtype, num_pages=None, capacity_bytes=9 * page_bytes + page_bytes // 2)
    assert fitting.stats()["pages_total"] == 9
    if dtype != "int8":
        return
    old = text(64)
    first = engine.prefill(old)
    ledger = first.reuse.ledger
    assert ledger.kv_bytes_resident == 64 * page_bytes // PAGE_SIZE
    policy = jaxkv.SCR(min_span=8, tail=0, form="copy")
    moved = engine.edit(first.sequence, old[5:], policy).reuse
    assert moved.ledger.kv_bytes_moved == moved.relocated * page_bytes // PAGE_SIZE > 0


@pytest.mark.parametrize(
    ("given", "meant"),
    [("fp8", "float8_e4m3fn"), ("int4", "int8"), ("bf16", "bfloat16"), ("float8_e4m3", "float8_e4m3fn")],
)
def test_a_dtype_that_is_none_of_the_pages_is_refused_with_the_nearest(
    make_engine: Engines, given: str, meant: str
) -> None:
    with pytest.raises(
        jaxkv.ConfigError,
        match=f"kv_dtype is '{given}', expected one of float32, bfloat16, int8, float8_e4m3fn; "
        rf"did you mean '{meant}'\?",
    ):
        make_engine(kv_dtype=given)


def test_the_documented_bytes_of_a_token_are_those_that_are_counted() -> None:
    page = (Path(__file__).parents[1] / "docs" / "quantized.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if re.match(r"\| .* \| \d+ × \d+ × \d+ \|", line)]
    assert len(table) == 3
    for line in table:
        _, shape, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        layers, kv_heads, head_dim = map(int, shape.split(" × "))
        config = tiny_config(num_layers=layers, num_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim)
        wide, half, narrow = (int(cell.replace(",", "")) for cell in cells[:3])
        assert jaxkv.kv_token_bytes(config, "float32") == wide
        assert jaxkv.kv_token_bytes(config, "bfloat16") == half
        assert jaxkv.kv_token_bytes(config, "int8") == narrow
        assert jaxkv.kv_token_bytes(config, "float8_e4m3fn") == narrow
        assert cells[3] == f"{narrow / half:.1%}"
