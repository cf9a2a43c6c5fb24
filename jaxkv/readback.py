"""Reading KV state back to the host, for divergence by layer."""

from __future__ import annotations

import numpy as np

from jaxkv.cache.pages import KVPages, read_slots
from jaxkv.cache.pool import PagePool
from jaxkv.cache.sequence import FIRST, HI, LO, PAGE, Sequence, slots_of
from jaxkv.model.config import ModelConfig
from jaxkv.model.rope import inverse_frequencies
from jaxkv.parallel import to_host
from jaxkv.results import KVState


def read_kv(pages: KVPages, pool: PagePool, sequence: Sequence, config: ModelConfig) -> KVState:
    """Gathers a sequence's slots of every layer and un-rotates keys in float64 at their birth.

    Un-rotated keys of two sequences differ by content only, wherever their tokens stand.
    """
    segments = sequence.table_segments
    positions, slots = slots_of(segments, pool.page_size)
    births = pool.birth[segments[:, PAGE]]
    born = np.repeat(births - segments[:, FIRST], segments[:, HI] - segments[:, LO]) + positions
    layers = pages.kv.shape[0] // pages.num_pages
    keys, values = [], []
    angles = born[:, None, None] * inverse_frequencies(config.rope)
    cos, sin = np.cos(angles), np.sin(angles)
    half, head_dim = config.rope.rotary_dim // 2, config.head_dim
    for layer in range(layers):
        rows = to_host(read_slots(pages, layer, slots)).astype(np.float64)
        k = rows[..., :head_dim]
        x1, x2 = k[..., :half], k[..., half : 2 * half]
        turned = np.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)
        parts = [turned / config.rope.magnitude, k[..., 2 * half :]]
        keys.append(np.concatenate(parts, -1).astype(np.float32))
        values.append(rows[..., head_dim:].astype(np.float32))
    return KVState(positions=positions, keys=np.stack(keys), values=np.stack(values))
