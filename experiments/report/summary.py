"""From the lines of `cases.jsonl` to the figures of the report. Pure; nothing is measured here."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from experiments.records import NOISE, Record
from experiments.report.columns import (
    differences,
    healing,
    mean_of,
    pages_columns,
    recovery_by_distance,
    rotation_columns,
    steps,
    task_columns,
)
from experiments.report.pages import PagesRow, pages_rows
from jaxkv.divergence import DISTANCE_BINS, bootstrap_interval, by_distance, standard_error

BIN_LABELS = (
    *(f"{lo}–{hi - 1}" for lo, hi in itertools.pairwise(DISTANCE_BINS)),
    f"{DISTANCE_BINS[-1]}+",
)
STATES = ("keys", "values", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """One policy over all its finished cases. `_se` is the standard error over cases."""

    policy: str
    kind: str  # "exact", or "approximate" if any case was
    cases: int
    failed: int
    kl: float  # KL(exact‖approx), nats per token, mean over cases
    kl_se: float
    kl_low: float  # 95% bootstrap interval of the mean over cases
    kl_high: float
    kl_p50: float  # over all tokens of all cases
    kl_p95: float
    kl_max: float
    reverse_kl: float
    noise_multiple: float  # kl / noise floor; nan without a floor
    top1: float
    top1_se: float
    top5: float
    delta_nll: float  # nats per token
    delta_nll_se: float
    perplexity_ratio: float
    cosine: float
    prompt: float  # tokens, mean over cases: prompt = matched + relocated + forwarded + dropped
    matched: float
    relocated: float
    forwarded: float
    dropped: float
    flops: float  # mean over cases
    flops_relative: float  # all FLOPs of the policy / all FLOPs of exact on the same cases
    ttft_ms: float  # wall clock of the edit until its logits are there
    ttft_se: float
    plan_ms: float
    relocate_ms: float
    forward_ms: float
    speedup: float  # all milliseconds of exact / all of the policy, same cases, same run
    greedy_identical: float  # share of cases whose greedy text equals that of exact; nan if not run
    greedy_match: float  # tokens before greedy text first differs, mean over cases
    noise_multiple_nll: float  # |delta_nll| / that of the noise floor
    rotation_kl: float  # KL that rotating exact KV causes, on the cases where it was measured
    staleness_kl: float  # kl − rotation_kl on the same cases
    delta_nll_low: float  # 95% bootstrap interval over cases of the paired difference to exact
    delta_nll_high: float
    top1_loss: float  # top-1 agreement lost against exact in the same run, paired
    top1_loss_low: float
    top1_loss_high: float
    kl_gain: float  # KL of plain scr − KL of this policy, paired over cases; nan without scr
    kl_gain_low: float
    kl_gain_high: float
    items: int  # task items that count: exact answers right, the model alone does not
    right: float  # share of them that the policy answers right
    says_stale: float  # share of them answered with what was true before the edit
    flip_rate: float  # share of them answered otherwise than exact does
    margin_recovery: float  # Σ(margin − scr's) / Σ(exact's − scr's) over them
    margin_recovery_low: float  # 95% bootstrap interval over items
    margin_recovery_high: float
    residue_rank: float  # mean rank of a deleted secret among candidates, minus that under exact
    residue_logprob: float  # its log-probability, minus that under exact, nats
    residue_said: float  # share of deleted secrets that are said
    twin_kl: float  # KL between the answers of two pasts of the same text, nats
    pages_kl: float  # KL(exact over float32 pages ‖ exact over the pages' dtype); nan where none was chosen
    with_pages_kl: float  # KL(exact over float32 pages ‖ this policy over the pages' dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything that the report shows."""

    rows: tuple[PolicyRow, ...]
    noise: float  # mean KL of exact against exact under another chunking; nan if not measured
    noise_se: float
    noise_cases: int
    by_position: dict[str, dict[str, float]]  # policy -> position -> mean KL
    by_edit: dict[str, dict[str, float]]  # policy -> edit type -> mean KL
    by_edit_se: dict[str, dict[str, float]]  # its standard error over cases
    kl_by_distance: dict[str, tuple[float, ...]]  # policy -> mean KL in each distance bin
    kl_by_distance_se: dict[str, tuple[float, ...]]  # its standard error over the cases' own means
    state_by_distance: dict[str, dict[str, tuple[float, ...]]]  # state -> policy -> error in each bin
    state_by_layer: dict[str, dict[str, tuple[float, ...]]]  # state -> policy -> error of each layer
    flops_by_cause: dict[str, dict[str, float]]  # policy -> cause -> mean FLOPs
    by_step: dict[str, dict[str, tuple[tuple[int, float], ...]]]  # figure -> policy -> (edits, mean)
    healing: dict[str, tuple[tuple[float, float], ...]]  # policy -> (healed share, mean KL)
    recovery: dict[str, dict[str, float]]  # policy -> "way, distance" -> margin recovery
    chosen: dict[str, dict[str, int]]  # policy that chooses -> what it chose -> cases
    pages: tuple[PagesRow, ...]  # by dtype of the pages and policy; empty where no case chose another
    failures: tuple[tuple[str, str, str], ...]  # case, policy, error

    def row(self, policy: str) -> PolicyRow | None:
        """The row of `policy`, if it finished a case."""
        return next((row for row in self.rows if row.policy == policy), None)


