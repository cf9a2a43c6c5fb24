"""Reading KV state back to the host, for divergence by layer."""

from __future__ import annotations

import numpy as np

from jaxkv.cache.pages import read_slots
from jaxkv.cache.pool import PagePool
from jaxkv.cache.residency import Residency
from jaxkv.cache.sequence import FIRST, HI, LO, PAGE, Sequence, slots_of
from jaxkv.cache.states import kv_groups
from jaxkv.model.config import ModelConfig, RopeConfig
from jaxkv.model.rope import inverse_frequencies
from jaxkv.parallel import to_host
from jaxkv.results import KVState
from jaxkv.steps import Pages
from jaxkv.typing import Float32, Float64, Int32


def read_kv(
    pages: Pages,
    pool: PagePool,
    sequence: Sequence,
    config: ModelConfig,
    residency: Residency | None = None,
) -> KVState:
    """Gathers a sequence's slots of every layer and un-rotates keys in float64 at their birth.

    Un-rotated keys of two sequences differ by content only, wherever their tokens stand. What local
    layers no longer hold (`residency`) reads as NaN.
    """
    segments = sequence.table_segments
    positions, slots = slots_of(segments, pool.page_size)
    births = pool.birth[segments[:, PAGE]]
    born = np.repeat(births - segments[:, FIRST], segments[:, HI] - segments[:, LO]) + positions
    found: dict[int, tuple[Float32, Float32]] = {}
    for held, group in zip(kv_groups(pages), config.groups, strict=True):
        own, missing = slots, np.zeros(len(slots), np.bool_)
        if residency is not None and group.window:
            own = residency.physical(slots)
            page, offset = slots // pool.page_size, slots % pool.page_size
            missing = (own == held.num_slots) | (offset < residency.since[page])
            own = np.where(missing, 0, own)
        for index, layer in enumerate(group.layers):
            rows = to_host(read_slots(held, index, own)).astype(np.float64)
            rows[missing] = np.nan
            keys = _unrotated(rows[..., : config.head_dim], born, group.rope)
            found[layer] = keys.astype(np.float32), rows[..., config.head_dim :].astype(np.float32)
    layers = sorted(found)
    return KVState(
        positions=positions,
        keys=np.stack([found[i][0] for i in layers]),
        values=np.stack([found[i][1] for i in layers]),
    )


def _unrotated(k: Float64, born: Int32, rope: RopeConfig) -> Float64:
    half = rope.rotary_dim // 2
    angles = born[:, None, None] * inverse_frequencies(rope)
    cos, sin = np.cos(angles), np.sin(angles)
    x1, x2 = k[..., :half], k[..., half : 2 * half]
    turned = np.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)
    return np.concatenate([turned / rope.magnitude, k[..., 2 * half :]], -1)
