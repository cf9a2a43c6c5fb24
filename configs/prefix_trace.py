"""What does prefix sharing save when many requests over a few prompts arrive, and what if memory is short?

    python -m experiments.launch --config=configs/prefix_trace.py

Runtime: some minutes on two cores, most of the first run's for compiling; with `--config.smoke=True`
(random weights, no download) under a minute.

Model and text: SmolLM2-135M-Instruct in float32; 24 requests of about 450 tokens from two tenants over
three system prompts with three templates each, a quarter of them follow-ups, Poisson arrivals at one a
second. The same trace is replayed with a pool that holds everything and with one that does not, each time
with the prefix index and without it, in one process.

Not yet run to its end; what follows is an expectation.
Expected: of the prompt tokens 70% repeat an earlier prompt of their tenant, so with pages for all about as
many are found, and requests reach their first token sooner than without reuse. With few pages the hit rate
falls and pages are evicted. Greedy outputs are the same, but for ties within rounding.
"""

import ml_collections

from experiments.trace_config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/trace_config.py`."""
    return defaults(
        name="prefix_trace",
        model="smollm2-135m",
        requests=24,
        num_pages=(512, 96),
        orders=("poisson",),
        rate=1.0,
        max_tokens=12,
    )
