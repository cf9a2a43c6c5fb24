"""One sentence for each argument that is not as the API says. Shapes and dtypes only: values are traced."""

from __future__ import annotations

import numbers
from typing import Any

import jax.numpy as jnp

from pallas_kernels.scales import scale_shape

Array = Any
QUANTIZED = ("int8", "float8_e4m3fn")
KV_DTYPES = ("float32", "bfloat16", *QUANTIZED)


def check_pages(kv: Array, scale: Array | None) -> None:
    """Raises ValueError unless kv is [X, K, P, 2H] and scale fits its dtype."""
    _require_array("kv", kv)
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
    _require_array("scale", scale)
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
    _require_array("q", q, "float32")
    for name, ids in (("page", page), ("delta_index", delta_index)):
        _require_array(name, ids, "int")
    if len(q.shape) != 6 or 0 in q.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected [B, R, T, K, G, H], all at least 1")
    batch, _, length, kv_heads, _, head_dim = q.shape
    if (kv_heads, 2 * head_dim) != (kv.shape[1], kv.shape[3]):
        raise ValueError(
            f"q has {kv_heads} KV heads of {head_dim}, expected {kv.shape[1]} of {kv.shape[3] // 2} as in kv"
        )
    if len(page.shape) != 2 or page.shape[0] != batch or not page.shape[1]:
        raise ValueError(f"page has shape {tuple(page.shape)}, expected [{batch}, M], M at least 1")
    for name, value in (("first", first), ("lo", lo), ("hi", hi)):
        _require(name, value, page.shape, "int")
    if len(delta_index.shape) != 2 or delta_index.shape[0] != batch or not delta_index.shape[1]:
        raise ValueError(f"delta_index has shape {tuple(delta_index.shape)}, expected [{batch}, M/block]")
    if page.shape[1] % delta_index.shape[1]:
        raise ValueError(
            f"page has {page.shape[1]} entries, expected a multiple of the {delta_index.shape[1]} blocks "
            "of delta_index"
        )
    _require("positions", positions, (batch, length), "int")
    if window is not None and (not isinstance(window, numbers.Integral) or window <= 0):
        raise ValueError(f"window is {window}, expected None or a positive whole number of positions")
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
    _require_list("row", row)
    _require("slot", slot, row.shape, "int")
    for name, value in (("keys", keys), ("values", values)):
        _require(name, value, (row.shape[0], kv.shape[1], kv.shape[3] // 2), "float")
    if value_scale is not None:
        if scale is None:
            raise ValueError("value_scale is given without scale, expected None: only scaled pages take it")
        _require("value_scale", value_scale, (row.shape[0], kv.shape[1]), "float32")


def check_relocate_pages(
    kv: Array, source: Array, target: Array, cos: Array, sin: Array, scale: Array | None
) -> None:
    """Raises ValueError where the arguments of `relocate_pages` do not fit each other."""
    check_pages(kv, scale)
    _require_list("source", source)
    _require("target", target, source.shape, "int")
    _require_angles(kv, source.shape[0], cos, sin)


def check_relocate(
    kv: Array,
    source: tuple[Array, Array],
    target: tuple[Array, Array],
    cos: Array,
    sin: Array,
    scale: Array | None,
) -> None:
    """Raises ValueError where the arguments of `reference.relocate` do not fit each other."""
    check_pages(kv, scale)
    _require_list("source row", source[0])
    for name, ids in (("source slot", source[1]), ("target row", target[0]), ("target slot", target[1])):
        _require(name, ids, source[0].shape, "int")
    _require_angles(kv, source[0].shape[0], cos, sin)


def _require_list(name: str, ids: Array) -> None:
    _require_array(name, ids, "int")
    if len(ids.shape) != 1:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}, expected [n]")


def _require_angles(kv: Array, count: int, cos: Array, sin: Array) -> None:
    _require_array("cos", cos, "float")
    half = cos.shape[-1] if cos.shape else 0
    if not 0 < half <= kv.shape[3] // 4:
        raise ValueError(f"cos has {half} angles a move, expected 1 to {kv.shape[3] // 4}, half the head dim")
    _require("cos", cos, (count, half), "float")
    _require("sin", sin, cos.shape, "float")


def _require(name: str, value: Array, shape: tuple[int, ...], dtype: str | None = None) -> None:
    _require_array(name, value, dtype)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)}")


def _require_array(name: str, value: Array, dtype: str | None = None) -> None:
    """An array, of a dtype or a kind of dtypes ("int", "float")."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"{name} is a {type(value).__name__}, expected an array")
    if dtype is None:
        return
    kinds: dict[str, Any] = {"int": jnp.integer, "float": jnp.floating}
    found = jnp.dtype(value.dtype)
    if not jnp.issubdtype(found, kinds.get(dtype, dtype)):
        raise ValueError(f"{name} has dtype {found.name}, expected {dtype}")
