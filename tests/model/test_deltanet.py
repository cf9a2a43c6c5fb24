"""Gated DeltaNet: the chunked form and the single step, judged by a float64 loop over tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrent_reference import delta_loop, mixer_of
from tiny import sharp_params
from tiny_hybrid import SHAPE, hybrid_config
from tolerances import tolerance

from jaxkv.model.deltanet import (
    causal_conv,
    delta_chunks,
    delta_step,
    gated_delta_net,
    unit,
    unit_lower_inverse,
)

B, HK, HV, DK, DV = 2, 2, 4, 16, 12
chunks = jax.jit(delta_chunks, static_argnames="chunk")
mix = jax.jit(gated_delta_net, static_argnames="config")


def draw(length: int, seed: int = 0) -> list[np.ndarray]:
    """q, k, v, log_decay, beta and a state, float32; decays from almost none to almost all."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, length, HK, DK))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((B, length, HV, DV))
    log_decay = -np.exp(rng.uniform(-6, 2, (B, length, HV)))
    beta = rng.uniform(0, 1, (B, length, HV))
    state = rng.standard_normal((B, HV, DK, DV))
    return [x.astype(np.float32) for x in (q, k, v, log_decay, beta, state)]


def judge(inputs: list[np.ndarray], out: Any, state: Any, name: str = "delta_rule") -> None:
    for row in range(B):
        expected, last = delta_loop(*(x[row] for x in inputs))
        np.testing.assert_allclose(out[row], expected, atol=tolerance(name), rtol=0)
        np.testing.assert_allclose(state[row], last, atol=tolerance(name), rtol=0)


@pytest.mark.parametrize(("length", "chunk"), [(5, 64), (130, 64), (37, 8)])
def test_chunks_equal_the_loop(length: int, chunk: int) -> None:
    inputs = draw(length)
    judge(inputs, *chunks(*inputs, chunk=chunk))


def test_chunks_hold_where_keys_repeat() -> None:
    """One key again and again, hardly any decay: a series for the inverse would lose every digit here."""
    q, k, v, log_decay, beta, state = draw(130)
    k[:], log_decay[:], beta[:] = k[:, :1], -1e-4, 0.999
    inputs = [q, k, v, log_decay, beta, state]
    judge(inputs, *chunks(*inputs, chunk=64), "delta_rule_repeated")


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("kind", ["random", "repeats"])
def test_a_unit_lower_triangular_matrix_is_inverted(n: int, kind: str) -> None:
    """Equal keys make every entry the same: powers of it grow to 1e18, the inverse stays at 1."""
    random = np.random.default_rng(n).uniform(-0.3, 0.3, (2, 3, n, n))
    strict = np.tril(random if kind == "random" else np.full((2, 3, n, n), 0.999), -1)
    found = jax.jit(unit_lower_inverse)(strict.astype(np.float32))
    np.testing.assert_allclose(found, np.linalg.inv(np.eye(n) + strict), atol=tolerance("delta_rule"))


def test_no_chunk_waits_in_the_thread_pool_for_its_own_threads() -> None:
    """jaxlib's batched LAPACK kernels do, and two of them at once never end: any custom call is suspect."""
    inputs = draw(130)
    trained = jax.jit(jax.grad(lambda *x: delta_chunks(*x)[0].sum(), argnums=(0, 1, 2)))
    for lowered in (chunks.lower(*inputs), trained.lower(*inputs)):
        assert "custom_call" not in lowered.as_text()


def test_chunks_hold_where_everything_decays() -> None:
    """exp of a masked difference would overflow."""
    q, k, v, log_decay, beta, state = draw(130)
    log_decay[:] = -50.0
    inputs = [q, k, v, log_decay, beta, state]
    judge(inputs, *chunks(*inputs, chunk=64))


def test_single_steps_equal_the_loop() -> None:
    inputs = draw(9)
    *tokens, state = (jnp.asarray(x) for x in inputs)
    out = []
    for t in range(9):
        one, state = delta_step(*(x[:, t] for x in tokens), state)
        out.append(one)
    judge(inputs, jnp.stack(out, 1), state)


def test_a_zero_vector_has_no_direction() -> None:
    assert not np.asarray(unit(jnp.zeros(4))).any()


