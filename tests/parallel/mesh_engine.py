"""An engine over a mesh gives what an engine on one device gives; its pages stay sharded throughout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import CHUNK, EVEN, NUM_PAGES, PAGE_SIZE, UNEVEN, engine_of, mesh_of, model_of, text
from reference import decoder_of
from tolerances import tolerance

import jaxkv
from jaxkv.model.sharding import MODEL
from jaxkv.parallel import place_params, weight_shardings

LOGITS = tolerance("logits")
CASES = [pytest.param(EVEN, True, id="K divides"), pytest.param(UNEVEN, False, id="K does not")]


def workload(engine: jaxkv.Engine) -> dict[str, Any]:
    """Everything an engine does to pages, and what came of it."""
    seen: dict[str, Any] = {}
    first = engine.prefill(text(75))
    seen["prefill"] = np.asarray(first.logits)
    hit = engine.prefill(np.concatenate([text(75), text(9, seed=1)]))
    seen["matched"] = hit.reuse.matched
    seen["hit"] = np.asarray(hit.logits)
    pair = engine.generate_batch([first.sequence, hit.sequence], max_tokens=9)
    seen["generated"] = [g.tokens.tolist() for g in pair]
    seen["generated_logits"] = np.stack([np.asarray(g.sequence.logits) for g in pair])
    edited = np.concatenate([text(75)[:20], text(5, seed=2), text(75)[34:]])
    for form in ("view", "copy"):
        policy = jaxkv.SCR(min_span=4, form=form) | jaxkv.FirstK(3)
        result = engine.edit(first.sequence, edited, policy)
        seen[form] = np.asarray(result.logits)
        seen[form, "kind"] = (result.reuse.kind, result.reuse.relocated, result.reuse.forwarded)
        seen[form, "score"] = engine.score(result.sequence, text(6, seed=3))
    healed = engine.heal(result.sequence, tokens=80)
    seen["healed"] = np.asarray(healed.logits)
    state = engine.read_kv(first.sequence)
    seen["keys"], seen["values"] = state.keys, state.values
    seen["attention"] = engine.attention_outputs(first.sequence, text(6, seed=3))
    engine.check()
    return seen


@pytest.mark.parametrize(("shape", "divides"), CASES)
def test_an_engine_on_a_mesh_gives_the_same(shape: dict[str, int], divides: bool) -> None:
    model, mesh = model_of(**shape), mesh_of(4)
    alone, spread = engine_of(model), engine_of(model, mesh, poison_free_pages=True)
    expected, found = workload(alone), workload(spread)
    assert expected.keys() == found.keys()
    assert found["matched"] == 75
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            limit = tolerance("readback") if name in ("keys", "values") else LOGITS
            np.testing.assert_allclose(found[name], value, atol=limit, rtol=0, err_msg=str(name))
        else:
            assert found[name] == value, name
    kv = spread._memory.pages[0].kv
    shard = kv.addressable_shards[0].data.shape
    assert kv.sharding.device_set == set(mesh.devices.flat)
    assert shard[1] == (1 if divides else shape["num_kv_heads"])
    for name in ("keys", "values"):
        assert jaxkv.layer_divergence(expected[name], found[name]).per_layer.max() < 1e-5
    exact = decoder_of(model.params, model.config).logits(text(75))[-1]
    np.testing.assert_allclose(found["prefill"], exact, atol=LOGITS, rtol=0)


@pytest.mark.parametrize(("shape", "divides"), CASES)
def test_weights_lie_where_the_rule_says(shape: dict[str, int], divides: bool) -> None:
    model, mesh = model_of(**shape), mesh_of(4)
    params = place_params(model.params, model.config, mesh)
    layer = params.layers[0]
    at = {name: getattr(layer, name).sharding.spec for name in ("qkv", "out", "gate_up", "down", "attn_norm")}
    whole = jax.sharding.PartitionSpec()
    spec = jax.sharding.PartitionSpec
    assert at["qkv"] == (spec(None, MODEL) if divides else whole)
    assert at["out"] == (spec(MODEL) if divides else whole)
    assert at["gate_up"] == spec(None, None, MODEL)
    assert at["down"] == spec(MODEL)
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


def test_a_cache_goes_to_the_host_and_back(tmp_path: Any) -> None:
    """Spilled entries, and a saved cache on another mesh and on one device."""
    model = model_of(**EVEN)
    engine = engine_of(model, mesh_of(4), num_pages=12, host_tier_bytes=1 << 20)
    cold = np.asarray(engine.prefill(text(60)).logits)
    engine.prefill(text(60, seed=1))
    engine.prefill(text(60, seed=2))
    assert engine.stats()["entries_spilled"] > 0
    back = engine.prefill(text(60))
    assert back.reuse.matched >= 59
    assert engine.stats()["tokens_restored"] > 0
    np.testing.assert_allclose(back.logits, cold, atol=LOGITS, rtol=0)
    kv = engine._memory.pages[0].kv
    assert kv.addressable_shards[0].data.shape[1] == 1, "restored pages stay sharded"
    engine.save_cache(tmp_path / "cache")
    for other in (engine_of(model, mesh_of(2)), engine_of(model)):
        loaded = other.load_cache(tmp_path / "cache")
        assert loaded.tokens > 0
        warm = other.prefill(text(60))
        assert warm.reuse.matched >= 59
        np.testing.assert_allclose(warm.logits, cold, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_kernels_run_on_each_shard(shape: dict[str, int]) -> None:
    model = model_of(**{**shape, "head_dim": 64, "rope": jaxkv.RopeConfig(rotary_dim=64)})
    small = {"num_pages": 8, "page_size": 16, "chunk_size": 16}
    tokens = text(20)
    expected = engine_of(model, **small).prefill(tokens)
    engine = engine_of(model, mesh_of(2), implementation="pallas_tpu", interpret=True, **small)
    found = engine.prefill(tokens)
    np.testing.assert_allclose(found.logits, expected.logits, atol=LOGITS, rtol=0)


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
