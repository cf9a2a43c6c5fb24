"""The dense decoder, judged by Hugging Face logits, by float64 and by gradients."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import Decoder, decoder_of, decoder_of_hf
from tiny import VOCAB, make_model, tiny_config
from tolerances import tolerance

import jaxkv
from jaxkv.io.configs import config_from_hf
from jaxkv.model.layers import project, rms_norm, unembed

GOLDENS = Path(__file__).parent.parent / "goldens"
VARIANTS = ("untied", "tied", "linear", "llama3", "yarn")


@functools.cache
def golden(variant: str) -> tuple[jaxkv.ModelConfig, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Config, weights by their Hugging Face names, tokens and the logits of transformers."""
    config = config_from_hf(json.loads((GOLDENS / "tiny_llama.json").read_text())[variant])
    with np.load(GOLDENS / "tiny_llama.npz") as file:
        arrays = {name: file[name] for name in file.files}
    weights = {k: v.astype(np.float32) for k, v in arrays.items() if k.endswith(".weight")}
    return config, weights, arrays["tokens"], arrays[f"logits.{variant}"]


def params_of(reference: Decoder, config: jaxkv.ModelConfig) -> jaxkv.Params:
    """jaxkv's grouped weights, laid out here and not by its loaders, which have tests of their own."""
    kv, group = config.num_kv_heads, config.group_size

    def f32(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.float32)

    layers = []
    for p in reference.layers:
        q = p.q.reshape(p.q.shape[0], kv, group, config.head_dim)
        layers.append(
            jaxkv.model.params.LayerParams(
                attn_norm=f32(p.attn_norm),
                qkv=f32(np.moveaxis(np.concatenate([q, p.k[:, :, None], p.v[:, :, None]], 2), 0, -1)),
                out=f32(np.moveaxis(p.out, -1, 0)),
                mlp_norm=f32(p.mlp_norm),
                gate_up=f32(np.stack([p.gate.T, p.up.T])),
                down=f32(p.down.T),
            )
        )
    return jaxkv.Params(
        embed=f32(reference.embed),
        layers=tuple(layers),
        final_norm=f32(reference.final_norm),
        unembed=None if config.tie_embeddings else f32(reference.unembed),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_equals_hugging_face(variant: str) -> None:
    """Who judges jaxkv is judged first."""
    config, weights, tokens, expected = golden(variant)
    logits = decoder_of_hf(weights, config).logits(tokens)
    np.testing.assert_allclose(logits, expected, atol=tolerance("goldens_tiny"), rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_dense_equals_hugging_face(variant: str) -> None:
    config, weights, tokens, expected = golden(variant)
    params = params_of(decoder_of_hf(weights, config), config)
    logits = np.asarray(jaxkv.forward_dense(params, jnp.asarray(tokens)[None], config=config))[0]
    np.testing.assert_allclose(logits, expected, atol=tolerance("goldens_tiny"), rtol=0)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 9, "num_kv_heads": 3},
        {"num_heads": 4, "num_kv_heads": 4, "tie_embeddings": True},
        {"rope": jaxkv.RopeConfig(theta=500.0, rotary_dim=8)},
    ],
    ids=["gqa", "nine heads", "mha tied", "partial rotary"],
)
def test_forward_dense_equals_float64(changes: dict[str, Any]) -> None:
    model = make_model(tiny_config(**changes))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 40)).astype(np.int32)
    logits = jaxkv.forward_dense(model.params, jnp.asarray(tokens), config=model.config)
    exact = decoder_of(model.params, model.config)
    for row in range(2):
        np.testing.assert_allclose(logits[row], exact.logits(tokens[row]), atol=tolerance("logits"), rtol=0)
    assert logits.dtype == jnp.float32


