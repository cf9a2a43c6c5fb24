"""What stale states cost: edits of contexts on a trained tiny hybrid, forked and replayed, against exact.

    python -m experiments.launch --config=configs/train_hybrid.py --workdir=runs/tiny-hybrid
    python -m experiments.launch --config=configs/hybrid.py --config.model=runs/tiny-hybrid/model

Runtime: a few minutes on two cores behind the training.

`scr` takes over the state behind the old text (the paper's fork), `scr(states=replay)` starts from the
nearest snapshot and runs every token over relocated keys: the difference is what the stale state costs.
`scr(states=compose)` passes over what of the kept text lies between two snapshots, by its operator.

Expected, as run on 2026-11-30: the fork is 1.6e-3 nats off, replay and compose 6e-8: nearly all of the
divergence is that of stale states, and what two snapshots and an operator pass over costs no answer. See
experiments/RESULTS.md.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="hybrid",
        model="runs/tiny-hybrid/model",
        context=(1536,),
        edits=("delete", "insert", "replace"),
        positions=(0.0, 0.5, 0.9),
        sizes=(128, 16),
        documents=2,
        continuation=64,
        policies=(
            "exact",
            "scr",
            "scr(states=compose)",
            "scr(states=replay)",
            "first_k(32)",
            "scr(states=replay)|first_k(32)",
            "no_rotation",
            "forget",
        ),
        page_size=16,
        chunk_size=64,
        noise_every=3,
        layers_every=3,
    )
