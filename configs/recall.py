"""A fact in the context changes. Does the answer know the new one, also where it is only implied?

    python -m experiments.launch --config=configs/recall.py

Runtime: about half an hour on two cores, with `--config.quick=True` five minutes.

Expected, as run on 2026-11-30 with `--config.num_items=4`: asked directly, `scr` answers right whenever
exact does, with a margin that is some percent smaller, of which repairs bring nine tenths back; `erratum`
says the old fact. This model answers nothing right that is only implied, so that half tells its KL alone.
docs/approximation.md has the table.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="recall",
        workload="recall",
        model="smollm2-135m",
        context=(1500,),
        distances=(0, 250, 1000),
        num_items=12,
        policies=(
            "exact",
            "erratum",
            "scr",
            "first_k(32)",
            "top_deviation(0.15,1)",
            "dependents(32,32)",
        ),
        noise_every=12,
        layers_every=0,
    )
