"""Strict JAX settings, and fixtures around the tiny model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from reference import Decoder, decoder_of
from tiny import CHUNK, NUM_PAGES, PAGE_SIZE, VOCAB, make_model, tiny_config

import jaxkv

# Mixed dtypes are an error: a silent promotion to float32 or float64 is a bug in a decoder.
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs of a run are kept in a directory of its own: workers and child processes share them.

    They find it in their environment; a cache that is configured already is left alone. What a program does,
    needs and how often one is asked for is the same, compiled or read.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    directory = tempfile.mkdtemp(prefix="jaxkv-compiled-")
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    for name, value in {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def model() -> jaxkv.Model:
    return make_model(tiny_config())


@pytest.fixture(scope="session")
def decoder(model: jaxkv.Model) -> Decoder:
    """The float64 NumPy decoder with the weights of `model`."""
    return decoder_of(model.params, model.config)


@pytest.fixture
def make_engine(model: jaxkv.Model) -> Iterator[Callable[..., jaxkv.Engine]]:
    """Makes engines of one geometry, poisoned by default; each is checked when the test ends."""
    made: list[jaxkv.Engine] = []

    def make(**changes: Any) -> jaxkv.Engine:
        values: dict[str, Any] = {
            "num_pages": NUM_PAGES,
            "page_size": PAGE_SIZE,
            "chunk_size": CHUNK,
            "poison_free_pages": True,
        }
        engine = jaxkv.Engine(changes.pop("model", model), **{**values, **changes})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.check()


@pytest.fixture
def engine(make_engine: Callable[..., jaxkv.Engine]) -> jaxkv.Engine:
    return make_engine()


@pytest.fixture
def text() -> Callable[..., np.ndarray]:
    """text(n, seed=0): n random tokens, i32[n]."""

    def make(n: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng([seed, 77]).integers(0, VOCAB, n).astype(np.int32)

    return make


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """An entry for each program that XLA compiles, or takes from the persistent cache."""
    events: list[str] = []

    def listen(name: str, _: float, **__: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
