"""Columns of a policy's row beyond its divergence: paired differences, tasks, rotation, steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments.records import Record
from jaxkv.divergence import bootstrap_interval


def mean_of(values: Iterable[Any]) -> float:
    """Mean of the numbers among `values`; nan if there are none."""
    kept = [float(v) for v in values if v is not None]
    return float(np.mean(kept)) if kept else math.nan


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and 95% bootstrap interval; nan where there is nothing, an interval of nan where there is one."""
    if len(values) < 2:
        return mean_of(values), math.nan, math.nan
    return float(np.mean(values)), *bootstrap_interval(np.array(values))


def differences(records: list[Record], exact: dict[str, Record], stale: dict[str, Record]) -> dict[str, Any]:
    """Paired over cases: ΔNLL and top-1 against exact, KL against plain reuse."""

    def of(record: Record, name: str) -> float:
        value: float = record["divergence"][name]
        return value

    delta = [of(r, "delta_nll") for r in records if r["divergence"]["delta_nll"] is not None]
    _, low, high = interval(delta)
    loss = [
        of(exact[r["case"]], "top1_agreement") - of(r, "top1_agreement")
        for r in records
        if r["case"] in exact
    ]
    gain = [
        stale[r["case"]]["divergence"]["kl"]["mean"] - r["divergence"]["kl"]["mean"]
        for r in records
        if r["case"] in stale
    ]
    return {
        "delta_nll_low": low,
        "delta_nll_high": high,
        **dict(zip(("top1_loss", "top1_loss_low", "top1_loss_high"), interval(loss), strict=True)),
        **dict(zip(("kl_gain", "kl_gain_low", "kl_gain_high"), interval(gain), strict=True)),
    }


def rotation_columns(records: list[Record]) -> dict[str, Any]:
    """What rotation costs, and what is left for staleness, on the cases where both are known."""
    both = [
        (r["rotation_kl"], r["divergence"]["kl"]["mean"]) for r in records if r.get("rotation_kl") is not None
    ]
    return {
        "rotation_kl": mean_of(a for a, _ in both),
        "staleness_kl": mean_of(b - a for a, b in both),
    }


def task_columns(records: list[Record], stale: dict[str, Record]) -> dict[str, Any]:
    """Recall over the items that count, and what is left of deleted secrets."""
    recall = [r for r in records if (r.get("task") or {}).get("kind") == "recall" and r["task"]["counts"]]
    residue = [r["task"] for r in records if (r.get("task") or {}).get("kind") == "residue"]
    recovered, low, high = margin_recovery(recall, stale)
    return {
        "items": len(recall),
        "right": mean_of(r["task"]["right"] for r in recall),
        "says_stale": mean_of(r["task"]["says_stale"] for r in recall),
        "flip_rate": mean_of(r["task"]["flipped"] for r in recall),
        "margin_recovery": recovered,
        "margin_recovery_low": low,
        "margin_recovery_high": high,
        "residue_rank": mean_of(t["rank"] - t["exact_rank"] for t in residue),
        "residue_logprob": mean_of(t["logprob"] - t["exact_logprob"] for t in residue),
        "residue_said": mean_of(t["said"] for t in residue),
        "twin_kl": mean_of(r.get("twin_kl") for r in records),
    }


LEAST_LOSS = 0.01  # nats; rounding moves a margin by some 1e-5


def margin_recovery(records: list[Record], stale: dict[str, Record]) -> tuple[float, float, float]:
    """Σ(margin − stale) / Σ(exact − stale) over items, and its 95% bootstrap interval over items.

    A ratio of sums: a single item whose stale margin is already exact must not decide. nan where plain
    reuse lost nothing that could be recovered, less than `LEAST_LOSS` an item.
    """
    rows = [
        (r["task"]["margin"] - s["margin"], r["task"]["exact_margin"] - s["margin"])
        for r in records
        if "margin" in r["task"] and (s := (stale.get(r["case"]) or {}).get("task"))
    ]
    if not rows:
        return math.nan, math.nan, math.nan
    got, lost = np.array(rows).T
    if abs(lost.sum()) < LEAST_LOSS * len(rows):
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(0)
    draws = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=2000)
    under = draws @ lost
    enough = np.abs(under) >= LEAST_LOSS
    ratios = (draws @ got)[enough] / under[enough]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(got.sum() / lost.sum()), float(low), float(high)


def recovery_by_distance(records: list[Record], stale: dict[str, Record]) -> dict[str, float]:
    """Margin recovery for each way to ask and dependency distance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        task = record.get("task") or {}
        if task.get("kind") == "recall" and task["counts"]:
            groups.setdefault(f"{record['edit']} {task['distance']}", []).append(record)
    return {name: margin_recovery(group, stale)[0] for name, group in groups.items()}


def steps(
    of: dict[str, list[Record]], policies: list[str]
) -> dict[str, dict[str, tuple[tuple[int, float], ...]]]:
    """Figures of measured turns by how many edits led to them; dtypes of pages stand apart."""
    result: dict[str, dict[str, tuple[tuple[int, float], ...]]] = {}
    for key in ("kl", "key_change", "kv_bytes_moved", "ms"):
        table: dict[str, tuple[tuple[int, float], ...]] = {}
        for policy in policies:
            values: dict[str, dict[int, list[float]]] = {}
            for record in of[policy]:
                dtype = record.get("kv_dtype")
                name = f"{policy} · {dtype}" if dtype else policy
                for number, step in enumerate(record.get("steps") or [], 1):
                    if step.get(key) is not None and "kl" in step:
                        values.setdefault(name, {}).setdefault(number, []).append(step[key])
            for name, points in values.items():
                table[name] = tuple((n, float(np.mean(v))) for n, v in sorted(points.items()))
        result[key] = table
    return result


def pages_columns(records: list[Record]) -> dict[str, Any]:
    """What the pages' dtype does by itself, and together with reuse, on the cases that chose one."""
    found = [r["pages"] for r in records if r.get("pages")]
    return {
        "pages_kl": mean_of(p["kl"] for p in found),
        "with_pages_kl": mean_of(p["with_reuse_kl"] for p in found),
    }


def healing(records: list[Record]) -> tuple[tuple[float, float], ...]:
    """Mean KL by the share of stale tokens that was healed, over cases that were."""
    points: dict[float, list[float]] = {}
    for record in records:
        for share, kl in record.get("healing") or []:
            points.setdefault(round(share, 3), []).append(kl)
    return tuple((share, float(np.mean(values))) for share, values in sorted(points.items()))
