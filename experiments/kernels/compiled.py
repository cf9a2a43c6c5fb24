"""What compilers say of the kernels, for chips that are not here. A process of its own for each chip:

    python -m experiments.kernels.compiled v6e '[{"kernel": "decode", "heads": "llama-8b", ...}]'

One JSON object a case. TPUs need libtpu (`pip install "jax[tpu]"`). GPUs need jax's CUDA plugin of jax's own
version X: `pip install --no-deps jax-cuda13-pjrt==X jax-cuda13-plugin==X` and
`pip install nvidia-cuda-nvcc nvidia-nvvm`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# XLA's description of an H200 SXM, from NVIDIA's published figures.
H200 = """
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


def prepare(chip: str) -> None:
    """Sets what must be set before JAX is imported."""
    # A program read from a cache was not compiled, and may lack what the compiler says of it.
    os.environ.update(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
    if chip in TOPOLOGIES:
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1",
            TPU_ACCELERATOR_TYPE="v5litepod-4",
            TPU_WORKER_HOSTNAMES="localhost",
            # Only a compiler, that takes no TPU from anybody: two may run side by side.
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        )
        return
    cuda = Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["PATH"] = os.pathsep.join([str(cuda / "bin"), os.environ.get("PATH", "")])
    os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={cuda} {os.environ.get('XLA_FLAGS', '')}"


def compile_for(chip: str, function: Any, shapes: list[Any], donate: tuple[int, ...] = ()) -> Any:
    """`function` compiled for a chip; shapes are (shape, dtype) of its arguments."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, SingleDeviceSharding

    from pallas_kernels import compiling_for

    try:
        from jax.sharding import AbstractDevice
    except ImportError:  # jax 0.10
        from jax._src.mesh import AbstractDevice
    tpu = chip in TOPOLOGIES
    if tpu:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    else:
        topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    device: Any = topology.devices[0]
    sharding = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    kind = device.device_kind if tpu else "NVIDIA H200"
    abstract = AbstractDevice(
        device_kind=kind, num_cores=1 if tpu else None, platform="tpu" if tpu else "gpu"
    )
    mesh = AbstractMesh((), (), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh), compiling_for("tpu" if tpu else "gpu"):
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu" if tpu else "cuda",)).compile()


def arguments_of(case: dict[str, Any]) -> tuple[Any, list[Any], tuple[int, ...]]:
    """Function, argument shapes and donated arguments of a case of the roofline's table."""
    import jax.numpy as jnp

    import pallas_kernels
    from pallas_kernels.shapes import HEADS

    heads, group, head_dim = HEADS[case["heads"]]
    size, dtype = case["page_size"], jnp.dtype("bfloat16")
    function: Any
    if case["kernel"] == "relocate":
        n = case["pages"]
        pages = ((2 * n, heads, size, 2 * head_dim), dtype)
        angles = ((n, head_dim // 2), jnp.float32)
        function = functools.partial(pallas_kernels.relocate_pages, implementation=case["implementation"])
        return function, [pages, *[((n,), jnp.int32)] * 2, angles, angles], (0,)
    batch, length, context = case["batch"], case["length"], case["context"]
    entries, block = context // size, 256 // size
    table = ((batch, entries), jnp.int32)
    shapes: list[Any] = [((batch, 1, length, heads, group, head_dim), jnp.float32)]
    shapes += [((batch * entries, heads, size, 2 * head_dim), dtype), *[table] * 4]
    shapes += [((batch, entries // block), jnp.int32), ((batch, length), jnp.int32)]
    function = functools.partial(pallas_kernels.paged_attention, implementation=case["implementation"])
    return function, shapes, ()


def main() -> None:
    """Compiles the cases of the second argument for the chip of the first."""
    warnings.simplefilter("ignore")
    chip = sys.argv[1]
    prepare(chip)
    for case in json.loads(sys.argv[2]):
        try:
            function, shapes, donate = arguments_of(case)
            compiled = compile_for(chip, function, shapes, donate)
            costs = compiled.cost_analysis() or {}
            found = {name: costs.get(name) for name in ("optimal_seconds", "bytes accessed", "flops")}
            print(json.dumps({**found, "temp": compiled.memory_analysis().temp_size_in_bytes}), flush=True)
        except Exception as error:  # the sheet says what could not be compiled
            text = str(error).strip().splitlines() or ["no message"]
            print(json.dumps({"error": f"{type(error).__name__}: {text[0][:200]}"}), flush=True)


if __name__ == "__main__":
    main()
