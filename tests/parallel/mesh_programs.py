"""The compiled steps on a mesh: their collectives, by kind and number, and pages that stay in place."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from on_mesh import EVEN, UNEVEN, mesh_of
from tiny import tiny_config

import jaxkv
from experiments.collectives import collectives, counts
from experiments.scale.machines import Subject
from experiments.scale.plan import expected
from jaxkv import steps
from jaxkv.cache.pages import storage_dtype
from jaxkv.model.backend import Backend
from jaxkv.model.params import abstract_params
from jaxkv.model.sampling import SamplingInput
from jaxkv.model.sharding import PAGE_AXES, shardings
from jaxkv.parallel import weight_shardings

B, P, POOL_BYTES = 4, 16, 32 << 20
MESH = mesh_of(4)
WHOLE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())
LAYERS = 3


def of(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=WHOLE)


def placed(tree: Any, where: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)


def abstract(config: jaxkv.ModelConfig, dtype: str) -> tuple[Any, Any]:
    """Weights and pages on the mesh, as shapes."""
    params = abstract_params(config)
    storage = storage_dtype(dtype, "cpu")
    page_bytes = config.num_layers * config.num_kv_heads * P * 2 * config.head_dim * storage.itemsize
    count = POOL_BYTES // page_bytes
    shape = (config.num_layers * count, config.num_kv_heads, P, 2 * config.head_dim)
    pages = jaxkv.KVPages(kv=jax.ShapeDtypeStruct(shape, storage), num_pages=count, dtype=dtype)
    return (
        placed(params, weight_shardings(params, config, MESH)),
        (placed(pages, shardings(pages, MESH, PAGE_AXES)),),
    )


def table(deltas: int) -> jaxkv.PageTable:
    return jaxkv.PageTable(
        page=of((B, 64)), first=of((B, 64)), lo=of((B, 64)), hi=of((B, 64)),
        delta_index=of((B, 4)), deltas=of((B, deltas)),
    )  # fmt: skip


def lower_decode(config: jaxkv.ModelConfig, dtype: str = "float32") -> Any:
    params, pages = abstract(config, dtype)
    inputs = jaxkv.DecodeInput(
        logits=of((B, config.vocab_size), jnp.float32),
        positions=of((B,)),
        limits=of((B,)),
        stop=of((B, 4)),
        slots=(of((B, 8)),),
        tables=(table(1),),
        sampling=SamplingInput(
            temperature=of((B,), jnp.float32), top_k=of((B,)), top_p=of((B,), jnp.float32),
            seed=of((B,), jnp.uint32),
        ),
    )  # fmt: skip
    return steps._decode_many.lower(params, pages, inputs, config=config, backend=Backend(mesh=MESH))


def lower_prefill(config: jaxkv.ModelConfig, dtype: str = "float32") -> Any:
    params, pages = abstract(config, dtype)
    step = jaxkv.StepInput(
        tokens=of((B, 16)),
        positions=of((B, 16)),
        lengths=of((B,)),
        groups=(jaxkv.GroupInput(slots=of((B, 16)), table=table(4)),),
    )
    return steps._step.lower(
        params, pages, step, config=config, logits="last", capture=False, backend=Backend(mesh=MESH)
    )


def lower_relocate(config: jaxkv.ModelConfig, dtype: str = "float32") -> Any:
    _, pages = abstract(config, dtype)
    moves = jaxkv.Moves(source=of((256,)), target=of((256,)), delta=of((256,)))
    return steps._relocate.lower(pages, (moves,), config=config, backend=Backend(mesh=MESH))


# Two all-reduces a layer, behind the out and the down projection, and one behind the embedding. K = 2 over
# four devices: attention is whole, so only the down projection's sums are shared.
PLACES = {
    "all split": (EVEN, 2 * LAYERS + 1),
    "attention whole": (UNEVEN, LAYERS + 1),
    "vocabulary whole": ({**EVEN, "vocab_size": 97}, 2 * LAYERS),
}


@pytest.mark.parametrize(
    ("lower", "place", "dtype"),
    [
        (lower_decode, "all split", "float32"),
        (lower_prefill, "all split", "bfloat16"),
        (lower_prefill, "attention whole", "float32"),
        (lower_prefill, "vocabulary whole", "float32"),
    ],
)
def test_a_step_has_the_collectives_that_it_must_have_and_pages_stay(
    lower: Any, place: str, dtype: str
) -> None:
    shape, reduces = PLACES[place]
    config = tiny_config(**shape, num_layers=LAYERS)
    program = lower(config, dtype).compile()
    found = collectives(program.as_text())
    gathers = {"all-gather": 1} if config.vocab_size % 4 == 0 else {}
    assert counts(found) == {"all-reduce": reduces, **gathers}
    if lower is lower_decode:  # the plan for larger machines counts the same, with the same bytes
        formula = expected(Subject(name="", config=config), 4, B, jnp.float32)
        assert sorted((c.kind, c.nbytes) for c in found) == sorted((c.kind, c.nbytes) for c in formula)
    require_in_place(program, config, dtype)


def require_in_place(program: Any, config: jaxkv.ModelConfig, dtype: str) -> None:
    """A device's pages are taken over and nothing near their size is allocated."""
    kv = abstract(config, dtype)[1][0].kv
    share = math.prod(kv.sharding.shard_shape(kv.shape)) * kv.dtype.itemsize
    assert share == kv.size * kv.dtype.itemsize // (1 if config.num_kv_heads % 4 else 4)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == share
    assert memory.temp_size_in_bytes < share // 4


@pytest.mark.parametrize(("shape", "dtype"), [(EVEN, "bfloat16"), (UNEVEN, "float32")])
def test_moving_keys_needs_no_collective_and_pages_stay(shape: dict[str, int], dtype: str) -> None:
    config = tiny_config(**shape)
    program = lower_relocate(config, dtype).compile()
    assert collectives(program.as_text()) == []
    require_in_place(program, config, dtype)
