"""Workloads: seeded, deterministic lists of cases over real text.

A workload is a function `cases(config, tokens, bos) -> list[Case]`; to add one, write its module
and name it here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig
    from experiments.workloads.case import Case
    from jaxkv.typing import Int32

WORKLOADS = {"edit_grid": "experiments.workloads.edit_grid"}


def make_cases(config: ExperimentConfig, tokens: Int32, bos: int | None = None) -> list[Case]:
    """The cases of `config.workload` over the corpus `tokens` i32[n].

    Args:
      config: the experiment.
      tokens: the tokenized corpus.
      bos: token that starts every context, or None.

    Raises:
      ConfigError: the corpus is too short, or an edit does not fit its context.
    """
    cases: list[Case] = importlib.import_module(WORKLOADS[config.workload]).cases(config, tokens, bos)
    return cases
