"""Ways to run a TPU kernel on a CPU, and a kernel whose copies are not awaited."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

# Three ways, because each hides something: generic interpretation runs a copy when it is started, so a
# missing wait goes unseen; "on_wait" leaves NaN where nobody waited; "eager" with the race detector orders
# every access.
GENERIC: Any = True
ON_WAIT = pltpu.InterpretParams()
EAGER = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)


@contextlib.contextmanager
def fresh_interpreter() -> Iterator[None]:
    """The interpreter's shared memory and race detector start anew, and are left so."""
    pltpu.reset_tpu_interpret_mode_state()
    try:
        yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def found_race(run: Callable[[], Any], capture: pytest.CaptureFixture[str]) -> bool:
    """Whether the race detector reports anything: newer JAX raises, older JAX prints."""
    capture.readouterr()
    try:
        run()
    except Exception as error:
        if "RACE DETECTED" in str(error):
            return True
        raise
    printed = capture.readouterr()
    return "RACE DETECTED" in printed.out + printed.err


@pytest.fixture(autouse=True)
def quick_compiles() -> Iterator[None]:
    """Interpreted kernels are compiled for one small run: optimizing them takes longer than the run."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


class _Unawaited:
    def __init__(self, copy: Any) -> None:
        self.start = copy.start

    def wait(self) -> None:
        """Forgotten on purpose."""


def without_waits(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Breaks the kernel of `module`: its copies are started and never awaited."""
    names = {name: getattr(pltpu, name) for name in dir(pltpu)}
    names["make_async_copy"] = lambda *args: _Unawaited(pltpu.make_async_copy(*args))
    monkeypatch.setattr(module, "pltpu", types.SimpleNamespace(**names))
