"""The tiles in which a TPU keeps pages, and what follows for page sizes and head dims."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.scales import TILE_ROWS, TILE_WIDTH

Array = Any

# Slots of a tile by bytes of an element: a register holds 8 rows of 32-bit words.
SUBLANES = {4: 8, 2: 16, 1: 32}


def tile_slots(dtype: Any, page_size: int) -> int:
    """Slots that are read and written together; a page smaller than a tile is moved whole."""
    least = SUBLANES[jnp.dtype(dtype).itemsize]
    return least if page_size % least == 0 else page_size


def check_tiles(kv: Array, interpret: Any, scale: Array | None = None) -> None:
    """Raises NotImplementedError where pages, or scales to be written, are no whole tiles.

    Interpret mode has no tiles.
    """
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
    if scale is not None and (scale.shape[1] % TILE_ROWS or scale.shape[2] % TILE_WIDTH):
        raise NotImplementedError(
            f"scale has shape {tuple(scale.shape)}, the TPU kernels write it where it has a multiple of "
            f"{TILE_ROWS} rows of a multiple of {TILE_WIDTH} numbers: see pallas_kernels.scale_shape"
        )
