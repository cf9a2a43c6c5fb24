"""Gemma 3: what do edits cost and break where most layers see a window?

    python -m experiments.launch --config=configs/families/gemma3.py
    python -m experiments.launch --config=configs/families/gemma3.py --config.model=PATH

Runtime: under a minute on two cores with random weights, as here; minutes with a model of
Gemma 3 (text) (a directory with config.json and safetensors or a GGUF file).

Five of six layers see 64 positions here (512 or 1,024 in the published models) and turn at a base of
their own; keys are moved with their layer's frequencies.

Expected, as run on 2026-11-30: one deletion and one insertion of 48 in 600 tokens: `exact` at the noise
floor (9e-14 nats a token); `scr` 2.9e-4, in both forms; `first_k(32)` 1.5e-4, 6.9 times cheaper than exact
prefix reuse. The controls are above: `no_rotation` 6.1e-2, 215 times that of `scr`, `drop` 6.0e-1, 2,100
times. Random weights attend almost evenly, so the figures say nothing about reuse under trained ones: for
that, give `--config.model`.
"""

import ml_collections

from experiments.config import FAMILY_EDITS, defaults


def get_config() -> ml_collections.ConfigDict:
    """One family's edits; every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="gemma3",
        model="tiny-random-gemma3",
        **FAMILY_EDITS,
    )
