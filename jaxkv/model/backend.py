"""Which code runs attention, page writes and relocation, XLA or the Pallas kernels, and on which devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxkv.errors import ConfigError, nearest
from jaxkv.model.sharding import on_shards
from jaxkv.typing import Array
from pallas_kernels.dispatch import IMPLEMENTATIONS, MODULES, PLATFORMS, PREFERRED, platform


@dataclasses.dataclass(frozen=True)
class Backend:
    """A static argument of the steps: chosen once, when a step is traced.

    Attributes:
      implementation: "auto" takes the platform's kernels where they can run and XLA elsewhere; "xla",
        "pallas_tpu", "pallas_gpu" and "triton" force one.
      interpret: runs kernels in the interpreter, on any machine; for tests.
      mesh: the devices that one step is split over; None for one device.

    Raises:
      ConfigError: an unknown implementation, or one that can't run on this machine.
    """

    implementation: str = "auto"
    interpret: bool = False
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        name = self.implementation
        if name not in IMPLEMENTATIONS:
            raise ConfigError(
                f"implementation is {name!r}, expected one of {', '.join(IMPLEMENTATIONS)}"
                f"{nearest(str(name), IMPLEMENTATIONS)}"
            )
        needs = PLATFORMS.get(name)
        # Asked only where it matters: the answer starts JAX, and processes must join before that.
        if needs is not None and not self.interpret and needs != (found := platform()):
            raise ConfigError(
                f"implementation is '{name}', which needs a {needs.upper()}, but this machine's platform is "
                f"{found}: expected 'auto', 'xla', or interpret=True"
            )

    def has(self, operation: str) -> bool:
        """Whether `pallas_kernels` runs "decode", "prefill" or "append"; else XLA's own form does."""
        if self.implementation == "auto":
            return platform() in PREFERRED
        return self.implementation != "xla" and (self.implementation, operation) in MODULES

    def call(self, function: Callable[..., Any], *args: Array, **options: Any) -> Any:
        """An operation of `pallas_kernels`, with what it takes by keyword, such as `scale`.

        On a mesh every shard runs it on its own KV heads.

        Raises:
          ConfigError: a forced kernel can't take these shapes or dtypes.
        """
        run: Callable[..., Any] = functools.partial(
            function, implementation=self.implementation, interpret=self.interpret
        )
        if self.mesh is not None:
            run = on_shards(run, function, self.mesh)
        try:
            return run(*args, **options)
        except NotImplementedError as error:
            raise ConfigError(
                f"implementation is '{self.implementation}', which can't run this model: {error}"
            ) from None

    @property
    def copies_kv(self) -> bool:
        """Whether a decode loop had better copy KV out of its pages first: where XLA runs it on CPU."""
        return self.mesh is None and not self.has("decode") and platform() == "cpu"

    @property
    def storage_platform(self) -> str:
        """The platform whose way of storing pages is used: kernels read dtypes, not their bits."""
        return PLATFORMS.get(self.implementation) or platform()


AUTO = Backend()
