"""KV pages on the device: write-once slots, written in place by a donated step.

Layout `[L·num_pages, K, P, 2H]`, keys and values side by side on the last axis: every (page, head) is
one contiguous block for a GPU's copy engine and row-major tiles without padding for a TPU. Layers are
addressed as `page + layer·num_pages`; slicing a layer out of the array would copy it.

int8 and float8 pages are quantized on write, symmetrically, each slot and head by its largest key and its
largest value, and read as float32. What is stored is never quantized again where it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.cache.dtypes import LARGEST, check_dtype, is_quantized
from jaxkv.errors import ConfigError
from jaxkv.model.config import LayerGroup, ModelConfig
from jaxkv.typing import Array
from pallas_kernels.reference import dequantize, quantize
from pallas_kernels.scales import (
    by_slot,
    put_slots,
    rows_of_pages,
    scale_shape,
    scales_of_pages,
    scales_of_slots,
)

_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}  # integers of the same size


@struct.dataclass(kw_only=True)
class KVPages:
    """The pages of one layer group. A page id addresses the same slots in every layer of the group."""

    kv: Array  # storage[L·num_pages, K, P, 2H]
    scale: Array | None = None  # f32[K, X', S], see `pallas_kernels.scales`; None for float dtypes
    num_pages: int = struct.field(pytree_node=False)
    dtype: str = struct.field(pytree_node=False)  # of keys and values; the storage may be its bits

    @property
    def page_size(self) -> int:
        """P, slots in a page."""
        return int(self.kv.shape[2])

    @property
    def num_slots(self) -> int:
        """Slots of one layer; also the slot id that marks a write to be dropped."""
        return self.num_pages * self.page_size


def storage_dtype(dtype: str, platform: str) -> jnp.dtype:
    """The dtype in which `dtype` pages are stored on `platform`.

    XLA on CPU copies the whole pool at every bfloat16 and float8 scatter (seen on jax 0.10.2), never at an
    integer one, so there they are kept as their bits; only gathered blocks and new tokens are converted.
    """
    if platform == "cpu":
        return jnp.dtype(_BITS.get(check_dtype(dtype), dtype))
    return jnp.dtype(check_dtype(dtype))


def make_pages(
    config: ModelConfig,
    group: LayerGroup,
    *,
    num_pages: int,
    page_size: int,
    dtype: str = "float32",
    platform: str | None = None,
) -> KVPages:
    """Returns zeroed pages for the layers of `group`.

    Raises:
      ConfigError: `num_pages`, `page_size` or `dtype` is out of range.
    """
    for name, value in (("num_pages", num_pages), ("page_size", page_size)):
        if value <= 0:
            raise ConfigError(f"{name} is {value}, expected a positive number")
    shape = (len(group.layers) * num_pages, config.num_kv_heads, page_size, 2 * config.head_dim)
    platform = platform or jax.default_backend()
    storage, scale = storage_dtype(dtype, platform), None
    if is_quantized(dtype):
        scale = jnp.zeros(scale_shape(shape, tiles=platform == "tpu"), jnp.float32)
    return KVPages(kv=jnp.zeros(shape, storage), scale=scale, num_pages=num_pages, dtype=dtype)


def _encode(values: Array, pages: KVPages) -> Array:
    values = values.astype(pages.dtype)
    if values.dtype != pages.kv.dtype:
        values = jax.lax.bitcast_convert_type(values, pages.kv.dtype)
    return values


def decode_storage(raw: Array, pages: KVPages) -> Array:
    """Stored bits as numbers of `pages.dtype`, without their scales."""
    if raw.dtype != jnp.dtype(pages.dtype):
        return jax.lax.bitcast_convert_type(raw, jnp.dtype(pages.dtype))
    return raw


def _values(raw: Array, scale: Array | None, pages: KVPages) -> Array:
    """What stored rows [..., 2H] are worth: `pages.dtype`, or float32 where they are scaled."""
    stored = decode_storage(raw, pages)
    return stored if scale is None else dequantize(stored, scale)


def write_slots(
    pages: KVPages,
    layer: int | Array,
    slots: Array,
    keys: Array,
    values: Array,
    append: Callable[..., Array] | None = None,
    value_scale: Array | None = None,
) -> KVPages:
    """Writes new tokens of one layer. In place when `pages` is donated.

    Args:
      pages: the pages of the layer's group.
      layer: index of the layer within its group.
      slots: i32[...], page·P + offset; `pages.num_slots`, like any other slot outside the pool,
        drops the write.
      keys, values: float32[..., K, H].
      append: a kernel with the arguments of `pallas_kernels.append`; XLA's scatter when None.
      value_scale: f32[n, K] that values of quantized pages are stored with; their own largest when None.
    """
    kv_heads, head_dim = keys.shape[-2:]
    keys, values = (x.reshape(-1, kv_heads, head_dim) for x in (keys, values))
    row, offset = _rows(pages, layer, slots)
    if append is not None:
        given = {} if value_scale is None else {"value_scale": value_scale}
        written = append(pages.kv, row, offset, keys, values, scale=pages.scale, **given)
        kv, scale = (written, None) if pages.scale is None else written
        return pages.replace(kv=kv, scale=scale)  # type: ignore[attr-defined]
    scale = pages.scale
    if scale is not None:
        keys, of_key = quantize(keys, pages.dtype)
        values, of_value = quantize(values, pages.dtype, value_scale)
        scale = put_slots(scale, pages.kv, row, offset, jnp.stack([of_key, of_value], -1))
    rows = _encode(jnp.concatenate([keys, values], -1), pages)
    kv = pages.kv.at[row, :, offset].set(rows, mode="drop")
    return pages.replace(kv=kv, scale=scale)  # type: ignore[attr-defined]


def as_stored(pages: KVPages, keys: Array, values: Array) -> tuple[Array, Array]:
    """What f32[..., K, H] keys and values are worth once `write_slots` has stored them, float32."""
    if pages.scale is None:
        return keys.astype(pages.dtype).astype(jnp.float32), values.astype(pages.dtype).astype(jnp.float32)
    (keys, of_key), (values, of_value) = (quantize(x, pages.dtype) for x in (keys, values))
    both = dequantize(jnp.concatenate([keys, values], -1), jnp.stack([of_key, of_value], -1))
    keys, values = jnp.split(both, 2, -1)
    return keys, values


def _rows(pages: KVPages, layer: int | Array, slots: Array) -> tuple[Array, Array]:
    """Rows and offsets i32[n] of slots to write."""
    slots = slots.reshape(-1)
    page, offset = slots // pages.page_size, slots % pages.page_size
    # A dropped slot must leave the array as a whole, not land on the next layer's first page.
    inside = (page >= 0) & (page < pages.num_pages)
    return jnp.where(inside, page + layer * pages.num_pages, pages.kv.shape[0]), offset


def copy_slots(
    pages: KVPages,
    layer: int | Array,
    source: Array,
    target: Array,
    turn: Callable[[Array], Array],
    append: Callable[..., Array] | None = None,
) -> KVPages:
    """Copies slots of one layer, keys through `turn`, values bit for bit. In place when `pages` is donated.

    Quantized keys are turned as float32 and quantized once.

    Args:
      pages, layer, append: as in `write_slots`.
      source: i32[n], slots that hold something.
      target: i32[n], as `slots` in `write_slots`; none is a source.
      turn: f32[n, K, H] to f32[n, K, H].
    """
    gather = _gather_slots if append is None else _gather_slots_of_pages
    raw, factors = gather(pages, layer, source)
    keys, values = jnp.split(_values(raw, factors, pages).astype(jnp.float32), 2, -1)
    # Values keep their scale, and so their bits: of dequantized ones the largest may give another last bit.
    return write_slots(
        pages, layer, target, turn(keys), values, append, None if factors is None else factors[..., 1]
    )


def _gather_slots(pages: KVPages, layer: int | Array, slots: Array) -> tuple[Array, Array | None]:
    """Stored rows [n, K, 2H] and scales [n, K, 2] of slots that exist."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    row = page + layer * pages.num_pages
    raw = pages.kv.at[row, :, offset].get(mode="promise_in_bounds")
    if pages.scale is None:
        return raw, None
    return raw, scales_of_slots(pages.scale, row, offset, pages.page_size, mode="promise_in_bounds")


