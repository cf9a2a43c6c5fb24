"""The persistent compilation cache: a second process compiles nothing that the first one did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, jax, jax.numpy as jnp, jaxkv
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
directory = jaxkv.enable_compilation_cache(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((64, 64))).block_until_ready()
print(directory, "/jax/compilation_cache/cache_hits" in hits)
"""


def _run(cache: Path, **environment: str) -> tuple[str, bool]:
    # Without the cache that the tests themselves share.
    inherited = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache)],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    directory, hit = done.stdout.split()
    return directory, hit == "True"


def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    assert _run(tmp_path) == (str(tmp_path / "compiled"), False)
    assert _run(tmp_path) == (str(tmp_path / "compiled"), True)


def test_a_cache_that_is_configured_already_is_left_alone(tmp_path: Path) -> None:
    theirs = str(tmp_path / "theirs")
    directory, _ = _run(tmp_path / "ours", JAX_COMPILATION_CACHE_DIR=theirs)
    assert directory == theirs
    assert not (tmp_path / "ours").exists()
