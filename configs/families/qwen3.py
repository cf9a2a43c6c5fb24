"""Qwen3: what do edits cost and break where queries and keys are normalized?

    python -m experiments.launch --config=configs/families/qwen3.py
    python -m experiments.launch --config=configs/families/qwen3.py --config.model=PATH

Runtime: under a minute on two cores with random weights, as here; minutes with a model of
Qwen3 (a directory with config.json and safetensors or a GGUF file).

A head's query and key are normalized before they are rotated.

Expected: `exact` at the noise floor, and the controls `drop` and `no_rotation` a hundred times and more
above `scr`. Random weights attend almost evenly, so the figures say nothing about reuse under trained
ones: for that, give `--config.model`.
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
