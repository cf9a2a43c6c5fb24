"""Adaptation at a size that needs an accelerator: 2,000 steps of 16 edits of 2,048 tokens.

    python -m experiments.launch --config=configs/adapt_accelerator.py --config.model=PATH

Runtime: not yet run; perhaps two hours for 135M parameters on one accelerator. Expected: as the
demonstration, with the gain spread over all places of an edit.

Activations are computed again in the backward pass (`remat`), which makes long contexts fit;
memory goes with batch × context. The merged model is written to `model/` in the run directory, so that
`configs/reuse_pareto.py --config.model=RUN/model` measures it, and
`--config.compare=RUN_BEFORE,RUN_AFTER --config.across=model` compares the two.
"""

import ml_collections

from experiments.adapt_config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/adapt_config.py`."""
    return defaults(
        name="adapt_accelerator",
        dtype="bfloat16",
        corpus="stdlib",
        context=2048,
        continuation=64,
        positions=(0.0, 0.1, 0.25, 0.5, 0.75),
        sizes=(16, 64, 200, 400),
        steps=2000,
        batch=16,
        rank=16,
        learning_rate=5e-4,
        warmup=100,
        remat=True,
        held_out=90,
        checkpoint_every=100,
        export=True,
        chunk_size=512,
    )
