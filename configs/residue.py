"""A secret is deleted from the context, then asked for. What is left of it?

    python -m experiments.launch --config=configs/residue.py

Runtime: about twenty minutes on two cores, with `--config.quick=True` four minutes.

Not yet run to its end; what follows is an expectation.
Expected: `exact` and `forget` answer the same whatever was deleted: the KL between two pasts of one
text is that of rounding. `scr` never says the secret, but its answers differ by what was deleted, most where
the stale text stands right behind it.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="residue",
        workload="residue",
        model="smollm2-135m",
        context=(1000,),
        distances=(8, 250),
        num_items=15,
        policies=("exact", "scr", "first_k(32)", "dependents(32,32)", "forget"),
        noise_every=15,
        layers_every=0,
    )
