"""Edits on models that are not Llama: local layers, two rotations, normalized and biased queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judge import ATOL, Judge, origins
from reference import Decoder, decoder_of, turn
from tiny import make_model, tiny_config
from tolerances import tolerance

import jaxkv
from jaxkv import SCR, Drop, Exact, FirstK, Sinks

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
MIXED: dict[str, Any] = {
    "num_layers": 3,
    "layer_types": ("local", "global", "local"),
    "window": 21,
    "rope": jaxkv.RopeConfig(theta=100_000.0, rotary_dim=16, scaling="linear", factor=2.0),
    "rope_local": jaxkv.RopeConfig(theta=500.0, rotary_dim=16),
    "qk_norm": True,
    "post_norms": True,
    "activation": "gelu_tanh",
    "embed_scale": 1.5,
    "query_scale": 0.4,
    "tie_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "local and global": MIXED,
    "local only": {"layer_types": ("local", "local"), "window": 13},
    "biased, local yarn": {
        "qkv_bias": True,
        "layer_types": ("global", "local"),
        "window": 17,
        "rope_local": jaxkv.RopeConfig(
            rotary_dim=8, scaling="yarn", factor=4.0, original_max_positions=64, magnitude=1.14
        ),
    },
}
POLICIES = {
    "view": SCR(min_span=8, tail=4),
    "copy": SCR(form="copy", min_span=8, tail=4),
    "repaired": SCR(min_span=8, tail=4) | FirstK(6) | Sinks(3),
    "drop": Drop(),
    "exact": Exact(),
}


def make(make_engine: Engines, model: jaxkv.Model, **changes: Any) -> jaxkv.Engine:
    """Steps of 16 and of 1 alone: few shapes to compile for each family."""
    return make_engine(model=model, chunk_size=16, **changes)


def edits(text: Text) -> dict[str, np.ndarray]:
    old, new = text(150), text(40, seed=1)
    return {
        "delete": np.concatenate([old[:40], old[53:]]),
        "insert": np.concatenate([old[:37], new[:11], old[37:]]),
        "swap": np.concatenate([old[80:], old[:80]]),
    }


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[jaxkv.Model, Decoder]:
    model = make_model(tiny_config(**FAMILIES[request.param]))
    return model, decoder_of(model.params, model.config)


def test_edits_equal_float64(make_engine: Engines, family: tuple[jaxkv.Model, Decoder], text: Text) -> None:
    """CASES 18, 19, 24: keys move at their layer's own frequencies, windows are measured where they stand."""
    model, decoder = family
    engine, judge = make(make_engine, model), Judge(decoder)
    first, state = engine.prefill(text(150)), judge.prefill(text(150))
    np.testing.assert_allclose(first.logits, state.logits, atol=ATOL)
    for tokens in edits(text).values():
        for policy in POLICIES.values():
            result = engine.edit(first.sequence, tokens, policy)
            after = judge.edit(state, result)
            np.testing.assert_allclose(result.logits, after.logits, atol=ATOL, err_msg=str(policy))
            scored = engine.score(result.sequence, text(5, seed=7))
            np.testing.assert_allclose(scored, judge.score(after, text(5, seed=7)), atol=ATOL)
            engine.release(result.sequence)


def test_an_edit_of_an_edit_and_what_is_generated_on_it(make_engine: Engines, text: Text) -> None:
    model = make_model(tiny_config(**MIXED))
    engine, judge = make(make_engine, model), Judge(decoder_of(model.params, model.config))
    first, state = engine.prefill(text(150)), judge.prefill(text(150))
    once = engine.edit(first.sequence, edits(text)["insert"], POLICIES["view"])
    state = judge.edit(state, once)
    again = np.concatenate([once.sequence.tokens[:20], once.sequence.tokens[29:]])
    twice = engine.edit(once.sequence, again, POLICIES["view"])
    state = judge.edit(state, twice)
    np.testing.assert_allclose(twice.logits, state.logits, atol=ATOL)
    out = engine.generate(twice.sequence, max_tokens=5)
    assert out.tokens.tolist() == judge.greedy(state, 5)


def test_what_is_read_back_and_healed(
    make_engine: Engines, family: tuple[jaxkv.Model, Decoder], text: Text
) -> None:
    """Keys are un-rotated layer by layer; a healed sequence is the exact one."""
    model, decoder = family
    engine = make(make_engine, model)
    first = engine.prefill(text(150)).sequence
    kv = engine.read_kv(first)
    _, cached = decoder.run(text(150), np.arange(150), decoder.empty())
    for layer, kind in enumerate(model.config.types):
        rope = (model.config.rope_local or model.config.rope) if kind == "local" else model.config.rope
        plain = turn(cached.keys[layer], -cached.birth, rope) / rope.magnitude
        if rope.rotary_dim < 16:  # what passes through never had the magnitude
            plain[..., rope.rotary_dim :] *= rope.magnitude
        np.testing.assert_allclose(kv.keys[layer], plain, atol=tolerance("readback"))
        np.testing.assert_allclose(kv.values[layer], cached.values[layer], atol=tolerance("readback"))
    edited = engine.edit(first, edits(text)["delete"], POLICIES["view"])
    healed = engine.heal(edited.sequence, tokens=500)
    assert healed.sequence.exact
    exact = decoder.logits(edits(text)["delete"])[-1]
    np.testing.assert_allclose(healed.logits, exact, atol=tolerance("healed"))


