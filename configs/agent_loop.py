"""A conversation grows while its agent edits the context: what does reuse cost turn after turn?

    python -m experiments.launch --config=configs/agent_loop.py

Runtime: about forty minutes on two cores, with `--config.quick=True` ten minutes.

Expected, as run on 2026-11-30 with `--config.quick=True`: mean KL of three turns 0.007 for `scr`, 0.003 for
`first_k(32)`, 0.001 for `dependents(32,32)` and 0.26 for `erratum`, at 0.6 to 0.8 of exact's FLOPs. Error
does not add up over three turns; dropping the oldest exchange is the dearest edit, and `sinks(4)` does not
help it, since the system prompt keeps the sink. docs/approximation.md has the table.
"""

import ml_collections

from experiments.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/config.py`."""
    return defaults(
        name="agent_loop",
        workload="agent_loop",
        model="smollm2-135m",
        corpus="stdlib",
        sizes=(200,),
        turns=6,
        documents=1,
        continuation=64,
        policies=("exact", "erratum", "scr", "first_k(32)", "sinks(4)", "dependents(32,32)"),
        noise_every=2,
        layers_every=0,
    )
