"""Columns beyond divergence, from records whose figures are worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxkv
from experiments.figures import Reference, compare, describe, greedy_match, homes, key_change, task_figures
from experiments.report.columns import (
    differences,
    margin_recovery,
    recovery_by_distance,
    rotation_columns,
    steps,
    task_columns,
)
from experiments.report.pages import pages_rows
from experiments.workloads.case import Case, Task
from jaxkv.results import KVState


def item(case: str, margin: float, exact: float, **more: Any) -> dict[str, Any]:
    task = {
        "kind": "recall",
        "distance": 0,
        "counts": True,
        "right": margin > 0,
        "says_stale": False,
        "flipped": margin < 0,
        "margin": margin,
        "exact_margin": exact,
    }
    return {"case": case, "edit": "direct", "task": {**task, **more}}


def test_margin_recovery_is_a_ratio_of_sums_over_items_that_count() -> None:
    stale = {r["case"]: r for r in (item("a", 1.0, 5.0), item("b", 3.0, 4.0), item("c", -9.0, 9.0))}
    mine = [item("a", 4.0, 5.0), item("b", 3.5, 4.0), item("c", 9.0, 9.0, counts=False)]
    columns = task_columns(mine, stale)
    assert columns["items"] == 2
    assert columns["margin_recovery"] == pytest.approx((3.0 + 0.5) / (4.0 + 1.0))
    assert 0.5 <= columns["margin_recovery_low"] <= 0.7 <= columns["margin_recovery_high"] <= 0.75
    assert columns["right"] == 1
    assert recovery_by_distance(mine, stale) == {"direct 0": pytest.approx(0.7)}
    same = {r["case"]: r for r in mine[:2]}
    at_exact = [item("a", 5.0, 5.0), item("b", 4.0, 4.0)]
    assert margin_recovery(at_exact, same)[0] == pytest.approx(1.0)
    assert math.isnan(margin_recovery([item("a", 1.0, 1.0)], {"a": item("a", 1.0, 1.0)})[0])
    # Rounding is no loss: dividing by it made a recovery of minus six million.
    rounding = {"a": item("a", 10.21, 10.21)}
    assert math.isnan(margin_recovery([item("a", -4.0, 10.21 + 2e-6)], rounding)[0])
    assert math.isnan(margin_recovery([], {})[0])


def divergence_of(case: str, kl: float, delta: float, top1: float) -> dict[str, Any]:
    figures = {"kl": {"mean": kl}, "delta_nll": delta, "top1_agreement": top1}
    return {"case": case, "divergence": figures}


def test_differences_are_paired_by_case() -> None:
    exact = {c: divergence_of(c, 0.0, 0.0, 1.0) for c in "ab"}
    scr = {"a": divergence_of("a", 0.4, 0.1, 0.9), "b": divergence_of("b", 0.2, 0.1, 0.8)}
    mine = [divergence_of("b", 0.1, 0.02, 0.95), divergence_of("a", 0.1, 0.04, 0.9)]
    found = differences(mine, exact, scr)
    assert found["kl_gain"] == pytest.approx((0.3 + 0.1) / 2)
    assert found["kl_gain_low"] == pytest.approx(0.1)
    assert found["kl_gain_high"] == pytest.approx(0.3)
    assert found["top1_loss"] == pytest.approx(0.075)
    assert found["delta_nll_low"] == pytest.approx(0.02)
    assert math.isnan(differences(mine, {}, {})["kl_gain"])


def test_rotation_and_staleness_are_compared_on_the_same_cases() -> None:
    records = [
        {**divergence_of("a", 0.5, 0, 1), "rotation_kl": 0.1},
        {**divergence_of("b", 9.0, 0, 1), "rotation_kl": None},
    ]
    assert rotation_columns(records) == {"rotation_kl": 0.1, "staleness_kl": pytest.approx(0.4)}


def test_steps_are_means_over_cases_by_number_of_edits_and_dtype() -> None:
    def run(dtype: str, *kl: float | None) -> dict[str, Any]:
        return {"kv_dtype": dtype, "steps": [{"kl": x} if x is not None else {} for x in kl]}

    found = steps({"scr": [run("", 1.0, None, 3.0), run("", 2.0, None, 5.0), run("bfloat16", 7.0)]}, ["scr"])
    assert found["kl"] == {"scr": ((1, 1.5), (3, 4.0)), "scr · bfloat16": ((1, 7.0),)}
    assert found["key_change"] == {}


def test_greedy_text_is_followed_to_its_first_difference() -> None:
    a = np.array([1, 2, 3, 4], np.int32)
    assert greedy_match(a, a) == {"identical": True, "first_divergence": None, "match": 4, "tokens": 4}
    found = greedy_match(a, np.array([1, 2, 9, 4], np.int32))
    assert (found["identical"], found["first_divergence"], found["match"]) == (False, 2, 2)
    assert greedy_match(None, a) is None


def test_a_task_is_read_from_the_last_row_and_counts_only_if_the_context_was_needed() -> None:
    exact = np.zeros((2, 6), np.float32)
    exact[-1] = [0, 3, 1, 0, 0, 0]
    mine = np.zeros((2, 6), np.float32)
    mine[-1] = [0, 1, 2, 0, 0, 0]
    bare = np.array([9, 0, 0, 0, 0, 0], np.float32)
    reference = Reference(logits=(exact,), state=None, attention=None, greedy=None, bare=bare)
    task = Task(kind="recall", answer=1, stale=2, candidates=(1, 2, 3), distance=7)
    found = task_figures(task, reference, mine)
    assert (found["margin"], found["exact_margin"]) == (-1.0, 2.0)
    assert (found["right"], found["exact_right"], found["says_stale"], found["flipped"]) == (
        False, True, True, True,
    )  # fmt: skip
    assert found["counts"]
    known = Reference(logits=(exact,), state=None, attention=None, greedy=None, bare=exact[-1])
    assert not task_figures(task, known, mine)["counts"]
    residue = Task(kind="residue", answer=2, candidates=(1, 2, 3))
    left = task_figures(residue, reference, mine)
    assert (left["rank"], left["exact_rank"], left["said"]) == (1, 2, True)
    assert left["logprob"] == pytest.approx(2 - math.log(4 + math.e + math.e**2))


def test_what_a_dtype_costs_alone_stands_beside_what_reuse_costs() -> None:
    """Against the definition: three divergences of the same rows."""
    rng = np.random.default_rng(0)
    wide, narrow, mine = (rng.standard_normal((5, 7)).astype(np.float32) for _ in range(3))
    text = np.arange(5, dtype=np.int32)
    none = np.zeros(3, np.int32)
    case = Case(
        id="a", edit="delete", position="head", size=1, context=3, document=0, old=none, new=none,
        continuation=text, seams=(), kv_dtype="int8",
    )  # fmt: skip
    reference = Reference(logits=(narrow,), wide=(wide,), state=None, attention=None, greedy=None, bare=None)
    found = compare(case, reference, [mine])
    assert found["divergence"]["kl"]["mean"] == pytest.approx(kl(narrow, mine))
    assert found["pages"]["kl"] == pytest.approx(kl(wide, narrow))
    assert found["pages"]["with_reuse_kl"] == pytest.approx(kl(wide, mine))
    assert compare(case, dataclasses.replace(reference, wide=None), [mine])["pages"] is None
    record = {**describe(case, "scr"), **found, "kv_token_bytes": 160}
    plain = {**record, "kv_dtype": "float32", "pages": None, "kv_token_bytes": 512}
    rows = pages_rows({"scr": [plain, record]})
    assert [(r.dtype, r.token_bytes, r.cases) for r in rows] == [("float32", 512, 1), ("int8", 160, 1)]
    reuse = kl(narrow, mine)
    assert (rows[0].pages_kl, rows[0].kl, rows[0].both_kl) == pytest.approx((0, reuse, reuse))
    assert (rows[1].pages_kl, rows[1].kl, rows[1].both_kl) == pytest.approx(
        (kl(wide, narrow), reuse, kl(wide, mine))
    )
    assert pages_rows({"scr": [plain]}) == ()


def kl(a: np.ndarray, b: np.ndarray) -> float:
    """Mean KL(softmax a ‖ softmax b) in nats, by the definition."""
    p, q = (np.exp(x.astype(np.float64)) for x in (a, b))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return float((p * np.log(p / q)).sum(-1).mean())


def test_key_change_compares_moved_keys_with_those_at_birth() -> None:
    born = KVState(
        positions=np.arange(4, dtype=np.int32),
        keys=np.arange(1, 9, dtype=np.float32).reshape(1, 4, 1, 2),
        values=np.zeros((1, 4, 1, 2), np.float32),
    )
    # Position 0 never moved, 5 and 6 stood at 1 and 2, 7 was computed since.
    home = np.array([0, -1, -1, -1, -1, 1, 2, -1], np.int32)
    now = KVState(
        positions=np.array([0, 5, 6, 7], np.int32),
        keys=born.keys + np.array([9, 0, 2, 0], np.float32)[None, :, None, None],
        values=born.values,
    )
    # Keys (3, 4) and (5, 6), of which the second grew by (2, 2).
    assert key_change(born, now, home) == pytest.approx(math.sqrt(8 / (9 + 16 + 25 + 36)))
    assert key_change(born, now, np.full(8, -1, np.int32)) is None


def test_homes_follow_tokens_through_edits_until_they_are_computed_again(
    engine: jaxkv.Engine, text: Callable[..., np.ndarray]
) -> None:
    old = text(120)
    policy = jaxkv.SCR(min_span=8, tail=4)
    first = engine.prefill(old).sequence
    there = engine.edit(first, np.concatenate([old[:30], text(6, seed=1), old[30:]]), policy)
    home = homes(np.arange(120, dtype=np.int32), there)
    expected = [*range(30), *[-1] * 6, *range(30, 116), *[-1] * 4]
    assert home.tolist() == expected
    back = engine.edit(there.sequence, old[:118], policy)
    assert homes(home, back).tolist() == [*range(30), *range(30, 114), *[-1] * 4]