def test_displaced_exact_content_costs_rounding_alone(make_engine: Engines, text: Text) -> None:
    """CASE 19 in the copied form: rotating by another layer's frequencies would show at once."""
    model = make_model(tiny_config(**MIXED))
    engine = make(make_engine, model)
    first = engine.prefill(text(120))
    moved = engine.displace(first.sequence, (jaxkv.Span(47, 40, 60),))
    more = text(8, seed=3)
    np.testing.assert_allclose(
        engine.score(moved, more)[1:],
        engine.score(first.sequence, more)[1:],
        atol=tolerance("view_against_copy"),
    )


@pytest.mark.parametrize("name", ["biased", "normed"])
def test_queries_are_recovered_in_every_family(make_engine: Engines, text: Text, name: str) -> None:
    """Where values alone span the state, a normalized key is not missed; biases are accounted for."""
    from test_probing import deleted_mass, make_edit, prober_of

    from jaxkv.reuse.probes import Attention

    changes: dict[str, Any] = {"qkv_bias": True}
    if name == "normed":
        changes = {"qk_norm": True, "num_kv_heads": 6, "layer_types": ("global", "local"), "window": 40}
    model = make_model(tiny_config(**changes))
    decoder = decoder_of(model.params, model.config)
    engine, old = make(make_engine, model), text(120)
    new = np.concatenate([old[:30], old[45:]]).astype(np.int32)
    sequence = engine.prefill(old).sequence
    edit = make_edit(sequence, new, POLICIES["view"])
    found, _ = prober_of(engine, sequence, new)(edit, Attention(depths=(0.5,)))
    deleted = np.zeros(120, bool)
    deleted[30:45] = True
    mass = deleted_mass(decoder, old, deleted, layer=1)
    expected = np.concatenate([np.zeros(30), mass[45:]])
    np.testing.assert_allclose(found, expected, atol=tolerance("recovered_attention"))
    assert found.max() > 0.1


def test_the_ledger_counts_a_window_once(make_engine: Engines, text: Text) -> None:
    engine = make(make_engine, make_model(tiny_config(**FAMILIES["biased, local yarn"])))
    config, ledger = engine.config, engine.prefill(text(50)).reuse.ledger
    keys = np.arange(1, 51)
    per_layer = 4 * config.num_heads * config.head_dim
    attended = per_layer * (keys.sum() + np.minimum(keys, 17).sum())
    assert ledger.flops == 2 * config.body_params * 50 + attended


LOCAL: dict[str, Any] = FAMILIES["local only"]
REACH = (2 - 1) * (13 - 1)  # (layers - 1) · (window - 1): what a token's KV depends on


@pytest.mark.parametrize("edit", ["delete", "insert", "swap"])
def test_behind_its_reach_a_local_model_is_exact_and_says_so(
    make_engine: Engines, text: Text, edit: str
) -> None:
    """In a model of local layers, KV farther than layers × window behind a seam is a fresh prefill's."""
    model = make_model(tiny_config(**LOCAL))
    engine = make(make_engine, model)
    first, tokens = engine.prefill(text(150)).sequence, edits(text)[edit]
    result = engine.edit(first, tokens, SCR(min_span=8, tail=0))
    called = np.array([origin == "exact" for origin in origins(result.sequence)])
    fresh = engine.read_kv(engine.prefill(tokens, reuse=False).sequence)
    kept = engine.read_kv(result.sequence)
    off = [np.abs(a - b).max((0, 2, 3)) for a, b in ((kept.keys, fresh.keys), (kept.values, fresh.values))]
    same = np.maximum(*off) < tolerance("readback")
    assert same[called].all(), "what is called exact is"
    for span in result.reuse.spans:
        far = slice(span.new + REACH, span.new + span.length)
        assert called[far].all()
        near = slice(span.new + 1, span.new + REACH)
        assert not called[near].any()
        assert not same[near].all(), "near the seam it is stale, or the test shows nothing"
    assert result.reuse.kind == "approximate"
    assert result.sequence.exact_length == min(span.new for span in result.reuse.spans)


def test_repairing_what_the_seam_reaches_makes_a_local_model_exact(make_engine: Engines, text: Text) -> None:
    model = make_model(tiny_config(**LOCAL))
    decoder = decoder_of(model.params, model.config)
    engine = make(make_engine, model)
    first, tokens = engine.prefill(text(150)).sequence, edits(text)["delete"]
    result = engine.edit(first, tokens, SCR(min_span=8, tail=0) | FirstK(REACH))
    assert result.reuse.kind == "exact"
    assert result.reuse.relocated > 80
    np.testing.assert_allclose(result.logits, decoder.logits(tokens)[-1], atol=ATOL)
    # Moved KV is exact and still private: what is published ends where it begins.
    again = engine.prefill(tokens)
    assert again.reuse.matched <= 40 + REACH
    np.testing.assert_allclose(again.logits, result.logits, atol=tolerance("logits"))
    grown = engine.extend(result.sequence, text(30, seed=4)).sequence
    assert grown.exact
    stale = engine.edit(first, tokens, SCR(min_span=8, tail=0)).sequence
    assert engine.extend(stale, text(5, seed=4)).sequence.provenance[-1].origin == "exact"
    healed = engine.heal(stale, tokens=REACH)
    assert healed.sequence.exact
    assert healed.reuse.forwarded == REACH
    np.testing.assert_allclose(healed.logits, decoder.logits(tokens)[-1], atol=tolerance("healed"))


def test_on_a_grid_nothing_that_moved_is_called_exact(make_engine: Engines, text: Text) -> None:
    """Bit for bit is what exact means there, and rotations round."""
    engine = make(make_engine, make_model(tiny_config(**LOCAL)), reuse_granularity="chunk")
    first = engine.prefill(text(150)).sequence
    result = engine.edit(first, edits(text)["delete"], SCR(min_span=8, tail=0))
    assert all(run.origin != "exact" for run in result.sequence.provenance if run.delta)
