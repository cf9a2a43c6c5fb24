"""An engine over a mesh gives what an engine on one device gives; its pages stay sharded throughout."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import CHUNK, EVEN, NUM_PAGES, PAGE_SIZE, UNEVEN, VOCAB, engine_of, mesh_of, model_of, text
from reference import decoder_of
from tolerances import tolerance

import jaxkv
import pallas_kernels
from jaxkv.model.backend import Backend
from jaxkv.model.sharding import MODEL, PAGE_AXES, spec_of
from jaxkv.parallel import place_params, weight_shardings
from pallas_kernels import reference

LOGITS = tolerance("logits")
CASES = [pytest.param(EVEN, True, id="K divides"), pytest.param(UNEVEN, False, id="K does not")]


def workload(engine: jaxkv.Engine) -> dict[str, Any]:
    """Everything an engine does to pages, and what came of it."""
    seen: dict[str, Any] = {}
    first = engine.prefill(text(64))
    seen["prefill"] = np.asarray(first.logits)
    hit = engine.prefill(np.concatenate([text(64), text(9, seed=1)]))
    seen["matched"] = hit.reuse.matched
    seen["hit"] = np.asarray(hit.logits)
    pair = engine.generate_batch([first.sequence, hit.sequence], max_tokens=9)
    seen["generated"] = [g.tokens.tolist() for g in pair]
    seen["generated_logits"] = np.stack([np.asarray(g.sequence.logits) for g in pair])
    edited = np.concatenate([text(64)[:20], text(5, seed=2), text(64)[34:]])
    for form in ("view", "copy"):
        policy = jaxkv.SCR(min_span=4, form=form) | jaxkv.FirstK(3)
        result = engine.edit(first.sequence, edited, policy)
        seen[form] = np.asarray(result.logits)
        seen[form, "kind"] = (result.reuse.kind, result.reuse.relocated, result.reuse.forwarded)
        seen[form, "score"] = engine.score(result.sequence, text(6, seed=3))
    state = engine.read_kv(first.sequence)
    seen["keys"], seen["values"] = state.keys, state.values
    seen["attention"] = engine.attention_outputs(first.sequence, text(6, seed=3))
    engine.check()
    return seen


def test_an_engine_on_a_mesh_gives_what_one_on_one_device_gives() -> None:
    model, mesh = model_of(**EVEN), mesh_of(4)
    alone, spread = engine_of(model), engine_of(model, mesh, poison_free_pages=True)
    expected, found = workload(alone), workload(spread)
    assert expected.keys() == found.keys()
    assert found["matched"] == 64
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            limit = tolerance("readback") if name in ("keys", "values") else LOGITS
            np.testing.assert_allclose(found[name], value, atol=limit, rtol=0, err_msg=str(name))
        else:
            assert found[name] == value, name
    for name in ("keys", "values"):
        assert jaxkv.layer_divergence(expected[name], found[name]).per_layer.max() < 1e-5
    exact = decoder_of(model.params, model.config).logits(text(64))[-1]
    np.testing.assert_allclose(found["prefill"], exact, atol=LOGITS, rtol=0)
    require_shards(spread, mesh, kv_heads=1)


def test_heads_that_the_mesh_does_not_divide_are_whole_on_every_device() -> None:
    model, mesh = model_of(**UNEVEN), mesh_of(4)
    engine, decoder = engine_of(model, mesh), decoder_of(model.params, model.config)
    first = engine.prefill(text(64))
    np.testing.assert_allclose(first.logits, decoder.logits(text(64))[-1], atol=LOGITS, rtol=0)
    assert engine.generate(first.sequence, max_tokens=5).tokens.tolist() == decoder.greedy(text(64), 5)
    require_shards(engine, mesh, kv_heads=2)


def require_shards(engine: jaxkv.Engine, mesh: jax.sharding.Mesh, *, kv_heads: int) -> None:
    """Pages are still where they were made: so many KV heads on every device."""
    kv = engine._memory.pages[0].kv
    assert kv.sharding.device_set == set(mesh.devices.flat)
    assert {shard.data.shape[1] for shard in kv.addressable_shards} == {kv_heads}
    engine.check()


@pytest.mark.parametrize(("shape", "divides"), CASES)
def test_weights_lie_where_the_rule_says(shape: dict[str, int], divides: bool) -> None:
    model, mesh = model_of(**shape), mesh_of(4)
    params = place_params(model.params, model.config, mesh)
    layer = params.layers[0]
    at = {name: getattr(layer, name).sharding.spec for name in ("qkv", "out", "gate_up", "down", "attn_norm")}
    whole = jax.sharding.PartitionSpec()
    spec = jax.sharding.PartitionSpec
    assert at["qkv"] == (spec(MODEL) if divides else whole)
    assert at["out"] == (spec(None, MODEL) if divides else whole)
    assert at["gate_up"] == spec(None, MODEL)
    assert at["down"] == spec(None, MODEL)
    assert at["attn_norm"] == whole
    assert params.embed.sharding.spec == spec(MODEL)
    for leaf, where in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(weight_shardings(params, model.config, mesh)),
        strict=True,
    ):
        assert leaf.sharding == where
    again = place_params(params, model.config, mesh)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert {s.data.unsafe_buffer_pointer() for s in a.addressable_shards} == {
            s.data.unsafe_buffer_pointer() for s in b.addressable_shards
        }, "weights that lie there already are not copied"
    engine = engine_of(model, mesh)
    assert engine.model.params.embed.sharding.spec == spec(MODEL)
    engine.replace_params(model.params, "other")
    assert engine._params.embed.sharding.spec == spec(MODEL)


@pytest.mark.slow
def test_a_cache_goes_to_the_host_and_back(tmp_path: Any) -> None:
    """Spilled entries, and a saved cache on another mesh."""
    model = model_of(**EVEN)
    engine = engine_of(model, mesh_of(4), num_pages=12, host_tier_bytes=1 << 20)
    cold = np.asarray(engine.prefill(text(48)).logits)
    engine.prefill(text(48, seed=1))
    engine.prefill(text(48, seed=2))
    assert engine.stats()["entries_spilled"] > 0
    back = engine.prefill(text(48))
    assert back.reuse.matched >= 47
    assert engine.stats()["tokens_restored"] > 0
    np.testing.assert_allclose(back.logits, cold, atol=LOGITS, rtol=0)
    require_shards(engine, mesh_of(4), kv_heads=1)
    engine.save_cache(tmp_path / "cache")
    other = engine_of(model, mesh_of(2))
    assert other.load_cache(tmp_path / "cache").tokens > 0
    warm = other.prefill(text(48))
    assert warm.reuse.matched >= 47
    np.testing.assert_allclose(warm.logits, cold, atol=LOGITS, rtol=0)
    require_shards(other, mesh_of(2), kv_heads=2)


@pytest.mark.parametrize("kv_heads", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_kernels_run_on_each_shard(kv_heads: int) -> None:
    """Append and decode, interpreted, against their definitions; three heads are whole on both devices."""
    rng, mesh = np.random.default_rng(kv_heads), mesh_of(2)
    kv = rng.standard_normal((4, kv_heads, 16, 128)).astype(np.float32)
    row, slot = np.array([1, 3], np.int32), np.array([4, 15], np.int32)
    keys, values = rng.standard_normal((2, 2, kv_heads, 64)).astype(np.float32)
    where = jax.sharding.NamedSharding(mesh, spec_of(PAGE_AXES["kv"], kv.shape, mesh))
    backend = Backend("pallas_tpu", interpret=True, mesh=mesh)
    written = jax.jit(functools.partial(backend.call, pallas_kernels.append))(
        jax.device_put(kv, where), row, slot, keys, values
    )
    assert written.sharding.shard_shape(kv.shape)[1] == (1 if kv_heads == 2 else 3)
    expected = np.asarray(reference.append(kv, row, slot, keys, values))
    np.testing.assert_array_equal(written, expected)
    q = rng.standard_normal((1, 1, 1, kv_heads, 2, 64)).astype(np.float32) / 8
    page = np.array([[1, 3, 0, 0]], np.int32)
    table = (page, 16 * np.arange(4, dtype=np.int32)[None], 0 * page, np.array([[16, 9, 0, 0]], np.int32))
    rest = (np.zeros((1, 1), np.int32), np.array([[24]], np.int32))
    attended = jax.jit(functools.partial(backend.call, pallas_kernels.paged_attention))(
        q, written, *table, *rest
    )
    exact = np.asarray(reference.paged_attention(q, expected, *table, *rest))
    np.testing.assert_allclose(attended, exact, atol=tolerance("attention"), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 3])
def test_an_engine_runs_kernels_on_each_shard(kv_heads: int) -> None:
    """Prefill, decode and append kernels, interpreted; three heads are whole on both devices."""
    changes = {"num_layers": 1, "num_kv_heads": kv_heads, "num_heads": 2 * kv_heads, "head_dim": 64}
    model = model_of(vocab_size=VOCAB, **changes, rope=jaxkv.RopeConfig(rotary_dim=64))
    options = {"implementation": "pallas_tpu", "interpret": True, "num_pages": 4, "page_size": 16}
    engine = engine_of(model, mesh_of(2), chunk_size=16, max_deltas=2, **options)
    tokens, decoder = text(10), decoder_of(model.params, model.config)
    first = engine.prefill(tokens[:9])
    np.testing.assert_allclose(first.logits, decoder.logits(tokens)[-2], atol=LOGITS, rtol=0)
    longer = engine.extend(first.sequence, tokens[9:])
    np.testing.assert_allclose(longer.logits, decoder.logits(tokens)[-1], atol=LOGITS, rtol=0)
    require_shards(engine, mesh_of(2), kv_heads=1 if kv_heads == 2 else 3)


def test_a_mesh_of_several_replicas_is_no_engine() -> None:
    with pytest.raises(jaxkv.ConfigError, match=r"mesh has 2 replicas on axis 'data'.*jaxkv\.Replicas"):
        engine_of(model_of(**EVEN), "data:2,model:4")
    assert engine_of(model_of(**EVEN), "model:8").model.params.embed.sharding.mesh.shape == {"model": 8}


def test_pages_are_made_on_their_shards() -> None:
    engine = engine_of(model_of(**EVEN), mesh_of(4))
    kv = engine._memory.pages[0].kv
    assert kv.shape == (2 * NUM_PAGES, 4, PAGE_SIZE, 32)
    assert [shard.data.shape[1] for shard in kv.addressable_shards] == [1] * 4
    assert CHUNK % PAGE_SIZE == 0
    assert kv.dtype == jnp.float32
