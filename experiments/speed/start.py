"""Start-up of a fresh process: import, load, first token. Prints one JSON line.

python -m experiments.speed.start smollm2-135m float32
"""

from __future__ import annotations

import json
import sys
import time


def main(model: str, dtype: str) -> None:
    """Times each stage in seconds; compiled steps come from the cache if an earlier run left them there."""
    begin = time.perf_counter()
    import numpy as np

    import jaxkv

    jaxkv.enable_compilation_cache()
    imported = time.perf_counter()
    loaded = jaxkv.load(model, dtype=dtype, progress=False)
    ready = time.perf_counter()
    engine = jaxkv.Engine(loaded, num_pages=64)
    result = engine.prefill(np.arange(16))
    engine.generate(result.sequence, max_tokens=1, stop=())
    done = time.perf_counter()
    print(json.dumps({"import": imported - begin, "load": ready - imported, "first token": done - ready}))


if __name__ == "__main__":
    main(*sys.argv[1:])
