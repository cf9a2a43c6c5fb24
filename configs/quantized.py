"""What does storing KV in fewer bits cost by itself, and what does reuse add to it?

    python -m experiments.launch --config=configs/quantized.py

Runtime: 13 minutes on two cores, with `--config.smoke=True` (random weights) a minute.

Model and text: SmolLM2-135M-Instruct with weights in float32, contexts of 1,024 tokens of Python's reference
prose, four edits, over pages of each dtype. The table "Dtypes of the pages" has three divergences on the same
teacher-forced tokens: of the dtype alone (exact over these pages against exact over float32 pages), of
reuse alone (a policy against exact over the same pages), and of both together.

Expected: the dtype alone costs least in bfloat16 (5e-5 nats), more in int8 (1e-3) and most in float8_e4m3fn
(1e-2), and is the same for every policy. Measured against exact over the same pages, reuse costs the same in
bfloat16, a thousandth more in int8, and in float8 at least what the dtype itself does: a small change of
one token's state makes all that follow round elsewhere. int8 pages take 53% of the bytes of bfloat16 ones,
scales included. docs/quantized.md has the figures.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="quantized",
        model="smollm2-135m",
        context=(1024,),
        edits=("delete", "insert"),
        positions=(0.0, 0.5),
        sizes=(64,),
        documents=2,
        continuation=64,
        kv_dtype=("float32", "bfloat16", "int8", "float8_e4m3fn"),
        policies=("exact", "scr", "scr(form=copy)", "first_k(32)"),
        noise_every=2,
        layers_every=0,
    )
