"""Reads GGUF files: hyperparameters, weights, tokenizer material.

The header is walked here, with every length checked against the file before it is used: a flipped
bit in a length must end in one sentence, where `gguf.GGUFReader` loops on it or fails deep inside
(and takes 20 times as long on a vocabulary of 49,152). Type numbers, block sizes and the
dequantization itself come from the `gguf` package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxkv.errors import FormatError
from jaxkv.io.gguf_configs import config_from_gguf
from jaxkv.io.value_heads import grouped_heads
from jaxkv.io.weights import Progress, build_params
from jaxkv.model.config import ModelConfig
from jaxkv.model.families import family_from_gguf
from jaxkv.model.params import Params
from jaxkv.typing import Float32

_VERSIONS = (2, 3)
_SCALARS = {
    gguf.GGUFValueType.UINT8: "<u1",
    gguf.GGUFValueType.INT8: "<i1",
    gguf.GGUFValueType.UINT16: "<u2",
    gguf.GGUFValueType.INT16: "<i2",
    gguf.GGUFValueType.UINT32: "<u4",
    gguf.GGUFValueType.INT32: "<i4",
    gguf.GGUFValueType.FLOAT32: "<f4",
    gguf.GGUFValueType.BOOL: "<u1",
    gguf.GGUFValueType.UINT64: "<u8",
    gguf.GGUFValueType.INT64: "<i8",
    gguf.GGUFValueType.FLOAT64: "<f8",
}
_PLAIN: dict[gguf.GGMLQuantizationType, np.dtype[Any]] = {
    gguf.GGMLQuantizationType.F32: np.dtype("<f4"),
    gguf.GGMLQuantizationType.F16: np.dtype("<f2"),
    gguf.GGMLQuantizationType.F64: np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A stored tensor: `shape` is outermost first, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    data: np.ndarray[Any, Any]  # u8[bytes], a view of the mapped file
    where: str

    def rows(self, lo: int, hi: int) -> Float32:
        """Returns f32[hi - lo, ...], dequantized."""
        if len(self.shape) == 1 and self.type not in _PLAIN:  # blocks run along the only axis
            row = dataclasses.replace(self, shape=(1, *self.shape))
            return row.rows(0, 1)[0, lo:hi]
        size = self.data.size // self.shape[0]
        raw = self.data[lo * size : hi * size]
        shape = (hi - lo, *self.shape[1:])
        if self.type in _PLAIN:
            with np.errstate(over="ignore"):
                return raw.view(_PLAIN[self.type]).reshape(shape).astype(np.float32)
        try:
            with np.errstate(all="ignore"):  # corrupt scales overflow: the caller checks
                values = gguf.dequantize(raw.reshape(hi - lo, -1), self.type)
        except NotImplementedError as error:
            raise FormatError(
                f"{self.where}: tensor '{self.name}' has type {self.type.name}, "
                "which the gguf package cannot dequantize"
            ) from error
        return np.asarray(values, np.float32).reshape(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The parsed header of a GGUF file; tensor data stays on disk until read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Bounded reads from the mapped file."""

    def __init__(self, data: np.ndarray[Any, Any], where: str) -> None:
        self.data, self.where, self.offset = memoryview(data.data), where, 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self.data) - self.offset:
            raise FormatError(
                f"{self.where}: truncated: {what} at byte {self.offset} needs {size} bytes, "
                f"expected at most the {len(self.data) - self.offset} that remain"
            )
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def number(self, code: str, what: str) -> int:
        value: int = struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0]
        return value

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.where}: {what} is not valid UTF-8") from error

    def value(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind == gguf.GGUFValueType.ARRAY:
            item, count = self.number("I", what), self.number("Q", what)
            if item == gguf.GGUFValueType.STRING:
                self.check_count(count, 8, what)
                return [self.text(what) for _ in range(count)]
            return self.scalars(item, count, what)
        if kind == gguf.GGUFValueType.STRING:
            return self.text(what)
        return self.scalars(kind, 1, what)[0]

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _SCALARS:
            raise FormatError(f"{self.where}: {what} has value type {kind}, expected a scalar's")
        dtype = np.dtype(_SCALARS[gguf.GGUFValueType(kind)])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()
        return [bool(v) for v in values] if kind == gguf.GGUFValueType.BOOL else values

    def check_count(self, count: int, least: int, what: str) -> None:
        """Refuses a count whose items could not fit even at `least` bytes each."""
        if count * least > len(self.data) - self.offset:
            raise FormatError(
                f"{self.where}: truncated: {what} claims {count} items, "
                f"more than the {len(self.data) - self.offset} bytes that remain can hold"
            )


def open_gguf(path: str | Path) -> GgufFile:
    """Maps a GGUF file and reads its header.

    Raises:
      FormatError: not a GGUF file, an unsupported version, truncated, or inconsistent.
    """
    path = Path(path)
    where = path.name
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise FormatError(f"{where}: cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(data, where)
    magic = bytes(data[:4])
    if magic != b"GGUF":
        raise FormatError(f"{where}: magic is {magic!r}, expected b'GGUF'")
    cursor.offset = 4
    version = cursor.number("I", "version")
    if version not in _VERSIONS:
        note = " (a big-endian file)" if version & 0xFFFF == 0 and version else ""
        raise FormatError(f"{where}: GGUF version is {version}{note}, expected 2 or 3, little-endian")
    tensor_count, key_count = cursor.number("Q", "tensor count"), cursor.number("Q", "key count")
    cursor.check_count(key_count, 12, "key count")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise FormatError(f"{where}: metadata key '{key}' appears twice")
        metadata[key] = cursor.value(f"metadata '{key}'")
    if metadata.get("split.count", 0) not in (0, 1):
        raise FormatError(
            f"{where}: split.count is {metadata['split.count']}, expected one file: merge it first"
        )
    cursor.check_count(tensor_count, 24, "tensor count")
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"{where}: general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.offset // alignment) * alignment
    return GgufFile(path=path, metadata=metadata, tensors=_tensors(infos, data, start, alignment, where))


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("a tensor name")
    what = f"tensor '{name}'"
    rank = cursor.number("I", what)
    if not 1 <= rank <= 4:
        raise FormatError(f"{cursor.where}: {what} has {rank} dimensions, expected 1 to 4")
    shape = tuple(cursor.number("Q", what) for _ in range(rank))[::-1]
    if 0 in shape:
        raise FormatError(f"{cursor.where}: {what} has shape {list(shape)}, expected no zero")
    return name, shape, cursor.number("I", what), cursor.number("Q", what)


def _tensors(
    infos: list[tuple[str, tuple[int, ...], int, int]],
    data: np.ndarray[Any, Any],
    start: int,
    alignment: int,
    where: str,
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    end = start
    for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
        if name in tensors:
            raise FormatError(f"{where}: tensor '{name}' appears twice")
        if kind not in gguf.GGMLQuantizationType.__members__.values():
            raise FormatError(f"{where}: tensor '{name}' has unknown type number {kind}")
        qtype = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        if shape[-1] % block:
            raise FormatError(
                f"{where}: tensor '{name}' has rows of {shape[-1]} values, "
                f"expected a multiple of {block} for type {qtype.name}"
            )
        count = 1
        for n in shape:
            count *= n
        size = count // block * block_bytes
        lo = start + offset
        if lo + size > data.size:
            raise FormatError(
                f"{where}: truncated: tensor '{name}' ends at byte {lo + size}, "
                f"expected at most the file's {data.size}"
            )
        if lo < end or offset % alignment:
            raise FormatError(
                f"{where}: tensor '{name}' starts at byte {lo}, expected an aligned offset of at least {end}"
            )
        end = lo + size
        tensors[name] = GgufTensor(
            name=name, shape=shape, type=qtype, data=np.asarray(data[lo:end]), where=where
        )
    return tensors


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Returns the `ModelConfig` of an opened file; `FormatError` where it is unsupported."""
    where = file.path.name
    family = family_from_gguf(file.metadata, where)
    embed = file.tensors.get(family.gguf_tensors["embed"])
    if embed is None:
        raise FormatError(f"{where}: tensor '{family.gguf_tensors['embed']}' is missing")
    blocks = file.metadata.get(f"{family.gguf_architecture}.block_count")
    if isinstance(
        blocks, int
    ):  # a corrupt file may claim any number: nothing is made of it before it is seen
        norms = (family.gguf_tensors["attn_norm"].format(i=i) for i in range(blocks))
        missing = next((name for name in norms if name not in file.tensors), None)
        if missing is not None:
            raise FormatError(f"{where}: tensor '{missing}' is missing")
    factors = file.tensors.get(family.gguf_rope_factors)
    return config_from_gguf(
        file.metadata,
        vocab_size=embed.shape[0],
        tied=family.gguf_tensors["unembed"] not in file.tensors,
        rope_factors=None if factors is None else factors.rows(0, factors.shape[0]),
        where=where,
    )


def read_gguf_params(
    file: GgufFile, config: ModelConfig, *, dtype: str = "float32", progress: Progress | None = None
) -> Params:
    """Dequantizes all weights of an opened file; see `build_params` for arguments and errors."""
    where = file.path.name
    family = family_from_gguf(file.metadata, where)
    blocks = file.metadata.get(f"{family.gguf_architecture}.block_count", 0)
    further = tuple(f"blk.{i}." for i in range(config.num_layers, blocks))  # no layers of the decoder
    return build_params(
        config,
        grouped_heads(config, file.tensors, family.gguf_tensors, where),
        names=family.gguf_tensors,
        interleaved=family.gguf_interleaved,
        dtype=dtype,
        where=where,
        ignored=lambda name: name == family.gguf_rope_factors or name.startswith(further),
        progress=progress,
    )
