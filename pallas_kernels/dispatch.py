"""Chooses the code that runs an operation, once, while it is traced.

A backend module exposes one function named like its operation (`paged_attention`, `append` or
`relocate_pages`), with the arguments of the public function without `implementation`. It is imported when
it is first needed, and raises NotImplementedError with one sentence for what it cannot do: "auto" then
takes XLA, a forced implementation lets the error through.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

IMPLEMENTATIONS = ("auto", "xla", "pallas_tpu", "pallas_gpu", "triton")

# (implementation, operation) -> module. "decode" is attention with one query a sequence.
MODULES = {
    ("xla", "decode"): "xla",
    ("xla", "prefill"): "xla",
    ("xla", "append"): "xla",
    ("xla", "relocate_pages"): "xla",
    ("pallas_tpu", "decode"): "tpu_decode",
    ("pallas_tpu", "prefill"): "tpu_prefill",
    ("pallas_tpu", "append"): "tpu_append",
    ("pallas_tpu", "relocate_pages"): "tpu_relocate",
    ("pallas_gpu", "decode"): "mosaic_gpu_decode",
    ("pallas_gpu", "prefill"): "mosaic_gpu_prefill",
    ("pallas_gpu", "relocate_pages"): "mosaic_gpu_relocate",
    ("triton", "decode"): "triton_decode",
}
# XLA writes scattered slots in place on a GPU (a test reads the compiled program), so no kernel does.
BY_XLA = {("pallas_gpu", "append")}
# In the order in which "auto" tries them; XLA comes after all.
PREFERRED = {"tpu": ("pallas_tpu",), "gpu": ("pallas_gpu", "triton")}
PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "triton": "gpu"}

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Within it, operations are traced for `platform` ("cpu", "tpu" or "gpu"), not for this process's own.

    For compiling ahead of time for hardware that is not here. Trace a fresh `jax.jit` inside it: a function
    that was traced before keeps the choice that was made then.
    """
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def platform() -> str:
    """The platform that operations are traced for: this process's own, or that of `compiling_for`."""
    return _platform.get() or jax.default_backend()


def check_implementation(implementation: str) -> None:
    """Raises ValueError for a name that is not in IMPLEMENTATIONS."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}, expected one of {', '.join(IMPLEMENTATIONS)}"
        )


def resolve(implementation: str, operation: str, on: str) -> tuple[str, ...]:
    """Names of the implementations to try for an operation on a platform, in order.

    Args:
      implementation: one of IMPLEMENTATIONS.
      operation: "decode", "prefill", "append" or "relocate_pages".
      on: the platform, "cpu", "tpu" or "gpu".

    Raises:
      ValueError: unknown implementation.
      NotImplementedError: the forced implementation has no such operation.
    """
    check_implementation(implementation)
    if implementation == "auto":
        tried = [name for name in PREFERRED.get(on, ()) if (name, operation) in MODULES]
        return (*tried, "xla")
    if (implementation, operation) in BY_XLA:
        return ("xla",)
    if (implementation, operation) not in MODULES:
        raise NotImplementedError(f"implementation {implementation!r} has no kernel for {operation}")
    return (implementation,)


def run(operation: str, name: str, implementation: str, interpret: Any, *args: Any, **options: Any) -> Any:
    """Calls the function `name` of the chosen backend.

    Raises:
      ValueError: unknown implementation.
      NotImplementedError: a forced implementation cannot run these arguments, or cannot run here.
    """
    on = platform()
    forced = implementation != "auto"
    for candidate in resolve(implementation, operation, on):
        if candidate == "xla":
            break
        needs = PLATFORMS[candidate]
        if needs != on and not interpret:
            raise NotImplementedError(
                f"implementation {candidate!r} needs a {needs.upper()}, found {on}: "
                "choose 'auto' or 'xla', or set interpret"
            )
        try:
            return _function(candidate, operation, name)(*args, **options, interpret=interpret)
        except NotImplementedError:
            if forced:
                raise
    return _function("xla", operation, name)(*args, **options)


def _function(implementation: str, operation: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"pallas_kernels.{MODULES[implementation, operation]}")
    function: Callable[..., Any] = getattr(module, name)
    return function
