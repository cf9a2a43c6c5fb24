"""What sliding windows change: edits of contexts on a trained model of three local layers to one global.

    python -m experiments.launch --config=configs/train_sliding.py --workdir=runs/tiny-sliding
    python -m experiments.launch --config=configs/sliding.py --config.model=runs/tiny-sliding/model

Runtime: a minute or two on two cores behind the training.

A local layer sees what stands within its window, so what is stale for it fades layer by layer behind the
seam; the global layer in four sees the edit from everywhere.

Expected, as run on 2026-11-30: plain reuse is 5e-5 nats off, less at the head (1e-5), where no local layer
loses anything that it saw; 32 repaired tokens take it to 6e-6. See experiments/RESULTS.md.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="sliding",
        model="runs/tiny-sliding/model",
        context=(1536,),
        edits=("delete", "insert", "replace"),
        positions=(0.0, 0.5, 0.9),
        sizes=(128, 16),
        documents=2,
        continuation=64,
        policies=("exact", "drop", "no_rotation", "scr", "sinks(4)", "first_k(32)", "forget"),
        page_size=16,
        chunk_size=64,
        noise_every=3,
        layers_every=3,
    )
