"""Compiles whole steps of the engine for a TPU that is not here. Run as a script, in a process of its own.

    JAX_PLATFORMS=cpu PYTHONPATH=.:tests/pallas_kernels python tests/aot_steps.py v5e bfloat16

Prints one JSON line for each step: bytes of the pages, of what is aliased, of temporaries, or the error.
Needs libtpu (`pip install "jax[tpu]"`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from aot_tpu import sharding

import jaxkv
import pallas_kernels
from jaxkv import steps
from jaxkv.model.backend import Backend
from jaxkv.model.params import abstract_params
from jaxkv.model.sampling import SamplingInput

B, P, ENTRIES, PAGES = 4, 32, 256, 16_384
CONFIG = jaxkv.ModelConfig(
    vocab_size=1024,
    num_layers=2,
    embed_dim=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_dim=1536,
    max_positions=8192,
    rope=jaxkv.RopeConfig(rotary_dim=64),
    tie_embeddings=True,
)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract float32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def table(deltas: int) -> jaxkv.PageTable:
    """An abstract table of B sequences."""
    rows = {name: i32(B, ENTRIES) for name in ("page", "first", "lo", "hi")}
    return jaxkv.PageTable(**rows, delta_index=i32(B, ENTRIES * P // 256), deltas=i32(B, deltas))


def programs(dtype: str) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Name -> jitted function, arguments, static options, for pages of `dtype`."""
    held = jax.eval_shape(
        lambda: jaxkv.make_pages(
            CONFIG, CONFIG.groups[0], num_pages=PAGES, page_size=P, dtype=dtype, platform="tpu"
        )
    )
    pages = (held,)
    params = abstract_params(CONFIG, jnp.dtype("bfloat16"))

    def step(length: int, deltas: int) -> jaxkv.StepInput:
        group = jaxkv.GroupInput(slots=i32(B, length), table=table(deltas))
        return jaxkv.StepInput(
            tokens=i32(B, length), positions=i32(B, length), lengths=i32(B), groups=(group,)
        )

    many = jaxkv.DecodeInput(
        logits=f32(B, CONFIG.vocab_size),
        positions=i32(B),
        limits=i32(B),
        stop=i32(B, 4),
        slots=(i32(B, 8),),
        tables=(table(4),),
        sampling=SamplingInput(
            temperature=f32(B), top_k=i32(B), top_p=f32(B), seed=jax.ShapeDtypeStruct((B,), jnp.uint32)
        ),
    )
    moves = jaxkv.Moves(source=i32(256), target=i32(256), delta=i32(256))
    options = {"config": CONFIG, "backend": Backend("pallas_tpu")}
    plain = {**options, "logits": "last", "capture": False}
    return {
        "prefill": (steps._step, (params, pages, step(128, 4)), plain),
        "decode": (steps._step, (params, pages, step(1, 4)), plain),
        "decode_many": (steps._decode_many, (params, pages, many), options),
        "relocate": (steps._relocate, (pages, (moves,)), options),
    }


def main(chip: str, dtype: str) -> None:
    """Compiles every step for a chip and a dtype of pages."""
    with pallas_kernels.compiling_for("tpu"):
        for name, (function, arguments, options) in programs(dtype).items():
            found: dict[str, Any] = {"step": name}
            first = 0 if name == "relocate" else 1  # the argument that has the pages
            try:
                placed = jax.tree.map(
                    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(chip)), arguments
                )
                lowered = function.trace(*placed, **options).lower(lowering_platforms=("tpu",))
                memory = lowered.compile().memory_analysis()
                found |= {
                    "pages": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arguments[first])),
                    "alias": memory.alias_size_in_bytes,
                    "temp": memory.temp_size_in_bytes,
                    "kernels": lowered.as_text().count("tpu_custom_call"),
                }
            except Exception as error:  # reported to the test, which fails with it
                found["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
