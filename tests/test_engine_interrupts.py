"""Ctrl-C in the middle of a call: it passes as it is, and the engine goes on in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from judge import ATOL
from reference import Decoder
from tiny import make_model, tiny_config

import jaxkv
from jaxkv import execute, memory
from jaxkv.cache.pool import PagePool


def _interrupt_after(target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The named function does its work, then the interrupt strikes."""
    real = getattr(target, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(target, name, struck)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (PagePool, "allocate"),  # pages taken, nobody has noted them
        (PagePool, "fill"),
        (PagePool, "retain"),
        (execute, "run_step"),  # pages donated, the new ones not kept
        (memory, "place"),
    ],
)
def test_an_interrupt_is_not_an_error_and_leaves_nothing_behind(
    target: Any, name: str, monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    engine = jaxkv.Engine(make_model(tiny_config()), num_pages=64, page_size=8, chunk_size=32)
    tokens = np.arange(90) % 97
    first = engine.prefill(tokens).sequence
    edited = np.concatenate([tokens[:10], tokens[12:]])
    with monkeypatch.context() as patch:
        _interrupt_after(target, name, patch)
        with pytest.raises(KeyboardInterrupt):
            engine.edit(first, edited, jaxkv.SCR(min_span=8, form="copy"))
    engine.check()
    again = engine.prefill(edited)
    np.testing.assert_allclose(again.logits, decoder.logits(edited)[-1], atol=ATOL)
    del first, again
    engine.check()
    assert engine.stats()["sequences"] == 0


def test_sequences_outlive_an_interrupt_that_took_no_pages(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    engine = jaxkv.Engine(make_model(tiny_config()), num_pages=64, page_size=8, chunk_size=32)
    tokens = np.arange(50) % 97
    first = engine.prefill(tokens).sequence
    with monkeypatch.context() as patch:
        _interrupt_after(PagePool, "allocate", patch)
        with pytest.raises(KeyboardInterrupt):
            engine.extend(first, [1, 2, 3])
    longer = engine.extend(first, [1, 2, 3])
    expected = decoder.logits(np.concatenate([tokens, [1, 2, 3]]))[-1]
    np.testing.assert_allclose(longer.logits, expected, atol=ATOL)
    engine.check()
