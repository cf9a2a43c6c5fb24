"""Up to 256 consecutive edits move the same span. Does error add up?

    python -m experiments.launch --config=configs/drift.py
    python -m experiments.launch --config=configs/drift.py --config.kv_dtype=int8

Runtime: about half an hour on two cores for the three dtypes of pages, with `--config.quick=True` (16
edits) five minutes.

Expected, as run on 2026-11-30 with 32 moves of 176 tokens in a context of 256: in view form keys are never
rewritten, so their change against birth is 0 after any number of edits; the copy form starts from the keys
as born and stays at one rounding; `scr(form=composed)`, which rotates its last copy again, reaches four to
five times that, 5% in int8. KL is that of staleness in all three. The view form copies no KV, the other two
copy the span at every edit, in int8 a quarter of the bytes of float32. docs/approximation.md has the table.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="drift",
        workload="drift",
        model="smollm2-135m",
        context=(512,),
        documents=1,
        moves=(256,),
        kv_dtype=("float32", "bfloat16", "int8"),
        policies=("exact", "scr", "scr(form=copy)", "scr(form=composed)"),
        noise_every=1,
        layers_every=0,
    )
