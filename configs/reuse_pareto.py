"""How much can an edit save at which divergence, and which policy should one use?

    python -m experiments.launch --config=configs/reuse_pareto.py
    python -m experiments.launch --config=configs/reuse_pareto.py --config.quick=True

Runtime: perhaps an hour and a half on two cores, with `--config.quick=True` about ten minutes.

Model and text: SmolLM2-135M-Instruct in float32, contexts of 1,024 and 2,048 tokens of Python's
reference prose. Six kinds of edit of 16 to 500 tokens at the head, 25%, 50% and 90%, every third cell of the
grid; every policy. One kind of edit: `--config.edits=replace`; another model:
`--config.model=path`, calibrated as docs/policies.md says, or without `budget` among its policies.

Eight cells at 1,024 tokens are in docs/approximation.md, the whole grid was not yet run.
Expected: `scr` alone is near a thousandth of a nat unless the head is edited or the edit is near the end;
`first_k(32)` repairs that by up to an order; `top_deviation` pays for its check layer; `erratum` is off by
tenths of a nat, as are the controls; `budget(0.01)` stays under its budget and falls back to exact.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="reuse_pareto",
        model="smollm2-135m",
        context=(1024, 2048),
        edits=("append", "delete", "insert", "replace", "reorder", "strip"),
        positions=(0.0, 0.25, 0.5, 0.9),
        sizes=(16, 200, 500),
        thin=3,
        documents=3,
        continuation=64,
        policies=(
            "exact",
            "drop",
            "no_rotation",
            "erratum",
            "scr",
            "sinks(4)",
            "first_k(32)",
            "top_deviation(0.15,1)",
            "dependents(32,32)",
            "budget(0.01)",
            "forget",
        ),
        noise_every=4,
        layers_every=4,
        rotation_every=2,
        greedy_tokens=64,
        heal_steps=4,
    )
