"""The Triton decode kernel, interpreted and, where there is a GPU, compiled. Goes when the kernel goes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import quick_compiles  # noqa: F401  (autouse)
from tolerances import tolerance

from pallas_kernels import judge, shapes, triton_decode

CASES = [c for c in shapes.DECODE if not c.quantized]
QUICK = ("seven-deltas", "window", "bfloat16", "head-256")
on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU here")


def _check(case: shapes.Case, interpret: bool) -> None:
    inputs = shapes.build(case, seed=7)
    masks = {"window": case.window, "soft_cap": case.soft_cap}
    expected = judge.attention(*inputs.arrays(), **masks)
    found = triton_decode.paged_attention(*map(jnp.asarray, inputs.arrays()), **masks, interpret=interpret)
    np.testing.assert_allclose(found, expected, atol=tolerance("attention", case.dtype))


@pytest.mark.parametrize("case", [c for c in CASES if c.name in QUICK], ids=lambda c: c.name)
def test_decode(case: shapes.Case) -> None:
    _check(case, True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.name not in QUICK], ids=lambda c: c.name)
def test_decode_of_every_other_case(case: shapes.Case) -> None:
    _check(case, True)


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_decode_on_the_device(case: shapes.Case) -> None:
    _check(case, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 2}, "one query a sequence, found 2"),
        ({"dtype": "int8"}, "float32 and bfloat16 pages, found int8"),
        ({"page_size": 24}, "page sizes that are powers of two, found 24"),
        ({"head_dim": 1024}, "no room for head dims of 1024"),
        ({"head_dim": 8}, "head dims and blocks of 16 slots or more, found 8"),
    ],
)
def test_what_the_kernel_does_not_do_is_said_in_a_sentence(change: dict[str, Any], message: str) -> None:
    inputs = shapes.build(dataclasses.replace(shapes.DECODE[0], **change))
    scale = None if inputs.scale is None else jnp.asarray(inputs.scale)
    with pytest.raises(NotImplementedError, match=message):
        triton_decode.paged_attention(*map(jnp.asarray, inputs.arrays()), scale=scale)
