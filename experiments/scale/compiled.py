"""What XLA makes of a decode step on a mesh that is not here. A process of its own for each topology:

    python -m experiments.scale.compiled v5e:2x4 '[{"subject": "Llama-3-8B", "model": 8, ...}]'
    python -m experiments.scale.compiled cpu '[...]'        # the partitioner alone, on virtual devices

One JSON object a case: the collectives of the compiled program, and what a device holds. TPU topologies need
libtpu (`pip install "jax[tpu]"`), no TPU.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
import warnings
from typing import Any


def prepare(topology: str, devices: int) -> None:
    """Sets what must be set before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if topology == "cpu":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    else:
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost"
        )


def compile_step(topology: str, case: dict[str, Any]) -> dict[str, Any]:
    """Compiles a decode step (T = 1) and reads it."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from experiments.collectives import collectives
    from experiments.scale.machines import SUBJECTS
    from jaxkv import steps
    from jaxkv.cache.pages import make_pages
    from jaxkv.cache.table import GroupInput, PageTable, StepInput
    from jaxkv.model.backend import Backend
    from jaxkv.model.params import abstract_params
    from jaxkv.model.sharding import PAGE_AXES, shardings
    from jaxkv.parallel import as_mesh, weight_shardings
    from pallas_kernels import compiling_for

    subject = next(s for s in SUBJECTS if s.name == case["subject"])
    config = dataclasses.replace(subject.config, num_layers=case["layers"])
    batch, size = case["batch"], case["page_size"]
    if topology == "cpu":
        devices = jax.devices()
    else:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh: Any = as_mesh(Mesh(np.array(devices[: case["model"]]), ("model",)))
    whole = NamedSharding(mesh, PartitionSpec())

    def of(tree: Any, where: Any) -> Any:
        return jax.tree.map(
            lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, where
        )

    def i32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    platform = "cpu" if topology == "cpu" else "tpu"
    params = abstract_params(config, jnp.bfloat16)
    entries = case["context"] // size
    pages = jax.eval_shape(
        functools.partial(
            make_pages,
            config,
            config.groups[0],
            num_pages=batch * entries,
            page_size=size,
            dtype="bfloat16",
            platform=platform,
        )
    )
    table = PageTable(
        page=i32(batch, entries),
        first=i32(batch, entries),
        lo=i32(batch, entries),
        hi=i32(batch, entries),
        delta_index=i32(batch, max(entries * size // 256, 1)),
        deltas=i32(batch, 1),
    )
    step = StepInput(
        tokens=i32(batch, 1),
        positions=i32(batch, 1),
        lengths=i32(batch),
        groups=(GroupInput(slots=i32(batch, 1), table=table),),
    )
    with compiling_for(platform):
        function = functools.partial(
            inspect.unwrap(steps._step),
            config=config,
            logits="last",
            capture=False,
            backend=Backend(mesh=mesh),
        )
        arguments = (
            of(params, weight_shardings(params, config, mesh)),
            (of(pages, shardings(pages, mesh, PAGE_AXES)),),
            step,
        )
        traced = jax.jit(function, donate_argnums=1).trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
    program = lowered.compile()
    memory = program.memory_analysis()
    found = collectives(program.as_text())
    return {
        "collectives": [[each.kind, each.nbytes] for each in found],
        "arguments": memory.argument_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }


def main() -> None:
    """Compiles the cases of the second argument for the topology of the first."""
    warnings.simplefilter("ignore")
    topology, cases = sys.argv[1], json.loads(sys.argv[2])
    prepare(topology, max(case["model"] for case in cases))
    for case in cases:
        try:
            found = compile_step(topology, case)
        except Exception as error:  # told to whoever asked
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps({**case, **found}), flush=True)


if __name__ == "__main__":
    main()
