"""Models and engines for the modules that run on eight virtual devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from tiny import make_model, tiny_config

import jaxkv
from jaxkv.parallel import as_mesh

NUM_PAGES, PAGE_SIZE, CHUNK = 48, 8, 16
VOCAB = 96

# Every axis is divided by four; and one whose KV heads are not, while MLP and vocabulary are.
EVEN = {"vocab_size": VOCAB, "num_heads": 8, "num_kv_heads": 4}
UNEVEN = {"vocab_size": VOCAB, "num_heads": 6, "num_kv_heads": 2}


def model_of(**changes: Any) -> jaxkv.Model:
    return make_model(tiny_config(**changes))


def mesh_of(size: int) -> jax.sharding.Mesh:
    """The first `size` of the eight devices as one replica."""
    mesh = as_mesh(jax.sharding.Mesh(np.array(jax.devices()[:size]), ("model",)))
    assert mesh is not None
    return mesh


def engine_of(model: jaxkv.Model, mesh: Any = None, **changes: Any) -> jaxkv.Engine:
    values = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "chunk_size": CHUNK, **changes}
    return jaxkv.Engine(model, mesh=mesh, **values)


def text(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 78]).integers(0, VOCAB, n).astype(np.int32)
