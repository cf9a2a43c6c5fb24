"""One engine over several devices: meshes, and weights and pages placed on them.

    engine = jaxkv.Engine(model, mesh="model:4")            # one replica over four devices
    replicas = jaxkv.Replicas(model, mesh="data:2,model:4")  # two of them, each with a pool of its own

The rule: an array is split over the axis "model" along the first of its logical axes KV heads, heads, MLP and
vocabulary whose size the axis divides, and is whole on every device otherwise. Query heads go with their KV
heads: where "model" does not divide K, attention and its pages are whole on every device, and MLP and
vocabulary are still split. (Tensor parallelism of Shoeybi et al., arXiv 1909.08053, by XLA's partitioner.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jaxkv.errors import ConfigError, nearest
from jaxkv.model.config import ModelConfig
from jaxkv.model.params import LAYER_AXES, PARAM_AXES, Params
from jaxkv.model.recurrent_params import RECURRENT_AXES, RecurrentParams
from jaxkv.model.sharding import DATA, MODEL, PAGE_AXES, model_size, shardings
from jaxkv.typing import Array

if TYPE_CHECKING:
    from jaxkv.io.checkpoint import Model

T = TypeVar("T")
AXES = (DATA, MODEL)


def parse_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that "data:2,model:4" describes: axes in this order, the last over neighbouring devices.

    Args:
      text: `axis:size` pairs of "data" and "model"; one that is left out has size 1.
      devices: all of `jax.devices()` when None.

    Raises:
      ConfigError: an unknown or repeated axis, a size that is no positive number, or sizes whose product is
        not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, colon, size = (piece.strip() for piece in part.partition(":"))
        if axis not in AXES:
            raise ConfigError(
                f"mesh is '{text}' with axis '{axis}', expected axes of {', '.join(AXES)}"
                f"{nearest(axis, AXES)}"
            )
        if axis in sizes:
            raise ConfigError(f"mesh is '{text}' with axis '{axis}' twice, expected each axis once")
        if not colon or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"mesh is '{text}' with size '{size}' of axis '{axis}', expected a positive number as in "
                "'data:2,model:4'"
            )
        sizes[axis] = int(size)
    if math.prod(sizes.values()) != len(devices):
        raise ConfigError(
            f"mesh is '{text}', which takes {math.prod(sizes.values())} devices, expected the {len(devices)} "
            "there are"
        )
    names = tuple(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), names, devices=devices, axis_types=(AxisType.Auto,) * len(names)
    )


def as_mesh(mesh: Any) -> Mesh | None:
    """A mesh from what users give: a `Mesh`, a text for `parse_mesh`, or None for one device.

    Raises:
      ConfigError: something else, or a mesh with other axes than "data" and "model".
    """
    if mesh is None:
        return None
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}, expected a jax.sharding.Mesh or a text as in 'data:2,model:4'"
        )
    for axis in mesh.axis_names:
        if axis not in AXES:
            raise ConfigError(f"mesh has axis {axis!r}, expected axes of {', '.join(AXES)}")
    # Which axes the partitioner may use is for us to say: all of them.
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def one_replica(mesh: Any) -> Mesh | None:
    """The mesh of one engine.

    Raises:
      ConfigError: as in `as_mesh`, or the mesh holds several replicas.
    """
    found = as_mesh(mesh)
    count = 1 if found is None else found.shape.get(DATA, 1)
    if count > 1:
        raise ConfigError(
            f"mesh has {count} replicas on axis '{DATA}', expected one: an engine is one replica with one "
            "pool, jaxkv.Replicas(model, mesh=...) makes an engine for each"
        )
    return found


def split_replicas(mesh: Mesh) -> tuple[Mesh, ...]:
    """One mesh for each index of the axis "data", of the devices there."""
    devices, names = mesh.devices, mesh.axis_names
    devices = np.moveaxis(devices, names.index(DATA), 0) if DATA in names else devices[None]
    return tuple(
        Mesh(np.atleast_1d(group).reshape(-1), (MODEL,), axis_types=(AxisType.Auto,)) for group in devices
    )


def weight_shardings(params: Params, config: ModelConfig, mesh: Mesh) -> Any:
    """A `NamedSharding` for every weight of `params`, arrays or their shapes; see the rule above."""
    whole = () if config.num_kv_heads % model_size(mesh) == 0 else ("heads", "kv_heads")
    layers = tuple(
        shardings(layer, mesh, RECURRENT_AXES if isinstance(layer, RecurrentParams) else LAYER_AXES, whole)
        for layer in params.layers
    )
    rest: Any = params.replace(layers=())  # type: ignore[attr-defined]
    return shardings(rest, mesh, PARAM_AXES, whole).replace(layers=layers)


def place_params(params: Params, config: ModelConfig, mesh: Mesh | None) -> Params:
    """`params` on the mesh. One weight at a time, so that no more than one is held twice.

    Weights that lie there already stay. The caller's own copy lives as long as the caller keeps it:
    `jaxkv.load(..., mesh=...)` never makes one.
    """
    if mesh is None:
        return params
    placed: Params = jax.tree.map(_put, params, weight_shardings(params, config, mesh))
    return placed


def _put(value: Array, where: Any) -> Array:
    """One array where it belongs, once it is there."""
    if isinstance(value, jax.Array) and value.sharding == where:
        return value
    local = not isinstance(value, jax.Array) or value.is_fully_addressable
    if (
        local and not where.is_fully_addressable
    ):  # each process has the whole and gives its devices their part
        host = np.asarray(value)
        placed = jax.make_array_from_callback(host.shape, where, lambda index: host[index])
    else:
        placed = jax.device_put(value, where)
    return jax.block_until_ready(placed)


def place_model(model: Model, mesh: Mesh | None) -> Model:
    """`model` with its weights on the mesh."""
    if mesh is None:
        return model
    return dataclasses.replace(model, params=place_params(model.params, model.config, mesh))


def make_placed(make: Callable[[], T], mesh: Mesh | None) -> T:
    """State that `make` makes, such as pages: each device makes its own shard and never holds another."""
    if mesh is None:
        return make()
    where = shardings(jax.eval_shape(make), mesh, PAGE_AXES)
    made: T = jax.jit(make, out_shardings=where)()
    return made


def to_host(value: Array) -> np.ndarray[Any, np.dtype[Any]]:
    """An array on the host, also one of which other processes hold a part: then all must ask."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))
