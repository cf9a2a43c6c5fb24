"""Adaptation: the differentiable states are the engine's, gradients are right, runs resume to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from judge import ATOL, Judge
from reference import Decoder
from tiny import VOCAB, make_model, tiny_config

import jaxkv
from experiments import adapt
from experiments.adapt_config import defaults
from experiments.adaptation.edits import KINDS, Draw, Shape, make_batch, sources
from experiments.adaptation.forward import answers
from experiments.adaptation.lora import init_lora, lora_digest, merge, merged_model
from experiments.adaptation.training import Recipe, divergences, init_state, make_step
from jaxkv import SCR, FirstK, Sinks
from jaxkv.errors import ConfigError

Text = Callable[..., np.ndarray]
DRAW = Draw(context=60, continuation=9, kinds=KINDS, positions=(0.0, 0.4), sizes=(5, 11))
POLICIES = (SCR(min_span=8, tail=4), SCR(form="copy", min_span=8, tail=2) | FirstK(3) | Sinks(2))
ROOM = Shape(old=60, new=80, rows=80, answers=9)  # one compiled form for all policies
RECIPE = Recipe(
    learning_rate=5e-3,
    warmup=1,
    steps=30,
    clip=1.0,
    weight_decay=0.0,
    scale=2.0,
    plain_weight=0.1,
    remat=True,
)


def some_edits(tokens: np.ndarray) -> list[Any]:
    """Every kind at the head and behind it."""
    return [
        DRAW.edit(kind, position, DRAW.sizes[i % 2], tokens, at=3 * i, borrow=200 + 7 * i)
        for i, (kind, position) in enumerate((k, p) for k in KINDS for p in DRAW.positions)
    ]


@pytest.fixture(scope="module")
def compiled(model: jaxkv.Model) -> Any:
    return jax.jit(lambda params, batch: answers(params, batch, config=model.config))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_both_states_are_those_of_the_engine_and_of_float64(
    model: jaxkv.Model, decoder: Decoder, engine: jaxkv.Engine, text: Text, compiled: Any, policy: Any
) -> None:
    edits = some_edits(text(400))
    batch = make_batch(edits, policy, ROOM)
    exact, reused = (np.asarray(x) for x in compiled(model.params, batch))
    judge = Judge(decoder)
    for i, edit in enumerate(edits):
        source = engine.prefill(edit.old).sequence
        result = engine.edit(source, edit.new, policy)
        assert result.reuse.relocated == (sources(edit, policy) >= 0).sum() - result.reuse.matched
        served = engine.score(result.sequence, edit.continuation)
        np.testing.assert_allclose(reused[i], served, atol=ATOL)
        truth = judge.score(judge.edit(judge.prefill(edit.old), result), edit.continuation)
        np.testing.assert_allclose(reused[i], truth, atol=ATOL)
        fresh = judge.score(judge.prefill(edit.new), edit.continuation)
        np.testing.assert_allclose(exact[i], fresh, atol=ATOL)
        engine.release(source)
        engine.release(result.sequence)
    assert np.abs(reused - exact).max() > 100 * ATOL, "the two states differ"


def test_recomputing_everything_is_exact(model: jaxkv.Model, text: Text, compiled: Any) -> None:
    batch = make_batch(some_edits(text(400)), SCR(min_span=8, tail=200), ROOM)
    exact, reused = compiled(model.params, batch)
    np.testing.assert_allclose(reused, exact, atol=ATOL)


def test_windows_and_family_quirks_are_those_of_the_engine(text: Text, make_engine: Any) -> None:
    """A window shorter than what an edit keeps, and norms of queries and keys."""
    config = tiny_config(layer_types=("local", "global"), window=24, qk_norm=True)
    model = make_model(config)
    policy = POLICIES[0]
    edits = some_edits(text(400))
    exact, reused = jax.jit(lambda p, b: answers(p, b, config=config))(
        model.params, make_batch(edits, policy, ROOM)
    )
    engine = make_engine(model=model)
    for i, edit in enumerate(edits):
        source = engine.prefill(edit.old).sequence
        result = engine.edit(source, edit.new, policy)
        np.testing.assert_allclose(reused[i], engine.score(result.sequence, edit.continuation), atol=ATOL)
        fresh = engine.prefill(edit.new, reuse=False).sequence
        np.testing.assert_allclose(exact[i], engine.score(fresh, edit.continuation), atol=ATOL)
        for sequence in (source, result.sequence, fresh):
            engine.release(sequence)


def test_gradients_pass_through_the_stale_state(model: jaxkv.Model, text: Text, compiled: Any) -> None:
    """Against central differences: a gradient stopped at the kept K and V would fail."""
    batch = make_batch(some_edits(text(400)), POLICIES[0], ROOM)
    rng = np.random.default_rng(0)
    lora = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32), init_lora(model.config, 2, 0)
    )
    # Against fixed exact answers, so that only the reused ones move.
    fixed, _ = compiled(model.params, batch)

    @jax.jit
    @jax.value_and_grad
    def kl(lora: Any) -> jax.Array:
        _, reused = answers(merge(model.params, lora, 1.0), batch, config=model.config, remat=True)
        return divergences(fixed, reused, batch.targets)[0]

    value, gradient = kl(lora)
    assert value > 0
    direction = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), lora)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient, direction)))
    step = 1e-3
    ends = [
        kl(jax.tree.map(lambda x, d, s=sign: x + s * step * d, lora, direction))[0] for sign in (1.0, -1.0)
    ]
    assert slope == pytest.approx((float(ends[0]) - float(ends[1])) / (2 * step), rel=0.03)


def test_the_divergence_of_a_batch_is_that_of_the_library() -> None:
    rng = np.random.default_rng(1)
    exact, reused = rng.standard_normal((2, 3, 5, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, (3, 5)).astype(np.int32)
    kl, nll = divergences(jnp.asarray(exact), jnp.asarray(reused), jnp.asarray(targets))
    found = jaxkv.divergence(exact.reshape(15, -1), reused.reshape(15, -1))
    assert float(kl) == pytest.approx(found.kl.mean, rel=1e-5)
    rows = exact.reshape(15, -1).astype(np.float64)
    logs = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    assert float(nll) == pytest.approx(-logs[np.arange(15), targets.reshape(-1)].mean(), rel=1e-5)


def test_steps_lower_the_divergence_and_leave_zero_deltas_alone(model: jaxkv.Model, text: Text) -> None:
    shape = Shape.of(DRAW, POLICIES[0])
    assert shape.rows < shape.new - 9, "most of what is kept is not computed"
    batch = make_batch(some_edits(text(400))[:4], POLICIES[0], shape)
    state = init_state(init_lora(model.config, 4, 0), RECIPE)
    untouched = merge(model.params, state.lora, 2.0)
    for a, b in zip(jax.tree.leaves(untouched), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(a, b)
    step = make_step(model.config, RECIPE)
    losses = []
    for _ in range(25):
        state, found = step(state, model.params, batch)
        losses.append({k: float(v) for k, v in found._asdict().items()})
        assert losses[-1]["total"] == pytest.approx(losses[-1]["kl"] + 0.1 * losses[-1]["nll"], rel=1e-5)
    assert losses[-1]["kl"] < 0.7 * losses[0]["kl"]
    assert losses[-1]["nll"] < losses[0]["nll"]
    assert int(state.step) == 25


def test_a_merged_adapter_has_another_contract(model: jaxkv.Model, make_engine: Any, text: Text) -> None:
    lora = jax.tree.map(lambda x: x + jnp.float32(0.01), init_lora(model.config, 2, 0))
    merged = merged_model(model, lora, 2.0)
    plain, adapted = make_engine(), make_engine(model=merged)
    assert plain.contract.digest() != adapted.contract.digest()
    before = plain.contract.digest()
    plain.replace_params(merged.params, merged.weights_digest, lora_digest(lora))
    assert plain.contract.digest() not in (before, adapted.contract.digest())
    tokens = text(40)
    np.testing.assert_array_equal(plain.prefill(tokens).logits, adapted.prefill(tokens).logits)


# ---- whole runs ----------------------------------------------------------------------------------


def lines(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    records = map(json.loads, (path / "cases.jsonl").read_text().splitlines())
    return {(r["case"], r["policy"]): r for r in records}


def small(path: Path, **values: Any) -> Any:
    values = {"smoke": True, "held_out": 2, "steps": 5, "checkpoint_every": 2, **values}
    return adapt.run(defaults(**values), path, given=tuple(values))


def weights(path: Path) -> dict[str, bytes]:
    """Contents of the adapter's arrays, read by the library."""
    from experiments.adaptation.lora import load_tree
    from experiments.subject import tiny_model

    tree = load_tree(path / "adapter", init_lora(tiny_model().config, 8, 0))
    return {jax.tree_util.keystr(k): np.asarray(v).tobytes() for k, v in jax.tree.leaves_with_path(tree)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nobody interrupted."""
    path: Path = tmp_path_factory.mktemp("adapt") / "a"
    return small(path, export=True)


def test_a_run_judges_before_and_after_and_writes_what_can_be_served(
    whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = lines(whole.path)
    assert (whole.finished, whole.failed) == (9, 0)
    before, after = records["held-0", "before"], records["held-0", "after"]
    assert before["contract"] != after["contract"]
    assert before["divergence"]["kl"]["mean"] != after["divergence"]["kl"]["mean"]
    page = (whole.path / "report.html").read_text()
    for part in ("plain perplexity of held-out text", 'id="training"', 'id="held_out"', "random weights"):
        assert part in page
    served = jaxkv.load(whole.path / "model")
    assert (
        served.weights_digest
        != json.loads((whole.path / "config.json").read_text())["model"]["weights_digest"]
    )
    assert [p.name for p in (whole.path / "checkpoints").iterdir()] == ["step-000005"]

    monkeypatch.setattr(adapt, "load_subject", lambda _: pytest.fail("the model was loaded again"))
    assert small(whole.path, export=True).finished == 9


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_weights(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = 0
    save = adapt.RunDirectory.append

    def interrupted(self: Any, record: dict[str, Any]) -> None:
        nonlocal seen
        seen += record["policy"] == "train"
        if seen == 4:
            raise KeyboardInterrupt
        save(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(adapt.RunDirectory, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small(tmp_path / "b")
    assert "run the same command to resume" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "b" / "checkpoints").iterdir()] == ["step-000002"]
    small(tmp_path / "b")
    assert weights(tmp_path / "b") == weights(whole.path)
    for key, record in lines(whole.path).items():
        again = lines(tmp_path / "b")[key]
        assert {**again, "seconds": 0} == {**record, "seconds": 0}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"policy": "scr(min_span=8)|top_deviation(0.15,1)"},
            "asks the device or appends text, expected SCR",
        ),
        ({"policy": "scr"}, r"policy 'scr' keeps nothing behind any edit of 48 tokens"),
        ({"policy": "no_rotation(min_span=8)"}, "is a control, expected SCR and plain repairs"),
        ({"sizes": (200,)}, r"config\.sizes holds 200, expected fewer than the 48 tokens"),
        ({"warmup": 5}, r"config\.warmup is 5, expected fewer than config\.steps, 5"),
        ({"edits": "reorder"}, r"config\.edits holds 'reorder', expected one of delete, insert, replace"),
        ({"held_share": 1}, r"config\.held_share is 1\.0, expected a share below 1"),
        ({"held_share": 0.00001}, "held-out tokens, expected at least"),
        ({"learning_rate": 0}, r"config\.learning_rate is 0\.0, expected a number above 0"),
    ],
)
def test_what_cannot_be_adapted_is_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        small(tmp_path / "a", **values)
