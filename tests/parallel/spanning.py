"""One of several processes that one engine spans: `spanning.py <coordinator> <count> <id> <path>`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from on_mesh import EVEN, engine_of, model_of, text

import jaxkv
from jaxkv import processes
from jaxkv.io.checkpoint import load_checkpoint, save_checkpoint
from jaxkv.parallel import parse_mesh


def answers(engine: jaxkv.Engine) -> dict[str, object]:
    """What an engine answers, as plain values."""
    first = engine.prefill(text(32))
    made = engine.generate(first.sequence, max_tokens=6)
    state = engine.read_kv(first.sequence)
    engine.check()
    return {
        "prefill": np.asarray(first.logits).tolist(),
        "generated": np.asarray(made.sequence.logits).tolist(),
        "tokens": made.tokens.tolist(),
        "keys": float(np.abs(state.keys).sum()),
    }


def main() -> None:
    coordinator, count, index, path = sys.argv[1:]
    place = processes.join(coordinator, int(count), int(index), join_seconds=60)
    mesh = parse_mesh(f"model:{len(jax.devices())}")
    assert mesh.is_multi_process
    engine = engine_of(model_of(**EVEN, num_layers=1), mesh)
    found = answers(engine)
    save_checkpoint(Path(path) / "model", engine.model)
    loaded = load_checkpoint(Path(path) / "model", mesh=mesh)
    for a, b in zip(jax.tree.leaves(engine.model.params), jax.tree.leaves(loaded.params), strict=True):
        for mine, theirs in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, theirs.data)
    engine.save_cache(Path(path) / "cache")
    other = engine_of(loaded, mesh)
    other.load_cache(Path(path) / "cache")
    found["warm"] = other.prefill(text(32)).reuse.matched
    processes.wait_for_all("they answered")
    (Path(path) / f"{place.index}.json").write_text(json.dumps(found))
    processes.leave()


if __name__ == "__main__":
    main()
