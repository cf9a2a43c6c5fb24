"""Workloads: seeded, deterministic lists of cases over real text.

A workload is a function `cases(config, tokens, bos) -> list[Case]`; to add one, write its module
and name it here. One that writes text of its own takes `model` too, for its tokenizer.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig
    from experiments.workloads.case import Case
    from jaxkv.io.models import Model
    from jaxkv.typing import Int32

WORKLOADS = {
    "edit_grid": "experiments.workloads.edit_grid",
    "agent_loop": "experiments.workloads.agent_loop",
    "recall": "experiments.workloads.recall",
    "residue": "experiments.workloads.recall",
    "drift": "experiments.workloads.drift",
}
SPEAKING = ("agent_loop", "recall", "residue")


def make_cases(
    config: ExperimentConfig, tokens: Int32, bos: int | None = None, model: Model | None = None
) -> list[Case]:
    """The cases of `config.workload` over the corpus `tokens` i32[n], for each dtype of the pages.

    Args:
      config: the experiment.
      tokens: the tokenized corpus.
      bos: token that starts every context, or None.
      model: whose tokenizer writes what a workload says itself; only some workloads need it.

    Raises:
      ConfigError: the corpus is too short, or an edit does not fit its context.
    """
    make = importlib.import_module(WORKLOADS[config.workload]).cases
    more = {"model": model} if config.workload in SPEAKING else {}
    cases: list[Case] = make(config, tokens, bos, **more)
    # One dtype after the other: only one engine holds pages at a time.
    return [_on_pages(case, dtype) for dtype in config.kv_dtype for case in cases]


def _on_pages(case: Case, dtype: str) -> Case:
    if dtype == "model":
        return case
    return dataclasses.replace(case, id=f"{case.id}-{dtype}", kv_dtype=dtype)
