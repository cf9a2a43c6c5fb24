"""int8 and float8 pages on a mesh: heads and their scales lie together, and answers are one device's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
import reference as judge
from on_mesh import EVEN, UNEVEN, engine_of, mesh_of, model_of, text
from recurrent_reference import hybrid_run
from reference import decoder_of
from tiny_hybrid import hybrid_config
from tolerances import tolerance

import jaxkv
import pallas_kernels
from jaxkv.model.backend import Backend
from jaxkv.model.sharding import PAGE_AXES, spec_of
from pallas_kernels import reference

STORE = {"int8": judge.stored_int8, "float8_e4m3fn": judge.stored_float8}
ATOL = tolerance("logits_stored")
WINDOWED: dict[str, Any] = {
    **EVEN,
    "layer_types": ("local", "global"),
    "window": 21,
    "rope_local": jaxkv.RopeConfig(theta=500.0, rotary_dim=16),
}


def require_shards(engine: jaxkv.Engine, kv_heads: int) -> None:
    """Numbers and scales of so many KV heads on every device, in every group of layers that attend."""
    for group in engine._memory.pages:
        if not isinstance(group, jaxkv.KVPages):
            continue
        for array, heads in ((group.kv, 1), (group.scale, 0)):
            assert len(array.sharding.device_set) == 4
            assert {shard.data.shape[heads] for shard in array.addressable_shards} == {kv_heads}
    engine.check()


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_an_engine_on_a_mesh_stores_what_one_on_one_device_stores(dtype: str) -> None:
    """Prefill in chunks over global and local layers with few pages, a hit, an edit in view form."""
    model = model_of(**WINDOWED)
    options = {"kv_dtype": dtype, "local_pages": 16}
    alone = engine_of(model, **options)
    spread = engine_of(model, mesh_of(4), poison_free_pages=True, **options)
    storing = dataclasses.replace(decoder_of(model.params, model.config), store=STORE[dtype])
    edited = np.concatenate([text(64)[:20], text(5, seed=2), text(64)[34:]])
    found = []
    for engine in (alone, spread):
        first = engine.prefill(text(64))
        np.testing.assert_allclose(first.logits, storing.logits(text(64))[-1], atol=ATOL, rtol=0)
        hit = engine.prefill(np.concatenate([text(64), text(9, seed=1)]))
        assert hit.reuse.matched == 64
        moved = engine.edit(first.sequence, edited, jaxkv.SCR(min_span=4, tail=2) | jaxkv.FirstK(3))
        kv = engine.read_kv(first.sequence)
        found.append((moved.reuse.relocated, [hit.logits, moved.logits], kv))
    (count, one, here), (same, other, there) = found
    assert count == same > 20
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=ATOL, rtol=0)
    # A number on the border of two steps may fall to either side; nearly all are the same.
    for a, b in ((here.keys, there.keys), (here.values, there.values)):
        held = np.isfinite(a)
        np.testing.assert_array_equal(held, np.isfinite(b))
        assert (np.abs(a - b)[held] <= tolerance("readback")).mean() > 0.995
    require_shards(spread, kv_heads=1)


def test_copies_and_repairs_on_a_mesh() -> None:
    """The copy form turns a key on its own device and rounds it once; values keep their bits."""
    model = model_of(**EVEN)
    engine = engine_of(model, mesh_of(4), kv_dtype="int8", prefix_cache=False)
    old = text(60)
    source = engine.prefill(old).sequence
    copied = engine.edit(source, old[7:], jaxkv.SCR(min_span=4, tail=0, form="copy"))
    assert copied.reuse.relocated == 52
    before, after = engine.read_kv(source), engine.read_kv(copied.sequence)
    np.testing.assert_array_equal(after.values[:, :52], before.values[:, 7:59])
    most = np.abs(before.keys).max(-1, keepdims=True)[:, 7:59]
    away = np.abs(after.keys[:, :52] - before.keys[:, 7:59])
    # Turned, rounded and turned back: a step for each of the two features that a rotation mixes.
    assert (away <= 2 * tolerance("stored_int8") * np.sqrt(2) * most).all()
    healed = engine.heal(copied.sequence, tokens=100)
    exact = dataclasses.replace(decoder_of(model.params, model.config), store=STORE["int8"])
    np.testing.assert_allclose(healed.logits, exact.logits(old[7:])[-1], atol=ATOL, rtol=0)
    require_shards(engine, kv_heads=1)


def test_a_hybrid_on_a_mesh_has_quantized_pages_and_float32_states() -> None:
    from tiny import make_model

    model = make_model(hybrid_config(**EVEN))
    engine = engine_of(model, mesh_of(4), kv_dtype="int8", num_states=8)
    result = engine.prefill(text(40))
    result = engine.extend(result.sequence, text(9, seed=1))
    whole = np.concatenate([text(40), text(9, seed=1)])
    expected, _, _ = hybrid_run(model.params, model.config, whole, np.arange(49), store=STORE["int8"])
    np.testing.assert_allclose(result.logits, expected[-1], atol=ATOL, rtol=0)
    assert engine._memory.pages[-1].state.dtype == np.float32
    require_shards(engine, kv_heads=1)


def test_heads_that_the_mesh_does_not_divide_are_whole_with_their_scales() -> None:
    require_shards(engine_of(model_of(**UNEVEN), mesh_of(4), kv_dtype="int8"), kv_heads=2)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_kernels_take_the_scales_of_their_shard(dtype: str) -> None:
    """Append and decode, interpreted on two devices, against their definitions."""
    rng, mesh, kv_heads, size = np.random.default_rng(3), mesh_of(2), 2, 32
    rows = rng.standard_normal((4, kv_heads, size, 2, 64)).astype(np.float32)
    numbers, factors = reference.quantize(rows, dtype)
    numbers, scale = np.array(numbers), np.array(pallas_kernels.pack_scales(factors, tiles=True))
    kv = numbers.reshape(4, kv_heads, size, 128)
    row, slot = np.array([1, 3], np.int32), np.array([4, 15], np.int32)
    keys, values = rng.standard_normal((2, 2, kv_heads, 64)).astype(np.float32)
    put = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, spec_of(PAGE_AXES[name], x.shape, mesh)))
        for name, x in (("kv", kv), ("scale", scale))
    ]
    backend = Backend("pallas_tpu", interpret=True, mesh=mesh)
    run = jax.jit(
        lambda kv, scale: backend.call(pallas_kernels.append, kv, row, slot, keys, values, scale=scale)
    )
    written = run(*put)
    expected = reference.append(kv, row, slot, keys, values, scale=scale)
    for found, exact, heads in zip(written, expected, (1, 0), strict=True):
        assert found.sharding.shard_shape(found.shape)[heads] == 1
        np.testing.assert_array_equal(np.asarray(found), np.asarray(exact))
    q = rng.standard_normal((1, 1, 1, kv_heads, 2, 64)).astype(np.float32) / 8
    page = np.array([[1, 3, 0, 0]], np.int32)
    where = (page, size * np.arange(4, dtype=np.int32)[None], 0 * page, np.array([[32, 9, 0, 0]], np.int32))
    rest = (np.zeros((1, 1), np.int32), np.array([[40]], np.int32))
    attend = functools.partial(backend.call, pallas_kernels.paged_attention)
    attended = jax.jit(lambda q, kv, scale: attend(q, kv, *where, *rest, scale=scale))(q, *written)
    exact = np.asarray(reference.paged_attention(q, expected[0], *where, *rest, scale=expected[1]))
    np.testing.assert_allclose(attended, exact, atol=tolerance("attention_split"), rtol=0)
