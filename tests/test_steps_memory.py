"""Steps write in place: donated pages are aliased and nothing near their size is allocated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config

import jaxkv
from jaxkv import steps
from jaxkv.cache.pages import storage_dtype
from jaxkv.model.params import abstract_params
from jaxkv.model.sampling import SamplingInput
from pallas_kernels import scale_shape

B, P, POOL_BYTES = 2, 16, 64 << 20
CONFIG = tiny_config()
QUANTIZED = ("int8", "float8_e4m3fn")


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def abstract_pages(dtype: str) -> jaxkv.KVPages:
    storage = storage_dtype(dtype, jax.default_backend())
    page_bytes = CONFIG.num_layers * 2 * P * 32 * storage.itemsize
    pages = POOL_BYTES // page_bytes
    kv = jax.ShapeDtypeStruct((CONFIG.num_layers * pages, 2, P, 32), storage)
    scale = f32(*scale_shape(kv.shape)) if dtype in QUANTIZED else None
    return jaxkv.KVPages(kv=kv, scale=scale, num_pages=pages, dtype=dtype)


def abstract_table(deltas: int, batch: int = B) -> jaxkv.PageTable:
    return jaxkv.PageTable(
        page=i32(batch, 128), first=i32(batch, 128), lo=i32(batch, 128), hi=i32(batch, 128),
        delta_index=i32(batch, 8), deltas=i32(batch, deltas),
    )  # fmt: skip


def lower_step(pages: jaxkv.KVPages) -> Any:
    step = jaxkv.StepInput(
        tokens=i32(B, 16),
        positions=i32(B, 16),
        lengths=i32(B),
        groups=(jaxkv.GroupInput(slots=i32(B, 16), table=abstract_table(4)),),
    )
    return steps._step.lower(
        abstract_params(CONFIG), (pages,), step, config=CONFIG, logits="last", capture=False
    )


def lower_decode_many(pages: jaxkv.KVPages, batch: int = B, deltas: int = 1, *, copied: bool = False) -> Any:
    inputs = jaxkv.DecodeInput(
        logits=f32(batch, CONFIG.vocab_size),
        positions=i32(batch),
        limits=i32(batch),
        stop=i32(batch, 4),
        slots=(i32(batch, 8),),
        tables=(abstract_table(deltas, batch),),
        sampling=SamplingInput(
            temperature=f32(batch), top_k=i32(batch), top_p=f32(batch),
            seed=jax.ShapeDtypeStruct((batch,), jnp.uint32),
        ),
    )  # fmt: skip
    return steps._decode_many.lower(abstract_params(CONFIG), (pages,), inputs, config=CONFIG, copied=copied)


def lower_relocate(pages: jaxkv.KVPages) -> Any:
    moves = jaxkv.Moves(source=i32(256), target=i32(256), delta=i32(256))
    return steps._relocate.lower((pages,), (moves,), config=CONFIG)


LOWERED = [lower_step, lower_decode_many, lower_relocate]
ALWAYS = ("float32", "int8")  # without scales and with them; each compilation takes seconds


def grid(always: Any, *axes: Any) -> list[Any]:
    """All combinations; those of which `always` says no are slow."""
    return [
        pytest.param(*each, marks=() if always(*each) else pytest.mark.slow)
        for each in itertools.product(*axes)
    ]


@pytest.mark.parametrize(
    ("lower", "dtype"),
    grid(
        lambda lower, dtype: lower is lower_relocate or dtype in ALWAYS,
        LOWERED,
        ["float32", "bfloat16", *QUANTIZED],
    ),
)
def test_pages_are_updated_in_place(lower: Callable[[Any], Any], dtype: str) -> None:
    pages = abstract_pages(dtype)
    pool = pages.kv.size * pages.kv.dtype.itemsize
    assert pool == POOL_BYTES
    if pages.scale is not None:
        pool += pages.scale.size * 4
    memory = lower(pages).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool // 16


@pytest.mark.parametrize(
    ("dtype", "deltas", "batch"),
    grid(
        lambda *each: each in (("float32", 7, 1), ("float32", 1, 8), ("int8", 7, 8)),
        ALWAYS,
        [1, 7],
        [1, 2, 8],
    ),
)
def test_a_loop_copies_its_kv_once(dtype: str, deltas: int, batch: int) -> None:
    pages = abstract_pages(dtype)
    pool = POOL_BYTES + (0 if pages.scale is None else pages.scale.size * 4)
    memory = lower_decode_many(pages, batch, deltas, copied=True).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool
    copy = CONFIG.num_layers * batch * 2 * (128 * P) * 2 * 16 * 4  # keys and values, float32
    # While a layer is gathered it is there a few times; within the loop each copy is updated in place.
    layers = 1 + 3 / CONFIG.num_layers
    assert memory.temp_size_in_bytes < copy * layers + (1 << 20)


def test_pages_of_every_kind_are_described_by_their_contract() -> None:
    for dtype in ("float32", "bfloat16", *QUANTIZED):
        pages = jaxkv.make_pages(CONFIG, CONFIG.groups[0], num_pages=4, page_size=8, dtype=dtype)
        assert pages.page_size == 8
        assert pages.num_slots == 32
        assert pages.dtype == dtype
        assert not np.asarray(pages.kv).any()
        assert (pages.scale is not None) == (dtype in QUANTIZED)
        assert len(dataclasses.fields(pages)) == 4
    with pytest.raises(jaxkv.ConfigError, match=r"kv_dtype is 'bfloat61'.*bfloat16"):
        jaxkv.make_pages(CONFIG, CONFIG.groups[0], num_pages=4, page_size=8, dtype="bfloat61")
    with pytest.raises(jaxkv.ConfigError, match="num_pages is 0"):
        jaxkv.make_pages(CONFIG, CONFIG.groups[0], num_pages=0, page_size=8)
