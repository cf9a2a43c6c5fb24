"""The same engine under Pallas kernels, interpreted: the answers of XLA and of the float64 decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import reference
from reference import Decoder, decoder_of
from tiny import VOCAB, make_model
from tolerances import tolerance

import jaxkv
from jaxkv.errors import ConfigError
from jaxkv.model.backend import Backend
from pallas_kernels import dispatch

# Kernels take heads of 64 and up.
CONFIG = jaxkv.ModelConfig(
    vocab_size=VOCAB,
    num_layers=1,
    embed_dim=48,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    mlp_dim=64,
    max_positions=512,
    rope=jaxkv.RopeConfig(rotary_dim=64),
)


@pytest.fixture(scope="module")
def wide() -> jaxkv.Model:
    return make_model(CONFIG)


@pytest.fixture(scope="module")
def judge(wide: jaxkv.Model) -> Decoder:
    return decoder_of(wide.params, wide.config)


@pytest.fixture
def quick_compiles() -> Iterator[None]:
    """Interpreted kernels are compiled for one small run: optimizing them takes longer than the run."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def _engine(model: jaxkv.Model, **options: object) -> jaxkv.Engine:
    return jaxkv.Engine(
        model,
        num_pages=12,
        page_size=16,
        chunk_size=16,
        max_deltas=2,
        poison_free_pages=True,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("implementation", ["pallas_tpu", "triton"])
def test_a_prompt_on_interpreted_kernels_gets_the_logits_of_the_definition(
    implementation: str, wide: jaxkv.Model, judge: Decoder
) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, 9)
    engine = _engine(wide, implementation=implementation, interpret=True)
    cold = engine.prefill(tokens[:8])
    np.testing.assert_allclose(cold.logits, judge.logits(tokens)[-2], atol=tolerance("logits"))
    warm = engine.extend(cold.sequence, tokens[8:])
    np.testing.assert_allclose(warm.logits, judge.logits(tokens)[-1], atol=tolerance("logits"))
    engine.check()


