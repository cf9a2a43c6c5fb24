"""Qwen3: what do edits cost and break where queries and keys are normalized?

    python -m experiments.launch --config=configs/families/qwen3.py
    python -m experiments.launch --config=configs/families/qwen3.py --config.model=PATH

Runtime: under a minute on two cores with random weights, as here; minutes with a model of
Qwen3 (a directory with config.json and safetensors or a GGUF file).

A head's query and key are normalized before they are rotated.

Expected, as run on 2026-11-30: one deletion and one insertion of 48 in 600 tokens: `exact` at the noise
floor (8e-14 nats a token); `scr` 4.5e-3, in both forms; `first_k(32)` 3.3e-3, 8.1 times cheaper than exact
prefix reuse. The controls are above: `no_rotation` 1.3e-2, 3 times that of `scr`, `drop` 8.9e-2, 20 times.
Random weights attend almost evenly, so the figures say nothing about reuse under trained ones: for that,
give `--config.model`.
"""

import ml_collections

from experiments.config import FAMILY_EDITS, defaults


def get_config() -> ml_collections.ConfigDict:
    """One family's edits; every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="qwen3",
        model="tiny-random-qwen3",
        **FAMILY_EDITS,
    )
