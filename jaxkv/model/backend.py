"""Which code runs attention, page writes and relocation: XLA, or the Pallas kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxkv.errors import ConfigError, nearest
from jaxkv.typing import Array
from pallas_kernels.dispatch import IMPLEMENTATIONS, MODULES, PLATFORMS, PREFERRED, platform


@dataclasses.dataclass(frozen=True)
class Backend:
    """A static argument of the steps: chosen once, when a step is traced.

    Attributes:
      implementation: "auto" takes the platform's kernels where they can run and XLA elsewhere; "xla",
        "pallas_tpu", "pallas_gpu" and "triton" force one.
      interpret: runs kernels in the interpreter, on any machine; for tests.

    Raises:
      ConfigError: an unknown implementation, or one that can't run on this machine.
    """

    implementation: str = "auto"
    interpret: bool = False

    def __post_init__(self) -> None:
        name = self.implementation
        if name not in IMPLEMENTATIONS:
            raise ConfigError(
                f"implementation is {name!r}, expected one of {', '.join(IMPLEMENTATIONS)}"
                f"{nearest(str(name), IMPLEMENTATIONS)}"
            )
        needs, here = PLATFORMS.get(name), platform()
        if needs is not None and needs != here and not self.interpret:
            raise ConfigError(
                f"implementation is '{name}', which needs a {needs.upper()}, but this machine's platform is "
                f"{here}: expected 'auto', 'xla', or interpret=True"
            )

    def has(self, operation: str) -> bool:
        """Whether `pallas_kernels` runs "decode", "prefill" or "append"; else XLA's own form does."""
        if self.implementation == "auto":
            return platform() in PREFERRED
        return self.implementation != "xla" and (self.implementation, operation) in MODULES

    def call(self, function: Callable[..., Any], *args: Array, **options: Any) -> Any:
        """An operation of `pallas_kernels`, with what it takes by keyword, such as `scale`.

        Raises:
          ConfigError: a forced kernel can't take these shapes or dtypes.
        """
        try:
            return function(*args, **options, implementation=self.implementation, interpret=self.interpret)
        except NotImplementedError as error:
            raise ConfigError(
                f"implementation is '{self.implementation}', which can't run this model: {error}"
            ) from None

    @property
    def storage_platform(self) -> str:
        """The platform whose way of storing pages is used: kernels read dtypes, not their bits."""
        return PLATFORMS.get(self.implementation, platform())


AUTO = Backend()