def test_the_convolution_keeps_the_last_valid_inputs() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 6, 5)), rng.standard_normal((5, 4))
    before = rng.standard_normal((3, 5, 3))
    lengths = np.array([6, 2, 0], np.int32)
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, before, weight)]
    out, after = causal_conv(*arrays, jnp.asarray(lengths))
    for row, valid in enumerate(lengths):
        joined = np.concatenate([before[row].T, x[row]])
        expected = [(joined[t : t + 4] * weight.T).sum(0) for t in range(6)]
        np.testing.assert_allclose(out[row], expected, atol=1e-5)
        kept = joined[valid : valid + 3].T.astype(np.float32)
        np.testing.assert_array_equal(after[row], kept)


def mixer_case(length: int, dtype: Any = jnp.float32) -> tuple[Any, Any, np.ndarray, jax.Array, jax.Array]:
    config = hybrid_config()
    layer = sharp_params(config, dtype=dtype).layers[0]
    shape = config.recurrent
    h = np.random.default_rng(5).standard_normal((B, length, config.embed_dim)).astype(np.float32)
    conv = jnp.zeros((B, shape.channels, shape.conv_width - 1))
    state = jnp.zeros((B, shape.num_value_heads, shape.key_dim, shape.value_dim))
    return config, layer, h, conv, state


def test_a_mixer_in_odd_parts_equals_the_loop() -> None:
    """Prefill of any lengths with padding, then single steps: outputs, convolution inputs and state."""
    config, layer, h, conv, state = mixer_case(40)
    reference = mixer_of(layer, SHAPE, config.norm_eps)
    out = []
    for start, count, padded in ((0, 15, 16), (15, 1, 1), (16, 3, 16), (19, 16, 16), (35, 1, 1), (36, 4, 16)):
        part = np.full((B, padded, config.embed_dim), np.nan, np.float32)
        part[:, :count] = h[:, start : start + count]
        lengths = jnp.full(B, count, jnp.int32)
        done, conv, state, _ = mix(jnp.asarray(part), layer, conv, state, lengths, config=config)
        out.append(np.asarray(done)[:, :count])
    for row in range(B):
        expected, before, last = reference.run(h[row].astype(np.float64), *reference.start())
        got = np.concatenate(out, axis=1)[row]
        np.testing.assert_allclose(got, expected, atol=tolerance("delta_rule"), rtol=0)
        np.testing.assert_allclose(state[row], last, atol=tolerance("delta_rule"), rtol=0)
        np.testing.assert_allclose(conv[row].T, before, atol=tolerance("delta_rule"), rtol=0)


@pytest.mark.parametrize("length", [1, 16])
def test_padding_changes_no_bit_of_a_state(length: int) -> None:
    config, layer, h, _, _ = mixer_case(length)
    rng = np.random.default_rng(1)
    shape = config.recurrent
    conv = jnp.asarray(rng.standard_normal((B, shape.channels, shape.conv_width - 1)), jnp.float32)
    states = (B, shape.num_value_heads, shape.key_dim, shape.value_dim)
    state = jnp.asarray(rng.standard_normal(states), jnp.float32)
    lengths = jnp.array([0, length // 2], jnp.int32)
    results = []
    for garbage in (0.0, np.nan, 1e30):
        part = h.copy()
        part[0], part[1, length // 2 :] = garbage, garbage
        results.append(mix(jnp.asarray(part), layer, conv, state, lengths, config=config)[1:3])
    np.testing.assert_array_equal(results[0][0][0], conv[0])
    np.testing.assert_array_equal(results[0][1][0], state[0])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_bfloat16_convolution_inputs_are_what_a_snapshot_stores() -> None:
    """Saved and read back they are the same numbers: no cold path has more precise ones."""
    config, layer, h, conv, state = mixer_case(1, jnp.bfloat16)
    lengths = jnp.ones(B, jnp.int32)
    _, conv, _, _ = mix(jnp.asarray(h), layer, conv, state, lengths, config=config)
    assert conv.dtype == jnp.float32
    np.testing.assert_array_equal(conv, conv.astype(jnp.bfloat16).astype(jnp.float32))