def summarize(records: Sequence[Record], policies: Sequence[str]) -> Summary:
    """Aggregates `records`; rows come in the order of `policies`."""
    done = [r for r in records if r["status"] == "ok"]
    noise = np.array([r["divergence"]["kl"]["mean"] for r in done if r["policy"] == NOISE])
    floor = float(noise.mean()) if len(noise) else math.nan
    exact = {r["case"]: r for r in done if r["policy"] == "exact"}
    of = {policy: [r for r in done if r["policy"] == policy] for policy in policies}
    failed = [r for r in records if r["status"] != "ok"]
    finished = [policy for policy in policies if of[policy]]
    plain = next((p for p in finished if p.split("(")[0] == "scr" and "|" not in p), "")
    stale = {r["case"]: r for r in of.get(plain, [])}
    nll = [abs(r["divergence"]["delta_nll"] or 0.0) for r in done if r["policy"] == NOISE]
    floors = floor, float(np.mean(nll)) if nll else math.nan
    return Summary(
        rows=tuple(
            _row(p, of[p], exact, stale, floors, sum(r["policy"] == p for r in failed)) for p in finished
        ),
        noise=floor,
        noise_se=standard_error(noise),
        noise_cases=len(noise),
        by_position={p: _group(of[p], "position") for p in finished},
        by_edit={p: _group(of[p], "edit") for p in finished},
        by_edit_se={p: _group(of[p], "edit", standard_error) for p in finished},
        kl_by_distance={p: _kl_by_distance(of[p]) for p in finished},
        kl_by_distance_se={p: _kl_by_distance_se(of[p]) for p in finished},
        state_by_distance={s: _states(of, finished, s, "by_distance") for s in STATES},
        state_by_layer={s: _states(of, finished, s, "per_layer") for s in STATES},
        flops_by_cause={p: _causes(of[p]) for p in finished},
        by_step=steps(of, finished),
        healing={p: points for p in finished if (points := healing(of[p]))},
        recovery={p: r for p in finished if p != plain and (r := recovery_by_distance(of[p], stale))},
        chosen={p: c for p in finished if (c := _chosen(p, of[p]))},
        pages=pages_rows({p: of[p] for p in finished}),
        failures=tuple((r["case"], r["policy"], r["error"]) for r in failed),
    )


def to_csv(summary: Summary) -> str:
    """`summary.csv`: one line a policy, full precision, empty where there is no figure."""
    out = io.StringIO()
    names = [f.name for f in dataclasses.fields(PolicyRow)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "noise_floor_kl", "noise_floor_kl_se"])
    for row in summary.rows:
        values = [getattr(row, name) for name in names] + [summary.noise, summary.noise_se]
        writer.writerow(["" if isinstance(v, float) and math.isnan(v) else v for v in values])
    return out.getvalue()


