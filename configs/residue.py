"""A secret is deleted from the context, then asked for. What is left of it?

    python -m experiments.launch --config=configs/residue.py

Runtime: about twenty minutes on two cores, with `--config.quick=True` four minutes.

Expected, as run on 2026-12-01 with `--config.num_items=6`: `exact` and `forget` answer the same, bit for
bit, whatever was deleted. `scr` never says the secret, but two pasts differ by 2e-4 nats; `first_k` and
`dependents` lessen that and do not remove it. docs/approximation.md has the table.
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
        distances=(100, 400),
        num_items=15,
        policies=("exact", "scr", "first_k(32)", "dependents(32,32)", "forget"),
        noise_every=15,
        layers_every=0,
    )
