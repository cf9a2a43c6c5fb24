"""A fact in the context changes. Does the answer know the new one, also where it is only implied?

    python -m experiments.launch --config=configs/recall.py

Runtime: about half an hour on two cores, with `--config.quick=True` five minutes.

Not yet run to its end; what follows is an expectation.
Expected: asked directly, `scr` answers almost as exact does. Through a sentence that depends on the fact
and stands far behind it, a window behind the seam (`first_k`) recovers less of the margin than
`dependents`, which finds that sentence.
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
