"""Keys after hundreds of moves, partial rotary and YaRN included, and the positions they may not reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judge import ATOL, Judge
from reference import Decoder, decoder_of
from tiny import make_model, tiny_config
from tolerances import tolerance

import jaxkv
from jaxkv import SCR, Composed

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
YARN = jaxkv.RopeConfig(
    rotary_dim=16, scaling="yarn", factor=4.0, original_max_positions=64, magnitude=1.1386
)
PARTIAL = jaxkv.RopeConfig(theta=10_000.0, rotary_dim=8)
DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn"]
FORMS = {
    "view": SCR(min_span=8, tail=0),
    "copy": SCR(form="copy", min_span=8, tail=0),
    "composed": Composed(min_span=8, tail=0),
}


def errors_after(
    engine: jaxkv.Engine, text: Text, policy: jaxkv.Policy, moves: int
) -> tuple[list[float], list[float]]:
    """‖K − K at birth‖/‖K at birth‖ of a span after each move, and the largest change of a norm ratio."""
    old = text(90)
    sequence = engine.prefill(old, reuse=False).sequence
    born = engine.read_kv(sequence).keys[:, 30:80].astype(np.float64)
    rng = np.random.default_rng(1)
    errors, ratios = [], []
    for _ in range(moves):
        piece = rng.integers(0, 97, int(rng.integers(1, 40))).astype(np.int32)
        result = engine.edit(sequence, np.concatenate([old[:30], piece, old[30:]]), policy)
        engine.release(sequence)
        sequence = result.sequence
        at = np.arange(30, 80) + len(piece)
        now = engine.read_kv(sequence).keys[:, at].astype(np.float64)
        errors.append(float(np.sqrt(((now - born) ** 2).sum() / (born**2).sum())))
        ratio = np.linalg.norm(now, axis=-1) / np.linalg.norm(born, axis=-1)
        ratios.append(float(np.abs(ratio - 1).max()))
    return errors, ratios


def check_moves(engine: jaxkv.Engine, text: Text, moves: int) -> None:
    view, _ = errors_after(engine, text, FORMS["view"], moves)
    assert set(view) == {0.0}
    copy, _ = errors_after(engine, text, FORMS["copy"], moves)
    assert max(copy) <= 1.1 * max(copy[:8])
    composed, _ = errors_after(engine, text, FORMS["composed"], moves)
    assert composed[-1] > moves**0.5 / 4 * max(copy), "independent roundings add up as a square root"


@pytest.mark.parametrize(("dtype", "moves"), [("float32", 20), ("bfloat16", 20), ("int8", 12)])
def test_many_moves_cost_no_more_than_one(make_engine: Engines, text: Text, dtype: str, moves: int) -> None:
    """CASE 25: the view keeps every bit, the copy rounds once, only the control that composes drifts."""
    engine = make_engine(kv_dtype=dtype, prefix_cache=False, poison_free_pages=False)
    check_moves(engine, text, moves)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_256_moves_cost_no_more_than_one(make_engine: Engines, text: Text, dtype: str) -> None:
    """CASE 25, and the gate of the evaluation: K error after 256 moves is at most 1.1 times that of one."""
    engine = make_engine(kv_dtype=dtype, prefix_cache=False, poison_free_pages=False)
    check_moves(engine, text, 256)


@pytest.mark.parametrize("form", ["view", "copy"])
def test_yarn_norms_stay_after_any_number_of_moves(make_engine: Engines, text: Text, form: str) -> None:
    """CASE 18."""
    model = make_model(tiny_config(rope=YARN))
    _, ratios = errors_after(
        make_engine(model=model, prefix_cache=False, poison_free_pages=False), text, FORMS[form], 12
    )
    assert max(ratios) <= tolerance("key_norm_ratio")


@pytest.mark.parametrize("form", ["view", "copy"])
def test_partial_rotary_edits_equal_float64(make_engine: Engines, text: Text, form: str) -> None:
    """CASE 20 through the engine: what passes through a rotation keeps its bits, the rest is right."""
    model = make_model(tiny_config(rope=PARTIAL))
    decoder = decoder_of(model.params, model.config)
    engine, judge, old = make_engine(model=model), Judge(decoder), text(120)
    first, state = engine.prefill(old), judge.prefill(old)
    new = np.concatenate([old[:30], text(7, seed=1), old[41:]]).astype(np.int32)
    result = engine.edit(first.sequence, new, FORMS[form])
    np.testing.assert_allclose(result.logits, judge.edit(state, result).logits, atol=ATOL)
    moved = np.arange(37, 115)
    a, b = engine.read_kv(first.sequence).keys, engine.read_kv(result.sequence).keys
    np.testing.assert_array_equal(a[:, moved + 4, :, 8:], b[:, moved, :, 8:])


@pytest.mark.parametrize("policy", [*FORMS.values(), jaxkv.Erratum()], ids=str)
def test_an_edit_that_ends_beyond_the_models_positions_is_refused(
    make_engine: Engines, text: Text, policy: Any
) -> None:
    """CASE 26: not clamped, not silent, and the source stays as it was."""
    engine = make_engine(num_pages=256)
    old = text(500)
    first = engine.prefill(old)
    before = engine.read_kv(first.sequence)
    with pytest.raises(jaxkv.CapacityError, match="512 positions"):
        engine.edit(first.sequence, np.concatenate([text(20, seed=1), old]), policy)
    np.testing.assert_array_equal(engine.read_kv(first.sequence).keys, before.keys)
    if isinstance(policy, jaxkv.Erratum):  # what is asked for fits, what is written in its stead does not
        with pytest.raises(jaxkv.CapacityError, match="512 positions"):
            engine.edit(first.sequence, np.concatenate([old[:200], old[260:]]), policy)


def test_a_model_whose_rotations_do_not_compose_is_told_to_recompute(
    make_engine: Engines, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE 23: refused with the reason in either form; what does not move, and exact, go on."""
    monkeypatch.setattr(jaxkv.ModelConfig, "relocation_refused", "its angles depend on the length")
    engine, old = make_engine(), text(120)
    first = engine.prefill(old).sequence
    shorter = np.concatenate([old[:30], old[41:]])
    for policy in (FORMS["view"], FORMS["copy"]):
        with pytest.raises(jaxkv.RelocationError, match="its angles depend on the length"):
            engine.edit(first, shorter, policy)
    assert engine.edit(first, shorter, jaxkv.Exact()).reuse.kind == "exact"
    replaced = np.concatenate([old[:30], text(11, seed=1), old[41:]])
    assert engine.edit(first, replaced, FORMS["view"]).reuse.relocated > 0


def test_moved_tokens_that_lie_too_scattered_are_copied_together(
    make_engine: Engines, decoder: Decoder, text: Text
) -> None:
    """A page with one token costs a table entry like any other: past four a page
    and a block they are joined."""
    engine = make_engine(num_pages=256, prefix_cache=False, poison_free_pages=False)
    tokens, judge = text(120), Judge(decoder)
    sequence, siblings = engine.prefill(tokens[:20]).sequence, []
    for token in tokens[20:]:
        siblings.append(engine.extend(sequence, [token]).sequence)  # it goes on in the page
        sequence = engine.extend(sequence, [token]).sequence  # and this one starts another
    assert len(sequence.segments) > 100
    policy = SCR(min_span=8, tail=0)
    few, many = (engine.edit(sequence, np.append(np.int32(1), tokens[:n]), policy) for n in (60, 120))
    assert few.sequence.copies is None
    assert many.sequence.copies is not None
    assert len(many.sequence.copies) < 20
    assert many.reuse.ledger.kv_bytes_moved > 0
    state = judge.edit(judge.prefill(tokens), many)
    np.testing.assert_allclose(many.logits, state.logits, atol=ATOL)
