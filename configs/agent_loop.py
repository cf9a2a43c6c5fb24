"""A conversation grows while its agent edits the context: what does reuse cost turn after turn?

    python -m experiments.launch --config=configs/agent_loop.py

Runtime: about forty minutes on two cores, with `--config.quick=True` six minutes.

Not yet run to its end; what follows is an expectation.
Expected: error adds up over turns, since each edits what the last one left; repairs keep it near a
hundredth of a nat. Dropping the oldest exchange changes what stands behind the system prompt, not the
sink, so plain `scr` survives it.
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
