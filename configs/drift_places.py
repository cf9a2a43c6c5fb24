"""Consecutive edits at twelve places: spans stand at more distances than a view may hold. What then?

    python -m experiments.launch --config=configs/drift_places.py

Runtime: not yet run to its end; about ten minutes on two cores, with `--config.quick=True` (16 edits) two.

Expected: in view form no key is rewritten until spans stand at eight distances (`max_deltas`); from then on
they are copied from the keys as born, so their error is that of one rounding however many edits follow. An
edit behind which few distances are left moves no KV. The copy form does from the first edit on;
`scr(form=composed)` drifts.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="drift_places",
        workload="drift",
        model="smollm2-135m",
        context=(768,),
        documents=1,
        moves=(64,),
        places=12,
        kv_dtype=("float32", "bfloat16", "int8"),
        policies=("exact", "scr", "scr(form=copy)", "scr(form=composed)"),
        noise_every=1,
        layers_every=0,
    )
