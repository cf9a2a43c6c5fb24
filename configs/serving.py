r"""How fast is a model served: prompts, decoding, edits, start-up, against limits and peers of the same run?

    python -m experiments.launch --config=configs/serving.py
    python -m experiments.launch --config=configs/serving.py --config.peer_gguf=model.gguf \
        --config.peers=transformers-float32,llama.cpp-float32 --config.peer_python=path/to/python

Runtime: twenty minutes on two cores, a third of it compilation on the first run; peers add ten. With
`--config.smoke=True` (random weights, no download) under a minute.

Every repeat runs all systems one after the other, so that what the machine does meanwhile hits each of them.
Medians are printed, with ratios to the peers and to the rates of a matrix product, of one row times the
weights and of a copy, measured in the same run.

Expected on two cores without AMX or AVX-512, as run on 2026-11-30: prompts from 512 tokens on level with
transformers, at 60% of the matrix product's rate; decoding of one sequence at 64% of the rate at which
weights are read at a context of 512 and at half of that at 4,096, twice as fast as transformers and slower
than llama.cpp; an edit under scr twenty times faster to its first token than an exact one. The table is in
experiments/RESULTS.md.
"""

import ml_collections

from experiments.speed.config import defaults


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden, see `experiments/speed/config.py`."""
    return defaults(name="serving", model="smollm2-135m")
