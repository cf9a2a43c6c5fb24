"""Trains a tiny sliding-window model (three local layers to one global) on Python's reference prose.

    python -m experiments.launch --config=configs/train_sliding.py --workdir=runs/tiny-sliding

Runtime: about five minutes on two cores, `--config.minutes` at most; seconds with `--config.smoke=True`.

Expected: well under 3 nats a byte on held-out text; not run for this release. The checkpoint is
`runs/tiny-sliding/model`, for `jaxkv.load`.
"""

import ml_collections

from experiments.train_config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/train_config.py`."""
    return defaults(name="train_sliding", kind="sliding")
