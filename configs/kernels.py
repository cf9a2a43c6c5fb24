"""How fast are the kernels, and are they right? Decode, prefill and relocation against baselines.

    python -m experiments.launch --config=configs/kernels.py

Runtime: about half an hour on an H200 (`--config.quick=True`: a few minutes); under a minute on a CPU, where
only the XLA path is measured, on small shapes.

Up to three answers of each case are compared with float64 loops before it is timed. Times are medians of
calls chained inside one jit; "% of copy" is bytes of keys and values a second over what a large copy moves a
second in the same run.

Expected on an H200 (goals, not yet measured): decode with KV far larger than the 50 MB L2 at 80% of the copy
or more, tables with deltas within 5% of ordinary ones, relocation at 80% or more.
"""

import ml_collections

from experiments.kernels.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/kernels/config.py`."""
    return defaults(name="kernels")
