"""JAX's persistent compilation cache, in jaxkv's place in the user's cache directory."""

from __future__ import annotations

from pathlib import Path

import jax

from jaxkv.io.fetch import cache_directory


def enable_compilation_cache(cache_dir: str | Path | None = None) -> Path:
    """Keeps compiled steps between processes: the second start compiles nothing it compiled before.

    Changes JAX's process-wide settings, so no import does it: programs call it once at their start. A
    cache that is configured already (JAX_COMPILATION_CACHE_DIR) is left alone.

    Args:
      cache_dir: as in `jaxkv.load`; the compiled steps are in its folder `compiled`.

    Returns:
      The directory in use.
    """
    configured: str | None = jax.config.values["jax_compilation_cache_dir"]
    if configured:
        return Path(configured)
    directory = cache_directory(cache_dir) / "compiled"
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return directory
