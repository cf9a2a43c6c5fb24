"""Joins the tensors of a model file into `Params`, part by part, in the target dtype.

Readers hand over one `TensorSource` per stored tensor; nothing but the leaf being filled and a
chunk of rows is held besides the finished leaves: a load never needs twice the model's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np

from jaxkv.errors import ConfigError, FormatError, nearest
from jaxkv.model.config import ModelConfig
from jaxkv.model.families import part_names, part_shape
from jaxkv.model.params import LayerParams, Params
from jaxkv.model.recurrent_params import RecurrentParams
from jaxkv.typing import Float32

DTYPES: Mapping[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_CHUNK = 1 << 23  # elements converted at once: 32 MiB of float32

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total) while a model is read; amounts in any one unit."""


class TensorSource(Protocol):
    """A stored tensor that gives float32 rows on demand."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, outermost axis first."""
        ...

    def rows(self, lo: int, hi: int) -> np.ndarray[Any, Any]:
        """Returns rows lo..hi-1 of the first axis in a floating dtype."""
        ...


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the NumPy dtype that `name` stands for; unknown names are a `ConfigError`."""
    if name not in DTYPES:
        raise ConfigError(
            f"dtype is '{name}', expected one of {', '.join(DTYPES)}{nearest(name, list(DTYPES))}"
        )
    return DTYPES[name]


def build_params(
    config: ModelConfig,
    tensors: Mapping[str, TensorSource],
    *,
    names: Mapping[str, str],
    interleaved: bool,
    dtype: str,
    where: str,
    ignored: Callable[[str], bool] = lambda _: False,
    norm_offset: float = 0.0,
    progress: Progress | None = None,
) -> Params:
    """Reads all weights of a model.

    Args:
      config: the architecture that the file claims.
      tensors: every tensor of the file by name.
      names: part -> tensor name, a family's `hf_tensors` or `gguf_tensors`.
      interleaved: q and k rows of a head are stored as rotation pairs (0, H/2, 1, H/2 + 1, ...);
        they are permuted to the half-split order 0..H-1 that jaxkv rotates.
      dtype: "float32" or "bfloat16"; norm weights and biases stay float32.
      where: names the file in errors.
      ignored: true for tensors that may be present and are not read.
      norm_offset: what the file leaves out of norm weights; added, so that `Params` has the factors.
      progress: called after each part.

    Raises:
      FormatError: a tensor is missing, unexpected, of the wrong shape or not finite.
    """
    wanted: dict[str, str] = {}
    for name, part in part_names(names, config):
        if name not in tensors:
            raise FormatError(f"{where}: tensor '{name}' is missing")
        wanted[name] = part
    for name, source in tensors.items():
        if name not in wanted:
            if ignored(name):
                continue
            raise FormatError(
                f"{where}: tensor '{name}' is not one a {config.family} model has"
                f"{nearest(name, list(wanted))}"
            )
        expected = part_shape(wanted[name], config)
        if tuple(source.shape) != expected:
            raise FormatError(
                f"{where}: tensor '{name}' has shape {list(source.shape)}, expected {list(expected)}"
            )
    reader = _Reader(
        config,
        tensors,
        names,
        dtype_of(dtype),
        where,
        interleaved,
        norm_offset,
        len(wanted),
        progress,
    )
    return Params(
        embed=reader.table("embed"),
        layers=tuple(reader.layer(i) for i in range(config.num_layers)),
        final_norm=reader.norm("final_norm", None),
        unembed=None if config.tie_embeddings else reader.table("unembed"),
    )


class _Reader:
    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, TensorSource],
        names: Mapping[str, str],
        dtype: np.dtype[Any],
        where: str,
        interleaved: bool,
        norm_offset: float,
        total: int,
        progress: Progress | None,
    ) -> None:
        self.config, self.tensors, self.names, self.dtype = config, tensors, names, dtype
        self.where, self.interleaved, self.norm_offset = where, interleaved, np.float32(norm_offset)
        self.total, self.progress = total, progress
        self.done = 0

    def fill(self, part: str, layer: int | None, put: Callable[[int, int, Any], None], step: int) -> None:
        """Calls put(lo, hi, rows) over the part's rows, a multiple of `step` at a time."""
        name = self.names[part].format(i=layer)
        source = self.tensors[name]
        width = int(np.prod(source.shape[1:], dtype=np.int64))
        chunk = max(1, _CHUNK // max(width * step, 1)) * step
        for lo in range(0, source.shape[0], chunk):
            hi = min(lo + chunk, source.shape[0])
            rows = source.rows(lo, hi)
            if not np.isfinite(rows).all():
                raise FormatError(f"{self.where}: tensor '{name}' holds numbers that are not finite")
            put(lo, hi, rows)
        self.done += 1
        if self.progress:
            self.progress("convert", self.done, self.total)

    def stored(self, part: str, layer: int | None, out: np.ndarray[Any, Any]) -> None:
        """Fills `out`, of the part's shape, with it as it is stored: matrices are [out, in] in files too."""
        self.fill(part, layer, lambda lo, hi, rows: out.__setitem__(slice(lo, hi), rows), 1)

    def vector(self, part: str, layer: int | None) -> Float32:
        out = np.empty(part_shape(part, self.config), np.float32)
        self.stored(part, layer, out)
        return out

    def norm(self, part: str, layer: int | None) -> jax.Array:
        weight = self.vector(part, layer)
        return jax.device_put(weight + self.norm_offset if self.norm_offset else weight)

    def bias(self, layer: int) -> jax.Array:
        """Biases of queries, keys and values as f32[K, G+2, H]."""
        c = self.config
        parts = [self.vector(part, layer) for part in ("q_bias", "k_bias", "v_bias")]
        return jax.device_put(
            np.concatenate([part.reshape(c.num_kv_heads, -1, c.head_dim) for part in parts], axis=1)
        )

    def table(self, part: str) -> jax.Array:
        return self.matrix(part, None, *part_shape(part, self.config))

    def matrix(self, part: str, layer: int | None, *shape: int) -> jax.Array:
        """A part as it is stored, its axes split to be of `shape`."""
        out = np.empty(part_shape(part, self.config), self.dtype)
        self.stored(part, layer, out)
        return jax.device_put(out.reshape(shape))

    def heads(self, part: str, layer: int, out: np.ndarray[Any, Any]) -> None:
        """Fills `out` [K, heads per K, H, D] from the stored [K · heads per K · H, D]."""
        d, h, per = self.config.embed_dim, self.config.head_dim, out.shape[1]

        def put(lo: int, hi: int, rows: Float32) -> None:
            if self.interleaved and part != "v":
                rows = rows.reshape(-1, h // 2, 2, d).swapaxes(1, 2)
            step = per * h
            out[lo // step : hi // step] = rows.reshape(-1, per, h, d)

        self.fill(part, layer, put, per * h)

    def gated_heads(self, layer: int, out: np.ndarray[Any, Any], gate: np.ndarray[Any, Any]) -> None:
        """Fills queries [K, G, H, D] and gates [N, H, D] from rows of a head's query, then its gate."""
        d, h, per = self.config.embed_dim, self.config.head_dim, out.shape[1]

        def put(lo: int, hi: int, rows: Float32) -> None:
            first, last = lo // (2 * h), hi // (2 * h)
            both = rows.reshape(-1, 2, h, d)  # [heads, query | gate, H, D]
            out[first // per : last // per] = both[:, 0].reshape(-1, per, h, d)
            gate[first:last] = both[:, 1]

        self.fill("q", layer, put, 2 * per * h)

    def recurrent(self, i: int) -> RecurrentParams:
        c, shape = self.config, self.config.recurrent
        assert shape is not None
        d, heads, dim = c.embed_dim, shape.num_value_heads, shape.value_dim
        rates = np.empty((2, heads, d), self.dtype)
        self.stored("mix_beta", i, rates[0])
        self.stored("mix_decay", i, rates[1])
        gate_up, down = self.mlp(i)
        return RecurrentParams(
            attn_norm=self.norm("attn_norm", i),
            qkv=self.matrix("mix_qkv", i, shape.channels, d),
            gate=self.matrix("mix_gate", i, heads, dim, d),
            rates=jax.device_put(rates),
            conv=jax.device_put(self.vector("mix_conv", i)[:, 0]),
            decay_log=jax.device_put(self.vector("decay_log", i)),
            decay_bias=jax.device_put(self.vector("decay_bias", i)),
            out_norm=jax.device_put(self.vector("mix_norm", i)),  # no offset: its file has the factors
            out=self.matrix("mix_out", i, d, heads, dim),
            mlp_norm=self.norm("mlp_norm", i),
            gate_up=gate_up,
            down=down,
        )

    def mlp(self, i: int) -> tuple[jax.Array, jax.Array]:
        """[gate | up, F, D] and [D, F]."""
        d, f = self.config.embed_dim, self.config.mlp_dim
        gate_up = np.empty((2, f, d), self.dtype)
        self.stored("gate", i, gate_up[0])
        self.stored("up", i, gate_up[1])
        return jax.device_put(gate_up), self.matrix("down", i, d, f)

    def layer(self, i: int) -> LayerParams | RecurrentParams:
        if self.config.types[i] == "recurrent":
            return self.recurrent(i)
        c = self.config
        d, h, g = c.embed_dim, c.head_dim, c.group_size
        attn_norm = self.norm("attn_norm", i)
        qkv = np.empty((c.num_kv_heads, g + 2, h, d), self.dtype)
        gate = np.empty((c.num_heads, h, d), self.dtype) if c.attention_gate else None
        if gate is None:
            self.heads("q", i, qkv[:, :g])
        else:
            self.gated_heads(i, qkv[:, :g], gate)
        self.heads("k", i, qkv[:, g : g + 1])
        self.heads("v", i, qkv[:, g + 1 :])
        gate_up, down = self.mlp(i)
        return LayerParams(
            attn_norm=attn_norm,
            qkv=jax.device_put(qkv),
            out=self.matrix("out", i, d, c.num_heads, h),
            mlp_norm=self.norm("mlp_norm", i),
            gate_up=gate_up,
            down=down,
            attn_gate=None if gate is None else jax.device_put(gate),
            qkv_bias=self.bias(i) if c.qkv_bias else None,
            q_norm=self.norm("q_norm", i) if c.qk_norm else None,
            k_norm=self.norm("k_norm", i) if c.qk_norm else None,
            post_attn_norm=self.norm("post_attn_norm", i) if c.post_norms else None,
            post_mlp_norm=self.norm("post_mlp_norm", i) if c.post_norms else None,
        )
