"""KV between the pool and the host, slot by slot: how entries leave the device and come back.

On the host a block is storage[L, n, K, 2H], bfloat16 and float8 as their bits, so that it reads the same on
every platform. Behind the block of a quantized group stands that of its scales, f32[L, n, K, 2]. States of
recurrent layers go one state slot at a time: they are large.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.entry import Block
from jaxkv.cache.pages import KVPages
from jaxkv.cache.states import StatePool, kv_groups
from jaxkv.cache.table import bucket
from jaxkv.parallel import to_host
from jaxkv.steps import Pages
from jaxkv.typing import Array, Int32
from pallas_kernels.scales import put_slots, scales_of_slots

STEP_SLOTS = 1024  # slots of one transfer: bounds its temporaries
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}


def _rows(group: KVPages, slots: Array) -> tuple[Array, Array]:
    """Rows [L, n] of the pages array and offsets [n]; a slot outside the pool leaves the array."""
    layers = group.kv.shape[0] // group.num_pages
    page, offset = slots // group.page_size, slots % group.page_size
    rows = page + jnp.arange(layers, dtype=jnp.int32)[:, None] * group.num_pages
    return jnp.where(page < group.num_pages, rows, group.kv.shape[0]), offset


def _arrays(group: KVPages) -> tuple[Array, ...]:
    """What a group stores: its numbers, and its scales if it has any."""
    return (group.kv,) if group.scale is None else (group.kv, group.scale)


@jax.jit
def _gather(pages: Pages, slots: Array) -> tuple[Array, ...]:
    blocks = []
    for group in pages:
        rows, offset = _rows(group, slots)
        blocks.append(group.kv.at[rows, :, offset].get(mode="clip"))
        if group.scale is not None:
            slot = jnp.broadcast_to(offset, rows.shape)
            blocks.append(scales_of_slots(group.scale, rows, slot, group.page_size))
    return tuple(blocks)


@functools.partial(jax.jit, donate_argnames=("pages",))
def _scatter(pages: Pages, slots: Array, blocks: tuple[Array, ...]) -> Pages:
    written, left = [], list(blocks)
    for group in pages:
        rows, offset = _rows(group, slots)
        kv, scale = group.kv.at[rows, :, offset].set(left.pop(0), mode="drop"), group.scale
        if scale is not None:
            scale = put_slots(scale, kv, rows, jnp.broadcast_to(offset, rows.shape), left.pop(0))
        written.append(group.replace(kv=kv, scale=scale))
    return tuple(written)


def read(pages: Pages, slots: Int32) -> tuple[Block, ...]:
    """Copies slots i32[n] of every layer to the host: per group storage[L, n, K, 2H], and its scales."""
    pages = kv_groups(pages)
    parts: list[list[Block]] = [[] for group in pages for _ in _arrays(group)]
    for start in range(0, len(slots), STEP_SLOTS):
        part = slots[start : start + STEP_SLOTS]
        padded = np.zeros(bucket(len(part), 64), np.int32)
        padded[: len(part)] = part
        for found, block in zip(parts, _gather(pages, padded), strict=True):
            found.append(_as_bits(to_host(block)[:, : len(part)]))
    return tuple(np.concatenate(found, axis=1) for found in parts)


def write(pages: Pages, slots: Int32, blocks: tuple[Block, ...]) -> tuple[Pages, None]:
    """Writes blocks, as `read` gave them, into slots i32[n]. Donates `pages`."""
    whole, pages = pages, kv_groups(pages)
    for start in range(0, len(slots), STEP_SLOTS):
        part = slice(start, start + STEP_SLOTS)
        count = len(slots[part])
        padded = np.full(bucket(count, 64), pages[0].num_slots, np.int32)
        padded[:count] = slots[part]
        fitting = []
        arrays = [array for group in pages for array in _arrays(group)]
        for array, block in zip(arrays, blocks, strict=True):
            raw = np.zeros((block.shape[0], len(padded), *block.shape[2:]), block.dtype)
            raw[:, :count] = block[:, part]
            fitting.append(raw.view(array.dtype) if raw.dtype != array.dtype else raw)
        pages = _scatter(pages, padded, tuple(fitting))
    return (*pages, *whole[len(pages) :]), None


def shapes(pages: Pages, tokens: int) -> tuple[tuple[int, ...], ...]:
    """What the blocks of `tokens` tokens must have, in the order of `read`."""
    return tuple(
        (group.kv.shape[0] // group.num_pages, tokens, group.kv.shape[1], width)
        for group in kv_groups(pages)
        for width in (group.kv.shape[3], 2)[: len(_arrays(group))]
    )


def _as_bits(values: Block) -> Block:
    return values.view(_BITS.get(values.dtype.name, values.dtype))


def _state_arrays(pool: StatePool) -> tuple[Array, ...]:
    return (pool.conv, pool.state) if pool.operator is None else (pool.conv, pool.state, pool.operator)


def _state_rows(pool: StatePool, slot: Array) -> Array:
    return slot + jnp.arange(pool.state.shape[0] // pool.num_slots, dtype=jnp.int32) * pool.num_slots


@jax.jit
def _gather_state(pool: StatePool, slot: Array) -> tuple[Array, ...]:
    return tuple(array[_state_rows(pool, slot)] for array in _state_arrays(pool))


@functools.partial(jax.jit, donate_argnames=("pool",))
def _scatter_state(pool: StatePool, slot: Array, values: tuple[Array, ...]) -> StatePool:
    rows = _state_rows(pool, slot)
    new = [a.at[rows].set(value) for a, value in zip(_state_arrays(pool), values, strict=True)]
    operator = new[2] if len(new) > 2 else None
    return pool.replace(conv=new[0], state=new[1], operator=operator)  # type: ignore[attr-defined]


def read_state(pages: Pages, slot: int) -> tuple[Block, ...]:
    """Copies one state slot to the host.

    conv storage[Lr, C, k-1], state f32[Lr, Hv, Dk, Dv], and operator f32[Lr, Hv, Dk, Dk] if there are any.
    """
    return tuple(_as_bits(to_host(array)) for array in _gather_state(pages[-1], np.int32(slot)))


def write_state(pages: Pages, slot: int, arrays: tuple[Block, ...]) -> tuple[Pages, None]:
    """Writes what `read_state` gave into a state slot. Donates `pages`.

    An operator that the pool doesn't keep is left out; one that it keeps and that isn't given becomes zeros:
    whoever holds the slot notes that it has none.
    """
    pool = pages[-1]
    values = []
    for number, array in enumerate(_state_arrays(pool)):
        layers = array.shape[0] // pool.num_slots
        missing = number >= len(arrays)
        value = (
            np.zeros((layers, *array.shape[1:]), array.dtype)
            if missing
            else np.ascontiguousarray(arrays[number])
        )
        values.append(value.view(array.dtype) if value.dtype != array.dtype else value)
    return (*pages[:-1], _scatter_state(pool, np.int32(slot), tuple(values))), None


def state_shapes(pages: Pages) -> tuple[tuple[int, ...], ...]:
    """What the arrays of a state must have, in the order of `read_state`, an operator included."""
    pool = pages[-1]
    assert isinstance(pool, StatePool)
    layers = pool.state.shape[0] // pool.num_slots
    square = (layers, *pool.state.shape[1:3], pool.state.shape[2])
    return ((layers, *pool.conv.shape[1:]), (layers, *pool.state.shape[1:]), square)
