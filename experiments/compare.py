"""Compares runs: same cases, paired differences. Pure reading; nothing is measured here.

python -m experiments.launch --config=configs/quickstart.py --config.compare=runs/a,runs/b

Every other run is compared with the first one. What they may differ in on purpose is stated:
`--config.across=model`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.records import NOISE, Record, RunDirectory, require_complete
from experiments.report.columns import interval, mean_of
from jaxkv.errors import ConfigError

# What must agree unless it is stated, and where a run's config.json says it.
_AGREE = {
    "model": ("model.weights_digest", "model.tokenizer_digest"),
    "corpus": ("corpus.sha256",),
    "workload": ("config.workload", "config.seed", "config.continuation", "config.add_bos"),
}
_TOLD = ("model", "corpus", "environment", "config")  # parts of config.json whose differences are listed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory that holds a finished or an interrupted run."""

    label: str  # its directory's name; numbered where two are called the same
    document: Mapping[str, Any]  # config.json
    records: tuple[Record, ...]  # finished measurements

    @property
    def noise(self) -> float:
        """Noise floor: mean KL of exact against exact under another chunking, nats; nan without one."""
        return mean_of(r["divergence"]["kl"]["mean"] for r in self.records if r["policy"] == NOISE)

    def of(self, policy: str) -> dict[str, Record]:
        """Finished cases of a policy, by case id."""
        return {r["case"]: r for r in self.records if r["policy"] == policy}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One policy in two runs, over the cases that both finished. Intervals are 95%, over cases."""

    policy: str
    base: str  # label of the first run
    other: str
    cases: int
    unpaired: int  # cases that only one of them finished
    kl_base: float  # KL(exact‖policy), nats per token, mean over the common cases
    kl_other: float
    kl: float  # other − base, paired
    kl_low: float
    kl_high: float
    top1_base: float
    top1_other: float
    top1: float
    top1_low: float
    top1_high: float
    delta_nll: float  # ΔNLL of other − ΔNLL of base, nats
    delta_nll_low: float
    delta_nll_high: float
    flops_ratio: float  # all FLOPs of other / all of base
    ms_base: float  # to the first token, mean
    ms_other: float
    ms: float  # other − base, paired
    ms_low: float
    ms_high: float

    @property
    def decided(self) -> bool:
        """Whether the interval of the KL's difference leaves out 0; that of less than four cases is none."""
        return self.cases >= 4 and (self.kl_low > 0 or self.kl_high < 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs, their differences, and what else differs between them."""

    runs: tuple[Run, ...]
    rows: tuple[Difference, ...]
    changed: tuple[tuple[str, tuple[str, ...]], ...]  # key of config.json, its value in each run
    digest: str  # 8 hex digits: names the default directory of the comparison


def compare_runs(paths: Sequence[str], across: Sequence[str] = ()) -> Comparison:
    """Reads run directories and pairs their cases.

    Args:
      paths: two run directories or more; the first is the base.
      across: what they may differ in: "model", "corpus", "workload".

    Raises:
      ConfigError: a directory holds no such run, runs differ in what was not stated, or no policy has a
        case in common.
      FormatError: a run's files are damaged.
    """
    runs = _read(paths)
    base = runs[0]
    for run in runs[1:]:
        _require_alike(base, run, across)
    policies = [p for p in base.document["config"]["policies"] if base.of(p)]
    rows = [
        row
        for policy in policies
        for run in runs[1:]
        if (row := _difference(policy, base, run, across)) is not None
    ]
    if not rows:
        raise ConfigError(
            f"config.compare holds runs '{base.label}' and '{runs[1].label}' without a common finished "
            "case under a common policy, expected at least one"
        )
    text = "\n".join([*(str(r.document["config_digest"]) + r.label for r in runs), *across])
    return Comparison(
        runs=tuple(runs),
        rows=tuple(rows),
        changed=tuple(_changed(runs)),
        digest=hashlib.sha256(text.encode()).hexdigest()[:8],
    )


def _read(paths: Sequence[str]) -> list[Run]:
    runs: list[Run] = []
    for text in paths:
        directory = RunDirectory(Path(text))
        document = directory.read_config() if Path(text).is_dir() else None
        if document is None:
            raise ConfigError(f"config.compare names '{text}', expected the directory of a run")
        if "workload" not in document["config"]:
            kind = document["config"].get("experiment", "other")
            raise ConfigError(
                f"config.compare names '{text}', a run of {kind}, expected runs that measure divergence"
            )
        records = directory.records()
        require_complete(records, directory.cases_path)
        name, taken = Path(text).resolve().name, {run.label for run in runs}
        label = next(
            n for n in (name, *(f"{name} ({i})" for i in range(2, len(paths) + 1))) if n not in taken
        )
        done = tuple(r for r in records if r["status"] == "ok")
        runs.append(Run(label=label, document=document, records=done))
    return runs


def _require_alike(base: Run, run: Run, across: Sequence[str]) -> None:
    for kind, keys in _AGREE.items():
        for key in keys if kind not in across else ():
            mine, theirs = _at(base.document, key), _at(run.document, key)
            if mine != theirs:
                raise ConfigError(
                    f"config.compare holds runs of another {kind}: {key} is {_short(mine)} in "
                    f"'{base.label}' and {_short(theirs)} in '{run.label}', expected the same or "
                    f"--config.across={kind}"
                )


def _difference(policy: str, base: Run, other: Run, across: Sequence[str]) -> Difference | None:
    mine, theirs = base.of(policy), other.of(policy)
    pairs = [(a, theirs[case]) for case, a in mine.items() if case in theirs]
    for a, b in pairs if not across else ():
        if a.get("tokens_digest") != b.get("tokens_digest"):
            raise ConfigError(
                f"config.compare holds runs whose case '{a['case']}' has other tokens in '{base.label}' than "
                f"in '{other.label}', expected the same cases or --config.across=workload"
            )
    if not pairs:
        return None

    def both(*path: str) -> tuple[list[float], list[float]]:
        left, right = ([float(_at(r, ".".join(path))) for r in side] for side in zip(*pairs, strict=True))
        return left, right

    def paired(name: str, values: tuple[list[float], list[float]]) -> dict[str, float]:
        found = interval([b - a for a, b in zip(*values, strict=True)])
        return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))

    kl, top1 = both("divergence", "kl", "mean"), both("divergence", "top1_agreement")
    nll, flops, ms = both("divergence", "delta_nll"), both("flops"), both("timings_ms", "first_token")
    under = math.fsum(flops[0])
    return Difference(
        policy=policy,
        base=base.label,
        other=other.label,
        cases=len(pairs),
        unpaired=len(mine) + len(theirs) - 2 * len(pairs),
        kl_base=float(np.mean(kl[0])),
        kl_other=float(np.mean(kl[1])),
        top1_base=float(np.mean(top1[0])),
        top1_other=float(np.mean(top1[1])),
        ms_base=float(np.mean(ms[0])),
        ms_other=float(np.mean(ms[1])),
        flops_ratio=math.fsum(flops[1]) / under if under else math.nan,
        **paired("kl", kl),
        **paired("top1", top1),
        **paired("delta_nll", nll),
        **paired("ms", ms),
    )


def _changed(runs: Sequence[Run]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys of config.json whose values differ, with the value of each run."""
    for part in _TOLD:
        keys = dict.fromkeys(key for run in runs for key in run.document[part])
        for key in keys:
            if (part, key) == ("model", "source"):
                continue  # a path of the machine that ran it
            values = [run.document[part].get(key) for run in runs]
            if any(value != values[0] for value in values):
                yield f"{part}.{key}", tuple(_short(value) for value in values)


def _at(value: Mapping[str, Any], path: str) -> Any:
    found: Any = value
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _short(value: Any) -> str:
    """A value as text; digests are cut to 16 digits."""
    text = ",".join(str(x) for x in value) if isinstance(value, list) else str(value)
    return text[:16] if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else text