def test_forward_dense_is_causal_by_gradients(model: jaxkv.Model) -> None:
    """Logits at t depend on the embeddings of tokens 0..t, on each of them, and on no later one."""
    length = 8
    tokens = jnp.arange(length, dtype=jnp.int32)[None]  # all different: rows of `embed` are positions

    def logits(embed: jax.Array) -> jax.Array:
        params = model.params.replace(embed=embed)
        return jnp.sin(jaxkv.forward_dense(params, tokens, config=model.config))[0].sum(-1)

    jacobian = jax.jit(jax.jacrev(logits))(model.params.embed)  # [T, V, D]
    size = np.abs(np.asarray(jacobian)).max(-1)[:, :length]
    # The table is also read as output only where weights are tied; here they are not.
    assert (np.triu(size, 1) == 0).all()
    assert (size[np.tril_indices(length)] > 0).all()


def test_bfloat16_weights_stay_near_float64_of_the_same_weights() -> None:
    """Only activations are rounded more: matmul operands to bfloat16, sums in float32."""
    config = tiny_config()
    params = jaxkv.init_params(config, 3, jnp.bfloat16)
    assert params.layers[0].qkv.dtype == jnp.bfloat16
    assert params.layers[0].attn_norm.dtype == jnp.float32
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.int32)
    logits = np.asarray(jaxkv.forward_dense(params, jnp.asarray(tokens)[None], config=config))[0]
    exact = decoder_of(params, config).logits(tokens)
    assert logits.dtype == np.float32
    error = np.abs(logits - exact).max() / exact.std()
    assert 1e-5 < error < tolerance("logits_relative", "bfloat16")


def test_layers_accumulate_in_float32() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4096)), jnp.float32)
    ones = jnp.ones((2, 4096), jnp.bfloat16)
    out = project(x, ones)
    rounded = np.asarray(x.astype(jnp.bfloat16)).astype(np.float64).sum(-1)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[:, 0], rounded, rtol=1e-3, atol=1e-3)
    normed = np.asarray(rms_norm(x, jnp.ones(4096), 1e-5))
    np.testing.assert_allclose((normed**2).mean(-1), 1, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_are_projected_as_many_are(rows: int, dtype: str) -> None:
    """One row and two take paths of their own on CPU; judged by float64."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 1, 6, 8)), dtype)
    weight = jnp.asarray(rng.standard_normal((5, 3, 6, 8)), dtype)
    expected = np.einsum("rtnh,ofnh->rtof", *(np.asarray(a).astype(np.float64) for a in (x, weight)))
    for got in (project, jax.jit(project, static_argnames="inputs")):
        out = got(x.astype(jnp.float32), weight, inputs=2)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    table = weight.reshape(-1, 48)
    logits = unembed(x.reshape(rows, 48).astype(jnp.float32), table)
    np.testing.assert_allclose(logits, expected.reshape(rows, 15), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.network
def test_smollm2_equals_hugging_face_dense_and_paged() -> None:
    """Over 512 tokens: logits within the tolerance, argmax equal everywhere."""
    model = jaxkv.load("smollm2-135m", progress=False)
    with np.load(GOLDENS / "smollm2_logits.npz") as file:
        expected = {name: file[name] for name in file.files}
    tokens = expected["tokens"]
    dense = jax.jit(jaxkv.forward_dense, static_argnames="config")
    logits = np.asarray(dense(model.params, jnp.asarray(tokens)[None], config=model.config))[0]
    engine = jaxkv.Engine(model, num_pages=256, page_size=16, chunk_size=112)
    result = engine.prefill(tokens[:1])
    odd = engine.extend(engine.prefill(tokens[:203]).sequence, tokens[203:300])
    paged = np.concatenate(
        [
            engine.score(result.sequence, tokens[1:204]),
            engine.score(engine.prefill(tokens[:204]).sequence, tokens[204:301]),
            engine.score(odd.sequence, tokens[300:]),
        ]
    )
    rows = np.concatenate([np.arange(203), np.arange(203, 300), np.arange(299, 511)])
    for got, at in ((logits, np.arange(512)), (paged, rows)):
        difference = got[:, expected["columns"]] - expected["column_logits"][at]
        assert np.abs(difference).max() <= tolerance("goldens_smollm2")
        top = np.take_along_axis(got, expected["top_ids"][at].astype(np.int64), 1)
        assert np.abs(top - expected["top_logits"][at]).max() <= tolerance("goldens_smollm2")
        np.testing.assert_array_equal(got.argmax(-1), expected["argmax"][at])
