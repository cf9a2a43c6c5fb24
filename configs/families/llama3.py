"""Llama 3: what do edits cost and break where RoPE is scaled by wavelength?

    python -m experiments.launch --config=configs/families/llama3.py
    python -m experiments.launch --config=configs/families/llama3.py --config.model=PATH

Runtime: under a minute on two cores with random weights, as here; minutes with a model of
Llama 3.x (a directory with config.json and safetensors or a GGUF file).

Llama 3.1 scales the slow frequencies by 8 and leaves the fast ones: still a fixed rotation per
position, so relocation composes.

Expected, as run on 2026-11-30: one deletion and one insertion of 48 in 600 tokens: `exact` at the noise
floor (9e-14 nats a token); `scr` 4.4e-3, in both forms; `first_k(32)` 3.6e-3, 8.1 times cheaper than exact
prefix reuse. The controls are above: `no_rotation` 1.8e-2, 4 times that of `scr`, `drop` 7.6e-2, 17 times.
Random weights attend almost evenly, so the figures say nothing about reuse under trained ones: for that,
give `--config.model`.
"""

import ml_collections

from experiments.config import FAMILY_EDITS, defaults


def get_config() -> ml_collections.ConfigDict:
    """One family's edits; every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="llama3",
        model="tiny-random-llama3",
        **FAMILY_EDITS,
    )
