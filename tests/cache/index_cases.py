"""What the tests of the prefix index share: writing pages and publishing texts."""

from __future__ import annotations

import numpy as np

from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import Match, PrefixIndex
from jaxkv.cache.sequence import FIRST, HI, LO, PAGE

ROOT = b"contract"
P = 4


def ints(values: list[int] | str | range) -> np.ndarray:
    return np.array([ord(c) for c in values] if isinstance(values, str) else list(values), np.int32)


def make(num_pages: int = 64) -> tuple[PagePool, PrefixIndex]:
    pool = PagePool(num_pages, P)
    return pool, PrefixIndex(pool)


def write(pool: PagePool, start: int, end: int) -> np.ndarray:
    """Fresh pages with written slots for positions start..end-1."""
    births = np.arange(start, end, P, dtype=np.int32)
    pages = pool.allocate(births)
    highs = np.minimum(P, end - births)
    pool.fill(pages, highs)
    return np.stack([pages, np.zeros_like(pages), highs, births], axis=1).astype(np.int32)


def publish(pool: PagePool, index: PrefixIndex, tokens: np.ndarray, root: bytes = ROOT) -> int:
    """What a sequence does: match, write the rest, insert, let go. Returns tokens newly indexed."""
    match = index.match(root, tokens)
    own = write(pool, match.length, len(tokens))
    new = index.insert(root, tokens, np.concatenate([match.segments, own]))
    pool.release(match.pages)
    pool.release(own[:, PAGE])
    return new


def covered(match: Match) -> list[int]:
    """Positions that the segments of a match hold."""
    rows = match.segments
    return [p for row in rows for p in range(row[FIRST] + row[LO], row[FIRST] + row[HI])]


def intact(pool: PagePool, index: PrefixIndex, *held: Match) -> None:
    index.check()
    pool.check([*index.references(), *(m.pages for m in held)])
