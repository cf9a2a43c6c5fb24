"""What a mesh changes inside a step: which dimension of an array lies on which devices.

The steps stay the programs they are on one device. Weights and pages come in sharded, XLA's partitioner
splits the matrix products along them, and this module says what it can't know: that results are wanted
whole on every device, and that a kernel runs on each shard by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")

DATA, MODEL = "data", "model"  # axes of a mesh: replicas of the model, and shards of one
# Logical axes that lie on the mesh axis "model" where it divides them; all others are whole on every device.
MODEL_AXES = ("kv_heads", "heads", "mlp", "vocab")
# By field name, as in `params.LAYER_AXES`. State that is not named here is whole on every device.
PAGE_AXES = {
    "kv": ("layers_pages", "kv_heads", "slots", "head_dim"),
    "scale": ("kv_heads", "layers_pages", "slots"),
}
# The dimension over KV heads of what `pallas_kernels` takes, by argument name, and gives.
_KERNEL_ARGUMENTS = {"q": 3, "kv": 1, "scale": 0, "keys": 1, "values": 1, "value_scale": 1}
_KERNEL_RESULTS = {"paged_attention": 2, "append": 1, "relocate_pages": 1}


def model_size(mesh: Mesh) -> int:
    """Shards of one replica's model."""
    return int(mesh.shape.get(MODEL, 1))


def spec_of(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, whole: tuple[str, ...] = ()) -> Any:
    """The partition of an array with logical axes: the first that lies on "model" and that it divides.

    Args:
      axes: a name for each dimension; () for an array that is whole everywhere.
      shape: its dimensions.
      mesh: with an axis "model", or nothing is sharded.
      whole: logical axes that are to stay whole although they would divide.
    """
    size = model_size(mesh)
    for dim, name in enumerate(axes[: len(shape)]):
        if size > 1 and name in MODEL_AXES and name not in whole and shape[dim] % size == 0:
            return PartitionSpec(*[None] * dim, MODEL)
    return PartitionSpec()


def field_name(path: tuple[Any, ...]) -> str:
    """The dataclass field, or dictionary key, at the end of a path into a pytree."""
    for key in reversed(path):
        name = getattr(key, "name", getattr(key, "key", None))
        if isinstance(name, str):
            return name
    return ""


def shardings(tree: Any, mesh: Mesh, axes: Mapping[str, tuple[str, ...]], whole: tuple[str, ...] = ()) -> Any:
    """A `NamedSharding` for every leaf of `tree`, by its field's name in `axes`; whole where it has none."""

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(axes.get(field_name(path), ()), leaf.shape, mesh, whole))

    return jax.tree.map_with_path(of, tree)


def keep_pages(pages: T, mesh: Mesh | None) -> T:
    """Inside jit: pages (or any pytree of state) stay on the shards that they are on."""
    if mesh is None:
        return pages
    kept: T = jax.lax.with_sharding_constraint(pages, shardings(pages, mesh, PAGE_AXES))
    return kept


def make_whole(values: T, mesh: Mesh | None) -> T:
    """Inside jit: every device, and so every process, has all of `values`."""
    if mesh is None:
        return values
    same: T = jax.lax.with_sharding_constraint(values, NamedSharding(mesh, PartitionSpec()))
    return same


def settle(out: T, mesh: Mesh | None) -> T:
    """Inside jit: a step's output, its pages on their shards and all else whole on every device."""
    if mesh is None:
        return out
    rest = make_whole(out.replace(pages=()), mesh)  # type: ignore[attr-defined]
    settled: T = rest.replace(pages=keep_pages(out.pages, mesh))  # type: ignore[attr-defined]
    return settled


def tracing_on(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Within it, a step is traced for `mesh`: `on_mesh` tells layers so."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def on_mesh() -> bool:
    """Whether what is traced now will be split over several devices by XLA's partitioner."""
    return not jax.sharding.get_abstract_mesh().empty


def split_last(x: Any) -> Any:
    """Inside a step on a mesh: the last dimension over "model", as far as it divides; else `x` as it is."""
    size = jax.sharding.get_abstract_mesh().shape.get(MODEL, 1)
    if size == 1 or x.shape[-1] % size:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 1), MODEL))


def on_shards(kernel: Callable[..., Any], function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`kernel`, an operation of `pallas_kernels` with its options set, run on every shard's KV heads.

    Compiled kernels cannot be split by the partitioner. Where the mesh does not divide the KV heads, each
    device computes all of them. `function` is the public operation, which names arguments and result.
    """
    names = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = dict(names.bind_partial(*args, **options).arguments)
        arrays = {name: value for name, value in given.items() if hasattr(value, "ndim")}
        rest = {name: value for name, value in given.items() if name not in arrays}
        divides = arrays["kv"].shape[_KERNEL_ARGUMENTS["kv"]] % model_size(mesh) == 0

        def spec(dim: int | None) -> PartitionSpec:
            whole = dim is None or not divides or MODEL not in mesh.axis_names
            return PartitionSpec() if whole else PartitionSpec(*[None] * dim, MODEL)  # type: ignore[operator]

        result: Any = spec(_KERNEL_RESULTS[function.__name__])
        if "scale" in arrays and function.__name__ != "paged_attention":
            result = (result, spec(_KERNEL_ARGUMENTS["scale"]))
        run = jax.shard_map(
            lambda given: kernel(**given, **rest),
            mesh=mesh,
            in_specs=({name: spec(_KERNEL_ARGUMENTS.get(name)) for name in arrays},),
            out_specs=result,
            check_vma=False,
        )
        return run(arrays)

    return call
