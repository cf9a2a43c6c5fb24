"""What does prefix sharing save when many requests over a few prompts arrive, and what if memory is short?

    python -m experiments.launch --config=configs/prefix_trace.py

Runtime: about six minutes on two cores; with `--config.smoke=True` (random weights, no download) under a
minute.

Model and text: SmolLM2-135M-Instruct in float32; 24 requests of about 450 tokens from two tenants over
three system prompts with three templates each, half of them follow-ups, Poisson arrivals at one a second.
The same trace is replayed with a pool that holds everything and with one that does not, each time with the
prefix index and without it, in one process.

Expected, as run on 2026-11-30: with pages for all, 71% of the prompt tokens were found and the median time
to the first token was 2.0 s against 10.4 s without the index; with 96 pages 59% and 3.0 s against 12.2 s,
219 pages evicted. All greedy outputs were the same. See experiments/RESULTS.md.
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
