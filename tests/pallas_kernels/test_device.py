"""Kernels on the accelerator of this machine, if it has one. Skipped elsewhere, never passed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import tolerance

import pallas_kernels
from pallas_kernels import dispatch, judge, reference, shapes

PLATFORM = jax.default_backend()
CASES = [pytest.param(c, id=f"decode-{c.name}") for c in shapes.DECODE]
CASES += [pytest.param(c, id=f"prefill-{c.name}") for c in shapes.PREFILL]


def needs(implementation: str) -> None:
    platform = dispatch.PLATFORMS[implementation]
    if platform != PLATFORM:
        pytest.skip(
            f"{implementation} was not run: it needs a {platform.upper()}, this machine has {PLATFORM}"
        )


@pytest.mark.parametrize("implementation", sorted(dispatch.PLATFORMS))
@pytest.mark.parametrize("case", CASES)
def test_attention_on_the_device(case: shapes.Case, implementation: str) -> None:
    needs(implementation)
    inputs = shapes.build(case, seed=8)
    options = {"window": case.window, "soft_cap": case.soft_cap}
    run = functools.partial(pallas_kernels.paged_attention, implementation=implementation, **options)
    try:
        found = np.asarray(jax.jit(run)(*inputs.arrays(), scale=inputs.scale))
    except NotImplementedError as refusal:
        pytest.skip(f"{implementation} refuses this case: {refusal}")
    dtype = "float32" if case.dtype == "float32" and implementation == "pallas_tpu" else "bfloat16"
    expected = judge.attention(*inputs.arrays(), scale=inputs.scale, **options)
    np.testing.assert_allclose(found, expected, atol=tolerance("attention", dtype))


@pytest.mark.parametrize("implementation", sorted(dispatch.PLATFORMS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_written_on_the_device(dtype: str, implementation: str) -> None:
    needs(implementation)
    rng = np.random.default_rng(9)
    kv = jnp.asarray(rng.standard_normal((40, 3, 16, 128), np.float32)).astype(dtype)
    angle = rng.uniform(-3, 3, (8, 32)).astype(np.float32)
    moves = np.arange(8, dtype=np.int32), np.arange(8, 16, dtype=np.int32), np.cos(angle), np.sin(angle)
    places = rng.permutation(16 * 16)[:50].astype(np.int32)
    new = rng.standard_normal((2, 50, 3, 64), np.float32)
    tokens = 20 + places // 16, places % 16, new[0], new[1]
    expected = reference.append(reference.relocate_pages(kv, *moves), *tokens)
    try:
        found = pallas_kernels.relocate_pages(kv, *moves, implementation=implementation)
        found = pallas_kernels.append(found, *tokens, implementation=implementation)
    except NotImplementedError as refusal:
        pytest.skip(f"{implementation} refuses this: {refusal}")
    atol = tolerance("relocated_key") if dtype == "float32" else 2.0**-6  # one rounding of a key below 8
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), atol=atol)
