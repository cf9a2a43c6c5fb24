"""Rebuilds a SentencePiece model from the vocabulary that a GGUF file carries.

GGUF (`tokenizer.ggml.model` "llama") stores pieces, scores and types but not the model itself, so
its protobuf message is written here; only the fields that encoding and decoding need.

Source: sentencepiece_model.proto (ModelProto, TrainerSpec, NormalizerSpec).
"""

from __future__ import annotations

import math
import struct
from typing import Any

from jaxkv.errors import FormatError

_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6
_BPE = 2  # TrainerSpec.ModelType


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative int32 is written as 64 bits
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def sentencepiece_model(metadata: dict[str, Any], tokens: list[str], types: list[int], where: str) -> bytes:
    """Returns a serialized ModelProto.

    Args:
      metadata: the GGUF metadata.
      tokens, types: pieces and their types (SentencePiece's numbers), as many as each other.
      where: names the file in errors.

    Raises:
      FormatError: no scores, no unknown piece, or a text normalization we do not read.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(s, float) and math.isfinite(s) for s in scores)
    ):
        raise FormatError(f"{where}: tokenizer.ggml.scores does not have {len(tokens)} numbers")
    if metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise FormatError(
            f"{where}: tokenizer.ggml.precompiled_charsmap is present, "
            "expected none: this text normalization is not supported"
        )
    unknown = [i for i, t in enumerate(types) if t == _UNKNOWN]
    if len(unknown) != 1:
        raise FormatError(f"{where}: {len(unknown)} tokens are of the unknown type, expected 1")
    if not all(isinstance(t, int) and 1 <= t <= _BYTE for t in types):
        raise FormatError(f"{where}: tokenizer.ggml.token_type has an entry outside 1 to {_BYTE}")
    pieces = b"".join(
        _message(
            1,
            _message(1, token.encode())
            + (_varint(2 << 3 | 5) + struct.pack("<f", score))
            + _integer(3, kind),
        )
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )

    def special(name: str) -> int:
        value: Any = metadata.get(f"tokenizer.ggml.{name}_token_id")
        # SentencePiece wants ids that name control pieces, or -1 for none
        known = isinstance(value, int) and 0 <= value < len(types) and types[value] == _CONTROL
        return int(value) if known else -1

    bos, eos = special("bos"), special("eos")
    trainer = (
        _integer(3, _BPE)
        + _integer(35, int(_BYTE in types))  # byte_fallback
        + _integer(40, unknown[0])
        + _integer(41, bos)
        + _integer(42, eos)
        + _integer(43, -1)
    )
    for field, i in ((45, unknown[0]), (46, bos), (47, eos)):
        trainer += _message(field, tokens[i].encode()) if i >= 0 else b""
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    squeeze = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = _message(1, b"identity") + _integer(3, int(prefix)) + _integer(4, int(squeeze))
    return pieces + _message(2, trainer) + _message(3, normalizer + _integer(5, 1))
