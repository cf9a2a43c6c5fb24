"""KV pages on the device: write-once slots, written in place by a donated step.

Layout `[L·num_pages, K, P, 2H]`, keys and values side by side on the last axis: every (page, head) is
one contiguous block for a GPU's copy engine and row-major tiles without padding for a TPU. Layers are
addressed as `page + layer·num_pages`; slicing a layer out of the array would copy it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.errors import ConfigError, nearest
from jaxkv.model.config import LayerGroup, ModelConfig
from jaxkv.typing import Array

KV_DTYPES = ("float32", "bfloat16")


@struct.dataclass(kw_only=True)
class KVPages:
    """The pages of one layer group. A page id addresses the same slots in every layer of the group."""

    kv: Array  # storage[L·num_pages, K, P, 2H]
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


def check_dtype(dtype: str) -> str:
    """Returns `dtype`, or raises a ConfigError for one that pages cannot have."""
    if dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype is '{dtype}', expected one of {', '.join(KV_DTYPES)}{nearest(dtype, KV_DTYPES)}"
        )
    return dtype


def storage_dtype(dtype: str, platform: str) -> jnp.dtype:
    """The dtype in which `dtype` pages are stored on `platform`.

    XLA on CPU copies the whole pool at every bfloat16 scatter (seen on jax 0.10.2), never at an integer
    one, so there bfloat16 is kept as its bits; only gathered blocks and new tokens are converted.
    """
    if check_dtype(dtype) == "bfloat16" and platform == "cpu":
        return jnp.dtype("uint16")
    return jnp.dtype(dtype)


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
    storage = storage_dtype(dtype, platform or jax.default_backend())
    return KVPages(kv=jnp.zeros(shape, storage), num_pages=num_pages, dtype=dtype)


def _encode(values: Array, pages: KVPages) -> Array:
    values = values.astype(pages.dtype)
    if values.dtype != pages.kv.dtype:
        values = jax.lax.bitcast_convert_type(values, pages.kv.dtype)
    return values


def decode_storage(raw: Array, pages: KVPages) -> Array:
    """Stored bits as values of `pages.dtype`."""
    if raw.dtype != jnp.dtype(pages.dtype):
        return jax.lax.bitcast_convert_type(raw, jnp.dtype(pages.dtype))
    return raw


def write_slots(
    pages: KVPages,
    layer: int | Array,
    slots: Array,
    keys: Array,
    values: Array,
    append: Callable[..., Array] | None = None,
) -> KVPages:
    """Writes new tokens of one layer. In place when `pages` is donated.

    Args:
      pages: the pages of the layer's group.
      layer: index of the layer within its group.
      slots: i32[...], page·P + offset; `pages.num_slots`, like any other slot outside the pool,
        drops the write.
      keys, values: float32[..., K, H].
      append: a kernel with the arguments of `pallas_kernels.append`; XLA's scatter when None.
    """
    kv_heads, head_dim = keys.shape[-2:]
    slots = slots.reshape(-1)
    page, offset = slots // pages.page_size, slots % pages.page_size
    # A dropped slot must leave the array as a whole, not land on the next layer's first page.
    row = jnp.where((page >= 0) & (page < pages.num_pages), page + layer * pages.num_pages, pages.kv.shape[0])
    if append is not None:
        keys, values = (x.reshape(-1, kv_heads, head_dim) for x in (keys, values))
        return pages.replace(kv=append(pages.kv, row, offset, keys, values))  # type: ignore[attr-defined]
    rows = jnp.concatenate([keys, values], -1).reshape(-1, kv_heads, 2 * head_dim)
    kv = pages.kv.at[row, :, offset].set(_encode(rows, pages), mode="drop")
    return pages.replace(kv=kv)  # type: ignore[attr-defined]


def read_slots(pages: KVPages, layer: int | Array, slots: Array) -> Array:
    """Gathers single slots of one layer: i32[n] to `pages.dtype`[n, K, 2H]."""
    page, offset = slots // pages.page_size, slots % pages.page_size
    raw = pages.kv.at[page + layer * pages.num_pages, :, offset].get(mode="promise_in_bounds")
    return decode_storage(raw, pages)


def read_pages(pages: KVPages, layer: int, page: Array) -> Array:
    """Gathers pages of one layer: i32[...] ids to `pages.dtype`[..., K, P, 2H].

    An empty table entry (`num_pages`) reads some page: the caller masks its slots.
    """
    row = jnp.minimum(page, pages.num_pages - 1) + layer * pages.num_pages
    # Ids were validated on the host, so XLA need not clamp again.
    return decode_storage(pages.kv.at[row].get(mode="promise_in_bounds"), pages)


def poison_pages(pages: KVPages, page: Array) -> KVPages:
    """Fills whole pages with NaN in every layer, so that a stray read of a free page shows. For tests."""
    layers = pages.kv.shape[0] // pages.num_pages
    rows = (jnp.arange(layers)[:, None] * pages.num_pages + page).reshape(-1)
    shape = (rows.shape[0], *pages.kv.shape[1:])
    kv = pages.kv.at[rows].set(_encode(jnp.full(shape, jnp.nan, jnp.float32), pages))
    return pages.replace(kv=kv)  # type: ignore[attr-defined]