@pytest.mark.slow
@pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11, 2), reason="jax has no Mosaic GPU interpreter before 0.11.2"
)
def test_a_prompt_on_interpreted_hopper_kernels_is_near_the_definition(
    wide: jaxkv.Model, judge: Decoder
) -> None:
    """bfloat16 pages, in tiles of 64 slots: prefill and decode; XLA writes."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 9)
    engine = jaxkv.Engine(
        wide, num_pages=6, page_size=64, chunk_size=64, max_deltas=2, kv_dtype="bfloat16",
        implementation="pallas_gpu", interpret=True,
    )  # fmt: skip
    cold = engine.prefill(tokens[:8])
    np.testing.assert_allclose(
        cold.logits, judge.logits(tokens)[-2], atol=tolerance("logits_pages", "bfloat16")
    )
    warm = engine.extend(cold.sequence, tokens[8:])
    np.testing.assert_allclose(
        warm.logits, judge.logits(tokens)[-1], atol=tolerance("logits_pages", "bfloat16")
    )
    engine.check()


@pytest.mark.slow
def test_kernels_are_told_of_the_window() -> None:
    """Nine tokens in a layer that sees four of them, from the kernels that prefill and decode."""
    model = make_model(dataclasses.replace(CONFIG, layer_types=("local",), window=4))
    exact = decoder_of(model.params, model.config)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 9)
    engine = _engine(model, implementation="pallas_tpu", interpret=True, local_pages=4)
    cold = engine.prefill(tokens[:8])
    np.testing.assert_allclose(cold.logits, exact.logits(tokens)[-2], atol=tolerance("logits"))
    warm = engine.extend(cold.sequence, tokens[8:])
    np.testing.assert_allclose(warm.logits, exact.logits(tokens)[-1], atol=tolerance("logits"))
    everything = decoder_of(model.params, dataclasses.replace(model.config, layer_types=(), window=0))
    assert np.abs(everything.logits(tokens)[-1] - exact.logits(tokens)[-1]).max() > 0.1
    engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["pallas_tpu", "triton"])
def test_generation_and_edits_on_interpreted_kernels_are_those_of_xla(
    implementation: str, wide: jaxkv.Model, judge: Decoder
) -> None:
    engine = _engine(wide, implementation=implementation, interpret=True)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 52)
    atol = tolerance("logits")
    cold = engine.prefill(tokens)
    np.testing.assert_allclose(cold.logits, judge.logits(tokens)[-1], atol=atol)
    generated = engine.generate(cold.sequence, max_tokens=3, stop=())
    assert generated.tokens.tolist() == judge.greedy(tokens, 3)
    edited = np.concatenate([tokens[:8], tokens[13:]])
    plain = _engine(wide, implementation="xla")
    for policy in (jaxkv.SCR(min_span=8, tail=4), jaxkv.SCR(min_span=8, tail=4, form="copy")):
        found = engine.edit(cold.sequence, edited, policy)
        same = plain.edit(plain.prefill(tokens).sequence, edited, policy)
        assert found.reuse.kind == "approximate"
        assert found.reuse.relocated == same.reuse.relocated > 0
        np.testing.assert_allclose(found.logits, same.logits, atol=atol)
    engine.check()


INT8, FLOAT8 = ("int8", reference.stored_int8), ("float8_e4m3fn", reference.stored_float8)


@pytest.mark.parametrize(
    ("dtype", "store", "first"),
    [
        (*INT8, 1),  # decode only: every token by itself
        pytest.param(*INT8, 8, marks=pytest.mark.slow),
        pytest.param(*FLOAT8, 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("quick_compiles")
def test_quantized_pages_on_interpreted_tpu_kernels(
    dtype: str, store: Any, first: int, wide: jaxkv.Model, judge: Decoder
) -> None:
    """Written by the append kernel, read by prefill and decode: scales go with the pages everywhere."""
    tokens = np.random.default_rng(2).integers(0, VOCAB, first + 3)
    logits = dataclasses.replace(judge, store=store).logits(tokens)
    # TPU kernels round queries over narrow pages where there are many.
    atol = tolerance("logits_stored") if first == 1 else tolerance("logits_pages", "bfloat16")
    engine = _engine(wide, implementation="pallas_tpu", interpret=True, kv_dtype=dtype)
    result = engine.prefill(tokens[:first])
    for at in range(first, len(tokens)):
        np.testing.assert_allclose(result.logits, logits[at - 1], atol=atol)
        result = engine.extend(result.sequence, tokens[at : at + 1])
    np.testing.assert_allclose(result.logits, logits[-1], atol=atol)
    # One layer: what it stores does not depend on how attention rounds.
    plain = _engine(wide, implementation="xla", kv_dtype=dtype)
    stored, expected = engine.read_kv(result.sequence), plain.read_kv(plain.prefill(tokens).sequence)
    for mine, theirs in ((stored.keys, expected.keys), (stored.values, expected.values)):
        # Another shape of matmul moves the last bit of a scale.
        same = np.abs(mine - theirs) <= 1e-6 * np.abs(theirs).max(-1, keepdims=True)
        assert same.mean() > 0.995
    engine.check()


@pytest.mark.usefixtures("quick_compiles")
def test_a_kernel_without_quantized_pages_is_refused_when_forced_and_passed_over_by_auto(
    wide: jaxkv.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(3).integers(0, VOCAB, 2)
    forced = _engine(wide, implementation="triton", interpret=True, kv_dtype="int8")
    with pytest.raises(ConfigError, match=r"can't run this model: the Triton kernel reads .* found int8"):
        forced.prefill(tokens[:1])
    forced.check()
    monkeypatch.setitem(dispatch.PREFERRED, jax.default_backend(), ("triton",))
    auto = _engine(wide, implementation="auto", interpret=True, kv_dtype="int8")
    plain = _engine(wide, implementation="xla", kv_dtype="int8")
    found, expected = (e.extend(e.prefill(tokens[:1]).sequence, tokens[1:2]).logits for e in (auto, plain))
    np.testing.assert_allclose(found, expected, atol=tolerance("logits"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "pallas"}, "implementation is 'pallas', expected one of auto, xla"),
        ({"implementation": "pallas_tpu"}, "needs a TPU, but this machine's platform is"),
        ({"implementation": "triton"}, "needs a GPU, but this machine's platform is"),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU refuses")
def test_an_implementation_that_cannot_run_here_is_refused(
    options: dict[str, str], message: str, wide: jaxkv.Model
) -> None:
    with pytest.raises(ConfigError, match=message):
        _engine(wide, **options)


def test_a_kernel_that_cannot_take_the_model_is_refused_by_name() -> None:
    def refuses(*_: object, **__: object) -> jax.Array:
        raise NotImplementedError("head_dim is 80, expected 64, 128 or 256")

    with pytest.raises(
        ConfigError, match="implementation is 'xla', which can't run this model: head_dim is 80"
    ):
        Backend("xla").call(refuses)
