"""Compiles the GPU kernels for a Hopper GPU on a machine without one, and prints what the compiler says.

    python tests/pallas_kernels/aot_gpu.py '[{"kernel": "decode", "head_dim": 64}]'

One JSON object a case. Needs wheels beside jax (X is its version):

    pip install --no-deps jax-cuda13-pjrt==X jax-cuda13-plugin==X && pip install nvidia-cuda-nvcc nvidia-nvvm

A process of its own, since one process compiles for one architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PTXAS_DIRECTORY = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin")
# A description of the GPU as XLA wants it: NVIDIA's published figures of an H200 SXM.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
DEFAULTS = {
    "batch": 8,
    "deltas": 1,
    "length": 1,
    "kv_heads": 8,
    "group": 4,
    "head_dim": 128,
    "page_size": 16,
    "context": 4096,
    "rows": 2048,
    "dtype": "bfloat16",
    "window": None,
    "soft_cap": None,
}


def missing() -> str | None:
    """Why kernels can't be compiled here, or None."""
    import jax

    for name in ("jax-cuda13-pjrt", "jax-cuda13-plugin"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed (pip install --no-deps {name}=={jax.__version__})"
        if version != jax.__version__:
            return f"{name} is {version}, expected {jax.__version__} as jax"
    if not (PTXAS_DIRECTORY / "ptxas").exists() and shutil.which("ptxas") is None:
        return "ptxas is not installed (pip install nvidia-cuda-nvcc nvidia-nvvm)"
    return None


def compiled_for_hopper(function: Callable[..., Any], shapes: list[Any], donate: tuple[int, ...] = ()) -> Any:
    """`function` compiled for the target; shapes are (shape, dtype) of its arguments."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, SingleDeviceSharding

    from pallas_kernels import compiling_for

    try:
        from jax.sharding import AbstractDevice
    except ImportError:  # jax 0.10
        from jax._src.mesh import AbstractDevice
    device = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1").devices[0]
    sharding = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    abstract = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((), (), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh), compiling_for("gpu"):
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def arguments(case: dict[str, Any]) -> tuple[Callable[..., Any], list[Any], tuple[int, ...], int]:
    """Function, argument shapes, donated arguments and bytes of the pages of a case."""
    import jax.numpy as jnp

    import pallas_kernels

    kind, size, dtype = case["kernel"], case["page_size"], jnp.dtype(case["dtype"])
    batch, heads, head_dim = case["batch"], case["kv_heads"], case["head_dim"]
    pages = ((case["rows"], heads, size, 2 * head_dim), dtype)
    held = case["rows"] * heads * size * 2 * head_dim * dtype.itemsize
    implementation = kind if kind in ("triton", "auto") else "pallas_gpu"
    if kind == "relocate":
        moves, half = 64, case.get("rotary_dim", head_dim) // 2
        angles = ((moves, half), jnp.float32)
        function = functools.partial(pallas_kernels.relocate_pages, implementation=implementation)
        return function, [pages, *[((moves,), jnp.int32)] * 2, angles, angles], (0,), held
    if kind == "append":
        new = ((batch, heads, head_dim), jnp.bfloat16)
        function = functools.partial(pallas_kernels.append, implementation=implementation)
        return function, [pages, *[((batch,), jnp.int32)] * 2, new, new], (0,), held
    entries, block = case["context"] // size, 256 // size
    query = (batch, case["deltas"], case["length"], heads, case["group"], head_dim)
    table = ((batch, entries), jnp.int32)
    shapes = [(query, jnp.float32), pages, *[table] * 4]
    shapes += [((batch, entries // block), jnp.int32), ((batch, case["length"]), jnp.int32)]
    function = functools.partial(
        pallas_kernels.paged_attention,
        window=case["window"],
        soft_cap=case["soft_cap"],
        implementation=implementation,
    )
    if dtype.itemsize == 1:
        shapes.append((pallas_kernels.scale_shape(pages[0]), jnp.float32))
        return lambda *arrays: function(*arrays[:-1], scale=arrays[-1]), shapes, (), held
    return function, shapes, (), held


@contextlib.contextmanager
def captured(text: list[str]) -> Iterator[None]:
    """Collects what anything, C++ included, writes to the standard streams."""
    flush = ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            flush(None)
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            os.close(kept[0])
            os.close(kept[1])
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def report(case: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says of one case."""
    case = {**DEFAULTS, **case}
    text: list[str] = []
    try:
        with captured(text):
            if "shared_bytes" in case:
                from pallas_kernels import mosaic_gpu

                mosaic_gpu.SHARED_BYTES = case["shared_bytes"]  # this process is thrown away
            function, shapes, donate, held = arguments(case)
            compiled = compiled_for_hopper(function, shapes, donate)
    except Exception as error:  # the parent asserts on it
        return {**case, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:400]}"}
    memory = compiled.memory_analysis()
    return {
        **case,
        "error": None,
        "pages": held,
        "temp": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "registers": [int(n) for n in re.findall(r"Used (\d+) registers", text[0])],
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill stores", text[0])],
    }


def main() -> None:
    """Compiles the cases of the first argument."""
    warnings.simplefilter("ignore")
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="-1", MOSAIC_GPU_DUMP_PTXAS="1")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # ptxas itself is asked
    os.environ["PATH"] = os.pathsep.join([str(PTXAS_DIRECTORY), os.environ.get("PATH", "")])
    flags = f"--xla_gpu_cuda_data_dir={PTXAS_DIRECTORY.parent}"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for case in json.loads(sys.argv[1]):
        print(json.dumps(report(case)), flush=True)


if __name__ == "__main__":
    main()
