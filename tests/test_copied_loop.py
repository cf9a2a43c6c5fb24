"""A decode loop over a copy of its KV gives what the loop over pages gives, whatever the tables hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judge import ATOL
from reference import decoder_of
from tiny import make_model, tiny_config

import jaxkv
from jaxkv import SCR, Sampling, generation

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
SLIDING: dict[str, Any] = {"layer_types": ("local", "global"), "window": 21}


def test_widths_hold_what_is_used_and_a_third_more_at_most() -> None:
    for used in range(1, 400):
        width = generation.copied_blocks(used)
        assert width >= used
        assert width <= max(2, used * 4 / 3 + 1)
    assert len({generation.copied_blocks(n) for n in range(1, 129)}) == 18, "three an octave"


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["global", "sliding"])
def test_copied_and_paged_loops_agree(
    make_engine: Engines, text: Text, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], kv_dtype: str
) -> None:
    model = make_model(tiny_config(**changes))
    engine = make_engine(model=model, kv_dtype=kv_dtype)
    old = text(100)
    moved = engine.edit(engine.prefill(old).sequence, old[9:], SCR(min_span=8, tail=4)).sequence
    rows = [moved, engine.prefill(text(5, seed=1)).sequence, engine.prefill(text(61, seed=2)).sequence]
    sampling = Sampling(stop=())
    ways = []

    def watched(*args: Any, copied: bool, **options: Any) -> Any:
        ways.append(copied)
        return jaxkv.decode_many(*args, copied=copied, **options)

    monkeypatch.setattr(generation, "decode_many", watched)
    copied = engine.generate_batch(rows, max_tokens=40, sampling=sampling)  # in two loops
    with monkeypatch.context() as patch:
        patch.setattr(generation, "COPY_BYTES", 0)
        paged = engine.generate_batch(rows, max_tokens=40, sampling=sampling)
    assert ways == [True, True, False, False]
    for a, b in zip(copied, paged, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.sequence.logits, b.sequence.logits, atol=2e-5)
    if kv_dtype == "float32":
        exact = decoder_of(model.params, model.config).logits(copied[2].sequence.tokens)[-1]
        np.testing.assert_allclose(copied[2].sequence.logits, exact, atol=ATOL)
        # Both wrote the same pages.
        a, b = (engine.read_kv(out[0].sequence) for out in (copied, paged))
        np.testing.assert_allclose(a.keys, b.keys, atol=2e-5)
        np.testing.assert_allclose(a.values, b.values, atol=2e-5)
