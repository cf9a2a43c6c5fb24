"""Two edits of 1,500 tokens: delete 200 tokens in the middle, and at the head.

    python -m experiments.launch --config=configs/deletions.py

Runtime: about three minutes on two cores.

Expected: in the middle `scr` is near a thousandth of a nat, with or without repair, while `drop` and
`no_rotation` are off by more than some tenths. At the head the attention sink goes: `scr` is off by
some tenths of a nat, and recomputing 16 tokens, or 4, brings it back to thousandths.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="deletions",
        model="smollm2-135m",
        context=(1500,),
        edits=("delete",),
        positions=(0.0, 0.27),
        sizes=(200,),
        documents=1,
        continuation=64,
        policies=(
            "exact",
            "drop",
            "no_rotation",
            "scr",
            "scr(form=copy)",
            "first_k(16)",
            "first_k(32)",
            "sinks(4)",
        ),
        layers_every=0,
    )
