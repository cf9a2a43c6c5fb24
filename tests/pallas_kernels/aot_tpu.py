"""Compiles the TPU kernels for hardware that is not here. Run as a script, in a process of its own.

Reads a JSON list of specs on standard input and writes one JSON line for each: the compiled program's memory,
or the compiler's error. Needs libtpu (`pip install "jax[tpu]"`).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

# No TPU is asked for: libtpu only compiles, also while another process does.
os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_ENABLE_COMPILATION_CACHE="false",  # the compiler itself is asked
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import pallas_kernels

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@functools.cache
def sharding(chip: str) -> SingleDeviceSharding:
    """Of the first device of a chip's topology."""
    description = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return SingleDeviceSharding(description.devices[0])


def compile_for(chip: str, function: Any, args: list[Any], donate: tuple[int, ...]) -> Any:
    """The program compiled for a chip; `args` are (shape, dtype) or None."""
    shapes = [
        None if a is None else jax.ShapeDtypeStruct(a[0], jnp.dtype(a[1]), sharding=sharding(chip))
        for a in args
    ]
    with pallas_kernels.compiling_for("tpu"):
        lowered = jax.jit(function, donate_argnums=donate).trace(*shapes).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def program(
    *,
    operation: str,
    dtype: str,
    kv_heads: int = 3,
    group: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    batch: int = 4,
    length: int = 1,
    deltas: int = 1,
    entries: int = 256,
    rows: int = 16_384,
    count: int = 64,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Any, list[Any], tuple[int, ...]]:
    """The function of a spec, its arguments and which of them it takes over."""
    scaled = dtype in ("int8", "float8_e4m3fn")
    kv = ((rows, kv_heads, page_size, 2 * head_dim), dtype)
    scale = (pallas_kernels.scale_shape(kv[0], tiles=True), "float32") if scaled else None
    forced = {"implementation": "pallas_tpu"}
    ids = ((count,), "int32")
    if operation == "attention":
        q = ((batch, deltas, length, kv_heads, group, head_dim), "float32")
        table = [((batch, entries), "int32")] * 4
        blocks = ((batch, entries // max(256 // page_size, 1)), "int32")
        run = functools.partial(pallas_kernels.paged_attention, window=window, soft_cap=soft_cap, **forced)
        args = [scale, q, kv, *table, blocks, ((batch, length), "int32")]
        return (lambda scale, *a: run(*a, scale=scale)), args, ()
    taken = (0, 1) if scaled else (1,)
    if operation == "append":
        new = ((count, kv_heads, head_dim), "float32")
        run = functools.partial(pallas_kernels.append, **forced)
        return (lambda scale, *a: run(*a, scale=scale)), [scale, kv, ids, ids, new, new], taken
    angles = ((count, head_dim // 2), "float32")
    run = functools.partial(pallas_kernels.relocate_pages, **forced)
    return (lambda scale, *a: run(*a, scale=scale)), [scale, kv, ids, ids, angles, angles], taken


def main() -> None:
    """Compiles what standard input asks for."""
    for spec in json.load(sys.stdin):
        found: dict[str, Any] = {"spec": spec}
        chip, give = spec["chip"], spec.get("donate", True)
        try:
            function, args, donate = program(**{k: v for k, v in spec.items() if k not in ("chip", "donate")})
            donate = donate if give else ()
            memory = compile_for(chip, function, args, donate).memory_analysis()
            found["temp"] = memory.temp_size_in_bytes
            found["alias"] = memory.alias_size_in_bytes
        except Exception as error:  # reported to the test, which fails with it
            found["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