def _row(
    policy: str,
    records: list[Record],
    exact: dict[str, Record],
    stale: dict[str, Record],
    floors: tuple[float, float],
    failed: int,
) -> PolicyRow:
    floor, nll_floor = floors

    def values(*path: str) -> Any:
        return np.array([_at(r, path) for r in records], np.float64)

    kl, top1 = values("divergence", "kl", "mean"), values("divergence", "top1_agreement")
    delta, ttft = values("divergence", "delta_nll"), values("timings_ms", "first_token")
    tokens = np.concatenate([r["kl_tokens"] for r in records])
    low, high = bootstrap_interval(kl)
    paired = [(r, exact[r["case"]]) for r in records if r["case"] in exact]
    greedy = [r["greedy"]["identical"] for r in records if r["greedy"] is not None]
    p50, p95 = np.percentile(tokens, (50, 95))
    return PolicyRow(
        policy=policy,
        kind="approximate" if any(r["kind"] == "approximate" for r in records) else "exact",
        cases=len(records),
        failed=failed,
        kl=float(kl.mean()),
        kl_se=standard_error(kl),
        kl_low=low,
        kl_high=high,
        kl_p50=float(p50),
        kl_p95=float(p95),
        kl_max=float(tokens.max()),
        reverse_kl=float(values("divergence", "reverse_kl", "mean").mean()),
        noise_multiple=float(kl.mean()) / floor if floor > 0 else math.nan,
        top1=float(top1.mean()),
        top1_se=standard_error(top1),
        top5=float(values("divergence", "top5_overlap").mean()),
        delta_nll=float(delta.mean()),
        delta_nll_se=standard_error(delta),
        perplexity_ratio=math.exp(min(float(delta.mean()), 700.0)),
        cosine=float(values("divergence", "logit_cosine").mean()),
        **{  # type: ignore[arg-type]
            name: float(values("reuse", name).mean())
            for name in ("prompt", "matched", "relocated", "forwarded", "dropped")
        },
        flops=float(values("flops").mean()),
        flops_relative=_ratio((a["flops"], b["flops"]) for a, b in paired),
        ttft_ms=float(ttft.mean()),
        ttft_se=standard_error(ttft),
        **{  # type: ignore[arg-type]
            f"{part}_ms": float(np.mean([r["timings_ms"].get(part, 0.0) for r in records]))
            for part in ("plan", "relocate", "forward")
        },
        speedup=_ratio((b["timings_ms"]["first_token"], a["timings_ms"]["first_token"]) for a, b in paired),
        greedy_identical=float(np.mean(greedy)) if greedy else math.nan,
        greedy_match=mean_of(r["greedy"].get("match") for r in records if r["greedy"]),
        noise_multiple_nll=abs(float(delta.mean())) / nll_floor if nll_floor > 0 else math.nan,
        **differences(records, exact, stale),
        **rotation_columns(records),
        **task_columns(records, stale),
        **pages_columns(records),
    )


def _chosen(policy: str, records: list[Record]) -> dict[str, int]:
    """How often a policy that chooses chose what."""
    names = [r.get("chosen", policy) for r in records]
    # What chooses is recorded as "policy: choice", or as itself where it fell back; a policy of one's own is
    # recorded as it prints itself, which need not be how the run names it.
    if not any(": " in name for name in names):
        return {}
    parts = [name.partition(": ")[2] or "exact" for name in names]
    return {name: parts.count(name) for name in dict.fromkeys(parts)}


def _at(record: Record, path: tuple[str, ...]) -> float:
    value: Any = record
    for key in path:
        value = value[key]
    return math.nan if value is None else float(value)


def _ratio(pairs: Iterable[tuple[float, float]]) -> float:
    both = list(pairs)
    over, under = sum(a for a, _ in both), sum(b for _, b in both)
    return over / under if under else math.nan


def _group(records: list[Record], key: str, figure: Callable[[Any], Any] = np.mean) -> dict[str, float]:
    """Mean KL (or another figure of the cases' KL) by the value of `key`, in order of first appearance."""
    groups: dict[str, list[float]] = {}
    for record in records:
        groups.setdefault(record[key], []).append(record["divergence"]["kl"]["mean"])
    return {name: float(figure(np.array(values))) for name, values in groups.items()}


def _kl_by_distance(records: list[Record]) -> tuple[float, ...]:
    """Mean KL of continuation tokens by their distance from the last seam before them."""
    values: list[float] = []
    distances: list[int] = []
    for record in records:
        if record["distance"] is not None:
            values += record["kl_tokens"]
            distances += range(record["distance"], record["distance"] + len(record["kl_tokens"]))
    if not values:
        return (math.nan,) * len(DISTANCE_BINS)
    return tuple(b.mean for b in by_distance(np.array(values), np.array(distances)))


def _kl_by_distance_se(records: list[Record]) -> tuple[float, ...]:
    """Standard error over cases: tokens of one case are not independent of each other."""
    rows = [_kl_by_distance([record]) for record in records]
    columns = (np.array(column)[np.isfinite(column)] for column in zip(*rows, strict=True))
    return tuple(standard_error(column) for column in columns)


def _states(
    of: dict[str, list[Record]], policies: list[str], state: str, figure: str
) -> dict[str, tuple[float, ...]]:
    """Mean relative error over cases, per layer, or per distance bin (mean over layers too)."""
    result = {}
    for policy in policies:
        tables = [
            np.array(r["layers"][state][figure], np.float64)  # None becomes nan
            for r in of[policy]
            if r["layers"] and r["layers"][state] and r["layers"][state][figure] is not None
        ]
        rows = [t.mean(axis=0) if t.ndim == 2 else t for t in tables]
        if rows:
            result[policy] = tuple(_nanmean(column) for column in np.array(rows).T)
    return result


def _nanmean(values: Any) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if len(kept) else math.nan


def _causes(records: list[Record]) -> dict[str, float]:
    total: dict[str, float] = {}
    for record in records:
        for cause, flops in record["ledger"]["flops_by_cause"].items():
            total[cause] = total.get(cause, 0.0) + flops / len(records)
    return total
