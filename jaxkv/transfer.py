"""KV between the pool and the host, slot by slot: how entries leave the device and come back.

On the host a block is storage[L, n, K, 2H], bfloat16 as its bits, so that it reads the same on every
platform.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.entry import Block
from jaxkv.cache.pages import KVPages
from jaxkv.cache.table import bucket
from jaxkv.steps import Pages
from jaxkv.typing import Array, Int32

STEP_SLOTS = 1024  # slots of one transfer: bounds its temporaries


def _rows(group: KVPages, slots: Array) -> tuple[Array, Array]:
    """Rows [L, n] of the pages array and offsets [n]; a slot outside the pool leaves the array."""
    layers = group.kv.shape[0] // group.num_pages
    page, offset = slots // group.page_size, slots % group.page_size
    rows = page + jnp.arange(layers, dtype=jnp.int32)[:, None] * group.num_pages
    return jnp.where(page < group.num_pages, rows, group.kv.shape[0]), offset


@jax.jit
def _gather(pages: Pages, slots: Array) -> tuple[Array, ...]:
    blocks = []
    for group in pages:
        rows, offset = _rows(group, slots)
        blocks.append(group.kv.at[rows, :, offset].get(mode="clip"))
    return tuple(blocks)


@functools.partial(jax.jit, donate_argnames=("pages",))
def _scatter(pages: Pages, slots: Array, blocks: tuple[Array, ...]) -> Pages:
    written = []
    for group, block in zip(pages, blocks, strict=True):
        rows, offset = _rows(group, slots)
        kv = group.kv.at[rows, :, offset].set(block, mode="drop")
        written.append(group.replace(kv=kv))
    return tuple(written)


def read(pages: Pages, slots: Int32) -> tuple[Block, ...]:
    """Copies slots i32[n] of every layer to the host: per group storage[L, n, K, 2H]."""
    parts: list[list[Block]] = [[] for _ in pages]
    for start in range(0, len(slots), STEP_SLOTS):
        part = slots[start : start + STEP_SLOTS]
        padded = np.zeros(bucket(len(part), 64), np.int32)
        padded[: len(part)] = part
        for found, block in zip(parts, _gather(pages, padded), strict=True):
            values = np.asarray(block)[:, : len(part)]
            found.append(values.view(np.uint16) if values.dtype == jnp.bfloat16 else values)
    return tuple(np.concatenate(found, axis=1) for found in parts)


def write(pages: Pages, slots: Int32, blocks: tuple[Block, ...]) -> tuple[Pages, None]:
    """Writes blocks, as `read` gave them, into slots i32[n]. Donates `pages`."""
    for start in range(0, len(slots), STEP_SLOTS):
        part = slice(start, start + STEP_SLOTS)
        count = len(slots[part])
        padded = np.full(bucket(count, 64), pages[0].num_slots, np.int32)
        padded[:count] = slots[part]
        fitting = []
        for group, block in zip(pages, blocks, strict=True):
            raw = np.zeros((block.shape[0], len(padded), *block.shape[2:]), block.dtype)
            raw[:, :count] = block[:, part]
            fitting.append(raw.view(group.kv.dtype) if raw.dtype != group.kv.dtype else raw)
        pages = _scatter(pages, padded, tuple(fitting))
    return pages, None


def shapes(pages: Pages, tokens: int) -> tuple[tuple[int, ...], ...]:
    """What the blocks of `tokens` tokens must have, by group."""
    return tuple(
        (group.kv.shape[0] // group.num_pages, tokens, group.kv.shape[1], group.kv.shape[3])
        for group in pages
    )
