"""One sentence for each argument that is not as the API says. Shapes and dtypes only: values are traced."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.scales import scale_shape

Array = Any
QUANTIZED = ("int8", "float8_e4m3fn")
KV_DTYPES = ("float32", "bfloat16", *QUANTIZED)


def check_pages(kv: Array, scale: Array | None) -> None:
    """Raises ValueError unless kv is [X, K, P, 2H] and scale fits its dtype."""
    name = jnp.dtype(kv.dtype).name
    if len(kv.shape) != 4 or kv.shape[3] % 2:
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}, expected [rows, KV heads, page size, 2 · head dim]"
        )
    if name not in KV_DTYPES:
        raise ValueError(f"kv has dtype {name}, expected one of {', '.join(KV_DTYPES)}")
    if scale is None:
        if name == "int8":
            raise ValueError(f"scale is None, expected f32{list(scale_shape(kv.shape))} for int8 pages")
        return
    if name not in QUANTIZED:
        raise ValueError(f"scale is given for {name} pages, expected None: only int8 and float8 are scaled")
    heads, rows, width = scale_shape(kv.shape)
    shape = tuple(scale.shape)
    if len(shape) != 3 or shape[0] != heads or shape[1] < rows or shape[2] < width:
        raise ValueError(f"scale has shape {shape}, expected ({heads}, {rows} or more, {width} or more)")
    _require("scale", scale, shape, "float32")


def check_attention(
    q: Array,
    kv: Array,
    page: Array,
    first: Array,
    lo: Array,
    hi: Array,
    delta_index: Array,
    positions: Array,
    scale: Array | None,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Raises ValueError where the arguments of `paged_attention` do not fit each other."""
    check_pages(kv, scale)
    if len(q.shape) != 6:
        raise ValueError(f"q has {len(q.shape)} axes, expected [B, R, T, K, G, H]")
    batch, _, length, kv_heads, _, head_dim = q.shape
    if (kv_heads, 2 * head_dim) != (kv.shape[1], kv.shape[3]):
        raise ValueError(
            f"q has {kv_heads} KV heads of {head_dim}, expected {kv.shape[1]} of {kv.shape[3] // 2} as in kv"
        )
    if len(page.shape) != 2 or page.shape[0] != batch:
        raise ValueError(f"page has shape {tuple(page.shape)}, expected [{batch}, M]")
    for name, value in (("first", first), ("lo", lo), ("hi", hi)):
        _require(name, value, page.shape)
    if len(delta_index.shape) != 2 or delta_index.shape[0] != batch or not delta_index.shape[1]:
        raise ValueError(f"delta_index has shape {tuple(delta_index.shape)}, expected [{batch}, M/block]")
    if page.shape[1] % delta_index.shape[1]:
        raise ValueError(
            f"page has {page.shape[1]} entries, expected a multiple of the {delta_index.shape[1]} blocks "
            "of delta_index"
        )
    _require("positions", positions, (batch, length))
    if window is not None and window <= 0:
        raise ValueError(f"window is {window}, expected None or a positive number of positions")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, expected None or a positive number")


def check_append(
    kv: Array,
    row: Array,
    slot: Array,
    keys: Array,
    values: Array,
    scale: Array | None,
    value_scale: Array | None = None,
) -> None:
    """Raises ValueError where the arguments of `append` do not fit each other."""
    check_pages(kv, scale)
    if len(row.shape) != 1:
        raise ValueError(f"row has shape {tuple(row.shape)}, expected [n]")
    _require("slot", slot, row.shape)
    for name, value in (("keys", keys), ("values", values)):
        _require(name, value, (row.shape[0], kv.shape[1], kv.shape[3] // 2))
    if value_scale is not None:
        if scale is None:
            raise ValueError("value_scale is given without scale, expected None: only scaled pages take it")
        _require("value_scale", value_scale, (row.shape[0], kv.shape[1]), "float32")


def check_relocate_pages(
    kv: Array, source: Array, target: Array, cos: Array, sin: Array, scale: Array | None
) -> None:
    """Raises ValueError where the arguments of `relocate_pages` do not fit each other."""
    check_pages(kv, scale)
    if len(source.shape) != 1:
        raise ValueError(f"source has shape {tuple(source.shape)}, expected [n]")
    _require("target", target, source.shape)
    half = cos.shape[-1] if cos.shape else 0
    if not 0 < half <= kv.shape[3] // 4:
        raise ValueError(f"cos has {half} angles a move, expected 1 to {kv.shape[3] // 4}, half the head dim")
    _require("cos", cos, (source.shape[0], half))
    _require("sin", sin, cos.shape)


def _require(name: str, value: Array, shape: tuple[int, ...], dtype: str | None = None) -> None:
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)}")
    if dtype is not None and jnp.dtype(value.dtype).name != dtype:
        raise ValueError(f"{name} has dtype {jnp.dtype(value.dtype).name}, expected {dtype}")
