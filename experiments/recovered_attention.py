"""How good are queries recovered from cached keys and values? Against the real ones, layer by layer:

python -m experiments.recovered_attention --model=smollm2-135m

Reads the attention of the last 436 of 700 corpus tokens on 64 tokens in the middle, as the `Attention`
probe does, and compares it with the model's own. About two minutes on two cores, most of it compiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

import jaxkv
from experiments.workloads.corpus import encode, load_corpus
from jaxkv.errors import ConfigError
from jaxkv.model.attention import dense_attention
from jaxkv.model.config import ModelConfig
from jaxkv.model.layers import embed
from jaxkv.model.params import LayerParams, Params
from jaxkv.model.rope import rope_angles, rotate
from jaxkv.model.transformer import finish_layer, project_qkv
from jaxkv.probing import Places, attention_mass
from jaxkv.typing import Array, Bool, Float32, Int32

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Anything jaxkv.load takes.")
_CORPUS = flags.DEFINE_string("corpus", "topics", "'topics', 'stdlib' or the path of a text file.")
LENGTH, START, END, TOP = 700, 200, 264, 32


def true_masses(params: Params, tokens: Int32, marked: Bool, config: ModelConfig) -> Float32:
    """Attention on marked keys in every layer, f32[L, n, N], from a dense forward pass."""

    @jax.jit
    def run(tokens: Array) -> Array:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        angles = [rope_angles(positions, group.rope, config.max_positions) for group in config.groups]
        masses = []
        x = embed(tokens, params.embed, config.embed_scale)
        for number, layer in enumerate(params.layers):
            if not isinstance(layer, LayerParams):
                raise ConfigError("layer_types has recurrent layers, expected a model that only attends")
            g, _ = config.group_of(number)
            group, (cos, sin) = config.groups[g], angles[g]
            q, k, v = project_qkv(x, layer, config)
            q = q * config.attention_scale
            q = rotate(q, cos[:, None, None], sin[:, None, None], magnitude=group.rope.magnitude)
            k = rotate(k, cos[:, None], sin[:, None], magnitude=group.rope.magnitude)
            scores = jnp.einsum("btkgh,bskh->btkgs", q, k)[0]
            distance = positions[:, None] - positions
            seen = (distance >= 0) & (distance < (group.window or len(positions)))
            seen = seen[:, None, None]
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
            mass = jnp.sum(jnp.where(marked, weights, 0.0), axis=-1)
            masses.append(mass.reshape(tokens.shape[1], -1))
            x = finish_layer(x, dense_attention(q, k, v, group.window), layer, config)
        return jnp.stack(masses)

    return np.asarray(run(jnp.asarray(tokens)[None]))


def compare(model: jaxkv.Model, text: Int32) -> list[dict[str, Any]]:
    """One row a layer: correlation over tokens, and how many of the `TOP` are found."""
    marked = np.zeros(len(text), np.bool_)
    marked[START:END] = True
    truth = true_masses(model.params, text, marked, model.config)[:, END:]
    engine = jaxkv.Engine(model, num_pages=len(text) // 16 + 2, prefix_cache=False)
    sequence = engine.prefill(text).sequence
    places = Places.of(engine._memory, sequence)
    asked = np.arange(END, len(text), dtype=np.int32)
    rows = []
    for layer in range(model.config.num_layers):
        row: dict[str, Any] = {"layer": layer}
        for heads, true in (("max", truth[layer].max(-1)), ("mean", truth[layer].mean(-1))):
            found, _ = attention_mass(
                engine._memory, model.params, places, asked, marked, layer=layer, heads=heads
            )
            best = [set(np.argsort(-x)[:TOP].tolist()) for x in (found, true)]
            row[heads] = float(np.corrcoef(found, true)[0, 1])
            row[f"{heads}_top"] = len(best[0] & best[1]) / TOP
        rows.append(row)
    return rows


def main(_: Sequence[str]) -> None:
    """Prints the table."""
    model = jaxkv.load(_MODEL.value)
    corpus = load_corpus(_CORPUS.value)
    rows = compare(model, encode(corpus, model)[5000 : 5000 + LENGTH])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "max head: r", f"top {TOP} found", "mean head: r", f"top {TOP} found"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            str(r["layer"]), f"{r['max']:.3f}", f"{r['max_top']:.0%}", f"{r['mean']:.3f}",
            f"{r['mean_top']:.0%}",
        )  # fmt: skip
    Console().print(table)
    Console().print(f"corpus {corpus.name} {corpus.digest[:16]}, weights {model.weights_digest[:16]}")


if __name__ == "__main__":
    app.run(main)
