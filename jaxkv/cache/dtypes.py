"""What keys and values may be stored as, and what a token of them takes. Host only.

Quantized KV has a float32 scale for each slot and head, one for the key and one for the value: a stored
number is worth `stored · scale`, and the largest of a slot and head is the dtype's largest.
"""

from __future__ import annotations

from typing import Any

from jaxkv.errors import ConfigError, nearest
from jaxkv.model.config import ModelConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}  # bytes of a stored number
KV_DTYPES = tuple(ITEMSIZE)
LARGEST = {"int8": 127, "float8_e4m3fn": 448}  # magnitude that a scale maps the largest number to
SCALE_BYTES = 4  # of one float32 scale
# What users write for them elsewhere.
_MEANT = {
    "fp32": "float32", "f32": "float32", "bf16": "bfloat16", "i8": "int8", "s8": "int8", "q8_0": "int8",
    "fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "float8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}  # fmt: skip


def check_dtype(dtype: Any, name: str = "kv_dtype", also: tuple[str, ...] = ()) -> str:
    """Returns `dtype`, or raises a ConfigError for one that is neither a dtype of pages nor in `also`."""
    known = (*also, *KV_DTYPES)
    if not isinstance(dtype, str) or dtype not in known:
        close = nearest(_MEANT.get(str(dtype).lower(), str(dtype)), known)
        raise ConfigError(f"{name} is '{dtype}', expected one of {', '.join(known)}{close}")
    return dtype


def is_quantized(dtype: str) -> bool:
    """Whether pages of `dtype` have scales."""
    return dtype in LARGEST


def scale_format(dtype: str) -> str:
    """How pages of `dtype` are scaled, as the contract names it; "" for those that are not."""
    return f"float32 amax/{LARGEST[dtype]} a slot, head, key and value" if dtype in LARGEST else ""


def kv_token_bytes(config: ModelConfig, dtype: str, *, windowed: bool = True) -> int:
    """Bytes that one token keeps over all layers: keys, values, and their scales where there are any.

    Without local layers if `windowed` is False.
    """
    stored = config.kv_bytes_per_token(ITEMSIZE[check_dtype(dtype, "dtype")], windowed=windowed)
    if dtype not in LARGEST:
        return stored
    # A scale stands for head_dim numbers.
    return stored + config.kv_bytes_per_token(SCALE_BYTES, windowed=windowed) // config.head_dim