def _gather_slots_of_pages(pages: KVPages, layer: int | Array, slots: Array) -> tuple[Array, Array | None]:
    """The same by way of whole pages: XLA on TPU lays the pool out anew to gather single slots."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    row = page + layer * pages.num_pages

    def pick(whole: Array) -> Array:
        return jnp.take_along_axis(whole, offset[:, None, None, None], axis=2)[:, :, 0]

    raw = pick(pages.kv.at[row].get(mode="promise_in_bounds"))
    if pages.scale is None:
        return raw, None
    if jax.sharding.get_abstract_mesh().empty:
        return raw, pick(by_slot(rows_of_pages(pages.scale, row), pages.page_size))
    # Over a mesh heads are split, and stay a dimension of their own.
    return raw, pick(scales_of_pages(pages.scale, row, pages.page_size, mode="promise_in_bounds"))


def read_slots(pages: KVPages, layer: int | Array, slots: Array) -> Array:
    """Gathers single slots of one layer: i32[n] to [n, K, 2H] in `pages.dtype`, float32 if quantized."""
    return _values(*_gather_slots(pages, layer, slots), pages)


def read_pages(pages: KVPages, layer: int, page: Array) -> Array:
    """Gathers pages of one layer: i32[...] ids to [..., K, P, 2H] in `pages.dtype`, float32 if quantized.

    An empty table entry (`num_pages`) reads some page: the caller masks its slots.
    """
    row = jnp.minimum(page, pages.num_pages - 1) + layer * pages.num_pages
    # Ids were validated on the host, so XLA need not clamp again.
    raw = pages.kv.at[row].get(mode="promise_in_bounds")
    scale = pages.scale
    if scale is not None:
        scale = scales_of_pages(scale, row, pages.page_size, mode="promise_in_bounds")
    return _values(raw, scale, pages)


def poison_pages(pages: KVPages, page: Array) -> KVPages:
    """Fills whole pages with NaN in every layer, so that a stray read of a free page shows. For tests.

    int8 has no NaN: there the scales are, and the numbers are the largest.
    """
    layers = pages.kv.shape[0] // pages.num_pages
    rows = (jnp.arange(layers)[:, None] * pages.num_pages + page).reshape(-1)
    shape = (rows.shape[0], *pages.kv.shape[1:])
    fill = LARGEST["int8"] if pages.dtype == "int8" else jnp.nan
    kv = pages.kv.at[rows].set(_encode(jnp.full(shape, fill, jnp.float32), pages))
    scale = None if pages.scale is None else pages.scale.at[:, rows].set(jnp.nan)
    return pages.replace(kv=kv, scale=scale)  # type: ignore[attr-defined]
