"""Can a model learn to tolerate reuse? A small adapter, trained on sampled edits, judged on held-out text.

    python -m experiments.launch --config=configs/adapt.py
    python -m experiments.launch --config=configs/adapt.py --config.export=True   # also a model to load

Runtime: minutes on two cores, most of it the steps; Ctrl-C, and the same command goes on. With
`--config.smoke=True` seconds, on random weights. On an accelerator: `configs/adapt_accelerator.py`.

Model and text: SmolLM2-135M-Instruct in float32, Python's reference prose, contexts of 128 tokens, a third
of the edits at the head, where plain reuse is worst. The loss is KL(exact‖reused) of the 24 tokens behind
each edit plus half the NLL of the true text from exact state.

Expected, as run on 2026-11-30: mean KL of 16 held-out edits from 0.16 to 0.11 nats, most of it at the head,
top-1 agreement as it was, plain perplexity of held-out text to 0.90 of what it was. The table, and a tiny
model's run, are in experiments/RESULTS.md.
"""

import ml_collections

from experiments.adapt_config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/adapt_config.py`."""
    return defaults(name="adapt")
