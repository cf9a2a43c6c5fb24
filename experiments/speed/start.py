"""Start-up of a fresh process: import, load, first token, and what loading took of memory, as one JSON line.

python -m experiments.speed.start smollm2-135m float32
"""

from __future__ import annotations

import json
import sys
import time

from experiments.speed.peak import peak_bytes


def main(model: str, dtype: str) -> None:
    """Times each stage in seconds; compiled steps come from the cache if an earlier run left them there."""
    begin = time.perf_counter()
    import jax
    import numpy as np

    import jaxkv

    jaxkv.enable_compilation_cache()
    imported, before = time.perf_counter(), peak_bytes()
    loaded = jaxkv.load(model, dtype=dtype, progress=False)
    ready, after = time.perf_counter(), peak_bytes()
    engine = jaxkv.Engine(loaded, num_pages=64)
    result = engine.prefill(np.arange(16))
    engine.generate(result.sequence, max_tokens=1, stop=())
    done = time.perf_counter()
    seconds = {"import": imported - begin, "load": ready - imported, "first token": done - ready}
    weights = sum(int(leaf.nbytes) for leaf in jax.tree.leaves(loaded.params))
    print(json.dumps({"seconds": seconds, "weights": weights, "load_peak": after - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
