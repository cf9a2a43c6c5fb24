"""Trains a tiny hybrid (three recurrent layers to one that attends) on Python's reference prose, by bytes.

    python -m experiments.launch --config=configs/train_hybrid.py --workdir=runs/tiny-hybrid

Runtime: about a minute to compile and five (`--config.minutes`) to train on two cores. The same seed gives
the same batches, and the same weights where it ends by `steps` and not by time.

Expected: from about 6 nats a byte at the start to well under 3 on held-out text; `loss.csv` and `loss.png`
show the way. Not run to its end for this release. The checkpoint is `runs/tiny-hybrid/model`, for
`jaxkv.load` and `configs/hybrid.py`.
"""

import ml_collections

from experiments.train_config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/train_config.py`."""
    return defaults(name="train_hybrid", kind="hybrid")
