"""The tiles in which a TPU keeps pages, and what follows for page sizes and head dims."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

Array = Any

# Slots of a tile by bytes of an element: a register holds 8 rows of 32-bit words.
SUBLANES = {4: 8, 2: 16, 1: 32}


def tile_slots(dtype: Any, page_size: int) -> int:
    """Slots that are read and written together; a page smaller than a tile is moved whole."""
    least = SUBLANES[jnp.dtype(dtype).itemsize]
    return least if page_size % least == 0 else page_size


def check_tiles(kv: Array, interpret: Any) -> None:
    """Raises NotImplementedError where pages are no whole tiles; interpret mode has no tiles."""
    if interpret:
        return
    _, _, size, width = kv.shape
    dtype = jnp.dtype(kv.dtype)
    if width % 128:
        raise NotImplementedError(f"head dim is {width // 2}, the TPU kernels take multiples of 64")
    least = SUBLANES[dtype.itemsize]
    if size % least:
        raise NotImplementedError(
            f"page size is {size}, the TPU kernels take multiples of {least} for {dtype.name} pages"
        )
