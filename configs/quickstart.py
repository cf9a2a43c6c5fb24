"""The first experiment to run: what does an edit in the middle of a cached context cost, and break?

    python -m experiments.launch --config=configs/quickstart.py

Runtime: about five minutes on two cores, after a download of 93 MB on the first run; with
`--config.smoke=True` (random weights, no download) under a minute.

Model and text: SmolLM2-135M-Instruct in float32, contexts of 2,000 tokens of Python's reference
prose. Six edits: delete, insert or replace 200 or 16 tokens at the head, 25%, 50% and 90%; with
`--config.thin=1` all 24.

Expected: `first_k(32)` answers about ten times cheaper than exact prefix reuse at a mean KL of about
a thousandth of a nat. Plain `scr` is as good in the middle but fails when the head is deleted, as the
attention sink goes with it. The controls `drop` and `no_rotation` are off by some tenths of a nat.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """The quickstart; every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="quickstart",
        model="smollm2-135m",
        context=(2000,),
        edits=("delete", "insert", "replace"),
        positions=(0.0, 0.25, 0.5, 0.9),
        sizes=(200, 16),
        thin=4,  # 6 of 24 edits; thin=1 measures all
        documents=2,
        continuation=64,
        policies=(
            "exact",
            "drop",
            "no_rotation",
            "scr",
            "scr(form=copy)",
            "first_k(32)",
            "sinks(4)",
            "forget",
        ),
        noise_every=3,
        layers_every=2,
    )
