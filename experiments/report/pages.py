"""Dtypes of the pages side by side: what storing KV narrower does alone, and what reuse adds to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from experiments.records import Record
from experiments.report.columns import mean_of
from jaxkv.divergence import standard_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagesRow:
    """One policy over the cases of one dtype. KL in nats a token, mean over cases."""

    dtype: str
    policy: str
    cases: int
    token_bytes: float  # KV of one token, scales included
    pages_kl: float  # KL(exact over float32 pages ‖ exact over these): the dtype alone
    pages_kl_se: float
    kl: float  # KL(exact over these pages ‖ policy over these pages): reuse alone
    kl_se: float
    both_kl: float  # KL(exact over float32 pages ‖ policy over these pages)
    both_kl_se: float
    both_top1: float  # agreement with exact over float32 pages


def pages_rows(of: Mapping[str, list[Record]]) -> tuple[PagesRow, ...]:
    """Rows by dtype, then policy, from a policy's finished records; none unless some dtype was judged.

    Over float32 pages the dtype costs nothing by definition, and both is reuse alone.
    """
    if not any(r.get("pages") for records in of.values() for r in records):
        return ()
    dtypes = list(dict.fromkeys(r["kv_dtype"] for records in of.values() for r in records if r["kv_dtype"]))
    rows = []
    for dtype in dtypes:
        for policy, records in of.items():
            mine = [r for r in records if r["kv_dtype"] == dtype]
            if mine:
                rows.append(_row(dtype, policy, mine))
    return tuple(rows)


def _row(dtype: str, policy: str, records: list[Record]) -> PagesRow:
    reuse = [r["divergence"]["kl"]["mean"] for r in records]
    pages = [r["pages"] or {"kl": 0.0, "with_reuse_kl": kl} for r, kl in zip(records, reuse, strict=True)]
    alone, both = [p["kl"] for p in pages], [p["with_reuse_kl"] for p in pages]
    top1 = [(r["pages"] or {}).get("with_reuse_top1", r["divergence"]["top1_agreement"]) for r in records]
    known = [r["kv_token_bytes"] for r in records if "kv_token_bytes" in r]
    return PagesRow(
        dtype=dtype,
        policy=policy,
        cases=len(records),
        token_bytes=float(known[0]) if known else math.nan,
        pages_kl=mean_of(alone),
        pages_kl_se=standard_error(np.array(alone)),
        kl=mean_of(reuse),
        kl_se=standard_error(np.array(reuse)),
        both_kl=mean_of(both),
        both_kl_se=standard_error(np.array(both)),
        both_top1=mean_of(top1),
    )
