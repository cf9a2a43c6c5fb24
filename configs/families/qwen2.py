"""Qwen2 and Qwen2.5: what do edits cost and break where queries, keys and values have a bias?

    python -m experiments.launch --config=configs/families/qwen2.py
    python -m experiments.launch --config=configs/families/qwen2.py --config.model=PATH

Runtime: under a minute on two cores with random weights, as here; minutes with a model of
Qwen2 or Qwen2.5 (a directory with config.json and safetensors or a GGUF file).

The bias is added before the rotation, so a relocated key is what it would have been.

Expected, as run on 2026-11-30: one deletion and one insertion of 48 in 600 tokens: `exact` at the noise
floor (8e-14 nats a token); `scr` 2.3e-3, in both forms; `first_k(32)` 1.8e-3, 8.1 times cheaper than exact
prefix reuse. The controls are above: `no_rotation` 1.0e-2, 4 times that of `scr`, `drop` 1.1e-1, 47 times.
Random weights attend almost evenly, so the figures say nothing about reuse under trained ones: for that,
give `--config.model`.
"""

import ml_collections

from experiments.config import FAMILY_EDITS, defaults


def get_config() -> ml_collections.ConfigDict:
    """One family's edits; every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="qwen2",
        model="tiny-random-qwen2",
        **FAMILY_EDITS,
    )
