"""What an engine refuses, in one sentence each, before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxkv.cache.sequence import frozen
from jaxkv.errors import CapacityError, ConfigError, RelocationError, TokenError
from jaxkv.model.config import ModelConfig
from jaxkv.reuse.diff import Span
from jaxkv.typing import Int32

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
GRANULARITIES = ("token", "chunk")
DEFAULT_PAGES = 1024


def check_geometry(
    *,
    num_pages: int | None,
    page_size: int,
    chunk_size: int,
    reuse_granularity: str,
    max_deltas: int,
    capacity_bytes: int | None = None,
    token_bytes: int = 1,
) -> int:
    """Refuses an engine's geometry with a ConfigError; returns the pages that it asks for."""
    if capacity_bytes is not None and num_pages is not None:
        raise ConfigError(
            f"num_pages is {num_pages} and capacity_bytes {capacity_bytes}, expected one of them"
        )
    num_pages = DEFAULT_PAGES if num_pages is None else num_pages
    numbers = {
        "num_pages": num_pages,
        "page_size": page_size,
        "chunk_size": chunk_size,
        "max_deltas": max_deltas,
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ConfigError(f"{name} is {value!r}, expected a whole number")
    if capacity_bytes is not None and page_size > 0:
        page_bytes = page_size * token_bytes
        num_pages = check_bytes("capacity_bytes", capacity_bytes, page_bytes) // page_bytes
    if num_pages < 1:
        raise ConfigError(f"num_pages is {num_pages}, expected a positive number")
    if num_pages * page_size >= 2**31:
        raise ConfigError(f"num_pages is {num_pages}, expected fewer than 2**31 slots in all")
    if page_size not in PAGE_SIZES:
        raise ConfigError(f"page_size is {page_size}, expected one of {PAGE_SIZES}")
    if chunk_size <= 0 or chunk_size % page_size:
        raise ConfigError(f"chunk_size is {chunk_size}, expected a multiple of page_size {page_size}")
    if reuse_granularity not in GRANULARITIES:
        raise ConfigError(f"reuse_granularity is '{reuse_granularity}', expected 'token' or 'chunk'")
    if max_deltas < 2:
        raise ConfigError(f"max_deltas is {max_deltas}, expected at least 2")
    return int(num_pages)


def check_bytes(name: str, value: Any, least: int = 1) -> int:
    """Returns a whole number of bytes, at least `least`, or raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} is {value!r}, expected a whole number of bytes")
    if value < least:
        raise ConfigError(f"{name} is {value}, expected at least {least} bytes")
    return int(value)


def check_seconds(name: str, value: Any) -> float | None:
    """Returns a positive number of seconds or None, or raises ConfigError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not value > 0:
        raise ConfigError(f"{name} is {value!r}, expected a positive number or None")
    return float(value)


def check_tokens(tokens: Any, config: ModelConfig, what: str = "tokens") -> Int32:
    """Returns `tokens` as a write-protected i32[n] copy.

    Raises:
      TokenError: empty, not one-dimensional, not integers, or an id outside 0..vocab_size-1.
      CapacityError: more tokens than the model has positions.
    """
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise TokenError(f"{what} are ragged, expected one dimension of token ids") from None
    if array.ndim != 1:
        raise TokenError(f"{what} have shape {array.shape}, expected one dimension")
    if array.size == 0:
        raise TokenError(f"{what} are empty, expected at least one token")
    if array.dtype.kind not in "iu":
        raise TokenError(f"{what} have dtype {array.dtype}, expected integers")
    # JAX clamps an out-of-range gather silently, so this is the only place to notice.
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= config.vocab_size:
        bad = int(np.argmax((array < 0) | (array >= config.vocab_size)))
        raise TokenError(
            f"{what}[{bad}] is {int(array[bad])}, expected a token id in 0..{config.vocab_size - 1}"
        )
    if config.image_token_ids and (images := np.isin(array, config.image_token_ids)).any():
        at = int(np.argmax(images))
        raise TokenError(
            f"{what}[{at}] is {int(array[at])}, which stands for an image or a video, expected text: behind "
            "one the three axes of M-RoPE have different positions"
        )
    check_length(array.size, config)
    return frozen(np.array(array, np.int32))


def check_length(length: int, config: ModelConfig) -> None:
    """Raises CapacityError for a sequence that is longer than the model's positions."""
    if length > config.max_positions:
        raise CapacityError(
            f"the sequence has {length} tokens, expected at most the model's {config.max_positions} positions"
        )


def check_moves(spans: Iterable[Span], config: ModelConfig) -> None:
    """Raises RelocationError if a span moves and the model's rotations do not compose."""
    reason = config.relocation_refused
    if reason and any(span.delta for span in spans):
        raise RelocationError(
            f"keys cannot be moved: {reason}, expected a policy that moves none: jaxkv.Exact()"
        )


def check_params(new: Any, old: Any) -> None:
    """Raises ConfigError unless `new` has the structure and shapes of `old`."""
    expected = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(old)}
    found = {
        jax.tree_util.keystr(path): getattr(leaf, "shape", None)
        for path, leaf in jax.tree.leaves_with_path(new)
    }
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ConfigError(
                f"params{name} has shape {found.get(name)}, expected {expected.get(name)} as before"
            )


def check_count(name: str, value: Any) -> int:
    """Returns a whole number of at least 1, or raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least 1")
    return int(value)
