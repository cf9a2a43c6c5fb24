"""Recurrent layers as GGUF files keep them, seen as safetensors keep them.

llama.cpp multiplies the value heads of a layer with its fewer key heads by repeating those as a block: its
files have value head j of key head k at place j·Hk + k, which in safetensors and in `Params` is place
k·r + j, where r = Hv / Hk. Beside that a file holds -exp of the logarithm of the decay's speed, and the
convolution without the axis of length 1. Nothing is read before it is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxkv.errors import FormatError
from jaxkv.io.weights import TensorSource
from jaxkv.model.config import ModelConfig, RecurrentConfig
from jaxkv.typing import Float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class _View:
    """A stored tensor of another shape or in another order."""

    shape: tuple[int, ...]
    read: Callable[[int, int], Float32]

    def rows(self, lo: int, hi: int) -> Float32:
        return self.read(lo, hi)


def grouped_heads(
    config: ModelConfig, tensors: Mapping[str, TensorSource], names: Mapping[str, str], where: str
) -> dict[str, TensorSource]:
    """Returns the tensors of a GGUF file with those of recurrent layers as `Params` wants them.

    Args:
      config: the architecture that the file claims.
      tensors: every tensor of the file by name.
      names: part -> tensor name, a family's `gguf_tensors`.
      where: names the file in errors.

    Raises:
      FormatError: a convolution of the wrong shape; and, when they are read, decays that are not negative.
    """
    found, shape = dict(tensors), config.recurrent
    if shape is None:
        return found
    for layer in config.recurrent_layers:
        for part, change in _CHANGES.items():
            name = names[part].format(i=layer)
            if name in found:
                found[name] = change(_Stored(found[name], shape, f"{where}: tensor '{name}'"))
    return found


class _Stored:
    """A tensor of a recurrent layer as the file has it; each method gives it as safetensors have it."""

    def __init__(self, source: TensorSource, shape: RecurrentConfig, what: str) -> None:
        self.source, self.shape, self.what = source, shape, what

    @functools.cached_property
    def places(self) -> np.ndarray[Any, Any]:
        """Where the file has value head 0, 1, ...: i64[Hv]; only asked of a tensor that has so many."""
        heads, key_heads = self.shape.num_value_heads, self.shape.num_key_heads
        return np.arange(heads).reshape(heads // key_heads, key_heads).T.reshape(-1)

    def rows(self, width: int, before: int = 0) -> _View:
        """Rows of which those from `before` on are `width` for each value head."""

        def read(lo: int, hi: int) -> Float32:
            wanted = np.arange(lo, hi)
            head, within = np.divmod(np.maximum(wanted - before, 0), width)
            stored = np.where(wanted < before, wanted, before + self.places[head] * width + within)
            runs = np.split(stored, np.flatnonzero(np.diff(stored) != 1) + 1)
            return np.concatenate([self.source.rows(int(run[0]), int(run[-1]) + 1) for run in runs])

        return _View(shape=tuple(self.source.shape), read=read)

    def values(self) -> _View:
        return self.rows(self.shape.value_dim)

    def heads(self) -> _View:
        return self.rows(1)

    def behind_keys(self) -> _View:
        return self.rows(self.shape.value_dim, 2 * self.shape.num_key_heads * self.shape.key_dim)

    def convolution(self) -> _View:
        channels, taps = self.shape.channels, self.shape.conv_width
        if tuple(self.source.shape) != (channels, taps):
            raise FormatError(f"{self.what} has shape {list(self.source.shape)}, expected {[channels, taps]}")
        ordered = self.behind_keys()
        return _View(shape=(channels, 1, taps), read=lambda lo, hi: ordered.rows(lo, hi)[:, None])

    def columns(self) -> _View:
        def read(lo: int, hi: int) -> Float32:
            rows = self.source.rows(lo, hi)
            heads = rows.reshape(hi - lo, self.shape.num_value_heads, self.shape.value_dim)
            return heads[:, self.places].reshape(rows.shape)

        return _View(shape=tuple(self.source.shape), read=read)

    def decay(self) -> _View:
        ordered = self.heads()

        def read(lo: int, hi: int) -> Float32:
            values = ordered.rows(lo, hi)
            wrong = values[~(values < 0)]
            if wrong.size:
                raise FormatError(f"{self.what} holds {wrong[0]}, expected negative numbers: -exp of A_log")
            return np.asarray(np.log(-values), np.float32)

        return _View(shape=ordered.shape, read=read)


_CHANGES: Mapping[str, Callable[[_Stored], _View]] = {
    "mix_qkv": _Stored.behind_keys,
    "mix_conv": _Stored.convolution,
    "mix_gate": _Stored.values,
    "mix_beta": _Stored.heads,
    "mix_decay": _Stored.heads,
    "decay_log": _Stored.decay,
    "decay_bias": _Stored.heads,
    "mix_out": _Stored.columns,
}
