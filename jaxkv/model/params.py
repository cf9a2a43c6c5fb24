"""Weights as dataclass pytrees, `[out, in]`, with logical axis names.

Query, key and value projections are one array grouped by KV head, `[K, G+2, H, D]`: G query heads,
then the key head, then the value head. One matmul on one device, and still divisible over K on a mesh.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxkv.model.config import ModelConfig
from jaxkv.model.recurrent_params import FLOAT32_NAMES, RecurrentParams, abstract_recurrent, init_small
from jaxkv.typing import Array


@struct.dataclass(kw_only=True)
class LayerParams:
    attn_norm: Array  # f32[D]
    qkv: Array  # [K, G+2, H, D]
    out: Array  # [D, N, H], N ordered as K·G
    mlp_norm: Array  # f32[D]
    gate_up: Array  # [2, F, D]
    down: Array  # [D, F]
    qkv_bias: Array | None = None  # f32[K, G+2, H]
    q_norm: Array | None = None  # f32[H]
    k_norm: Array | None = None  # f32[H]
    post_attn_norm: Array | None = None  # f32[D]
    post_mlp_norm: Array | None = None  # f32[D]
    attn_gate: Array | None = None  # [N, H, D], of what attention returns


@struct.dataclass(kw_only=True)
class Params:
    embed: Array  # [V, D]
    layers: tuple[LayerParams | RecurrentParams, ...]
    final_norm: Array  # f32[D]
    unembed: Array | None  # [V, D], None when tied to `embed`


LAYER_AXES = {
    "attn_norm": ("embed",),
    "qkv": ("kv_heads", "qkv", "head_dim", "embed"),
    "out": ("embed", "heads", "head_dim"),
    "mlp_norm": ("embed",),
    "gate_up": ("gate_up", "mlp", "embed"),
    "down": ("embed", "mlp"),
    "qkv_bias": ("kv_heads", "qkv", "head_dim"),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "post_attn_norm": ("embed",),
    "post_mlp_norm": ("embed",),
    "attn_gate": ("heads", "head_dim", "embed"),
}
INPUT_AXES = {"out": 2}  # how many of a matrix's last axes are its input's, where not one
PARAM_AXES = {"embed": ("vocab", "embed"), "final_norm": ("embed",), "unembed": ("vocab", "embed")}


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Shapes and dtypes of the weights of `config`, without storage. Norms and biases are float32."""
    d, k, g, h = config.embed_dim, config.num_kv_heads, config.group_size, config.head_dim
    f, v = config.mlp_dim, config.vocab_size

    def w(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    norm = f32(d)
    layer = LayerParams(
        attn_norm=norm,
        qkv=w(k, g + 2, h, d),
        out=w(d, config.num_heads, h),
        mlp_norm=norm,
        gate_up=w(2, f, d),
        down=w(d, f),
        qkv_bias=f32(k, g + 2, h) if config.qkv_bias else None,
        q_norm=f32(h) if config.qk_norm else None,
        k_norm=f32(h) if config.qk_norm else None,
        post_attn_norm=norm if config.post_norms else None,
        post_mlp_norm=norm if config.post_norms else None,
        attn_gate=w(config.num_heads, h, d) if config.attention_gate else None,
    )
    return Params(
        embed=w(v, d),
        layers=tuple(
            abstract_recurrent(config, dtype) if kind == "recurrent" else layer for kind in config.types
        ),
        final_norm=norm,
        unembed=None if config.tie_embeddings else w(v, d),
    )


def init_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Random weights, for tests and for training from scratch: normal / sqrt(fan-in), norms 1.

    Biases are normal, of deviation 0.1.
    """
    rng = np.random.default_rng(seed)
    small = init_small(rng)

    def make(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].name
        if name.endswith("norm"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name in small:
            return jnp.asarray(small[name](leaf.shape), leaf.dtype)
        if name.endswith("bias"):
            return jnp.asarray(0.1 * rng.standard_normal(leaf.shape, np.float32), leaf.dtype)
        inputs = INPUT_AXES.get(name, 1)
        outputs, within = leaf.shape[:-inputs], leaf.shape[-inputs:]
        # Matrices are drawn input by input: what a seed gives does not depend on how they are stored.
        table = name in ("embed", "unembed")
        value = rng.standard_normal(leaf.shape if table else (*within, *outputs), np.float32)
        value /= math.sqrt(math.prod(within))
        return jnp.asarray(value if table else outputs_first(value, inputs), leaf.dtype)

    params: Params = jax.tree.map_with_path(make, abstract_params(config, dtype))
    return params


def outputs_first(matrix: np.ndarray[Any, Any], inputs: int) -> np.ndarray[Any, Any]:
    """A matrix [in, out] whose input has `inputs` axes as [out, in], contiguous."""
    return np.ascontiguousarray(np.moveaxis(matrix, range(inputs), range(-inputs, 0)))


def stays_float32(name: str) -> bool:
    """Whether a parameter is float32 whatever the dtype of the matrices is."""
    return name.endswith(("norm", "bias")) or name in FLOAT32_NAMES


def params_digest(params: Params, fetch: Callable[[Array], np.ndarray[Any, Any]] = np.asarray) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all weights, in tree order; hex.

    `fetch` brings one weight to the host; `parallel.to_host` if other processes hold parts of them.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        value = fetch(leaf)
        header = f"{jax.tree_util.keystr(path)}:{value.dtype}:{value.shape};"
        digest.update(len(header).to_bytes(4, "little") + header.encode())
        digest.update(np.ascontiguousarray(value).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()
