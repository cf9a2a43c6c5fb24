"""The arrays on the device that an engine's memory is made of: pages of every layer group, and states.

Part of the memory, in a file of its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.cache.pages import make_pages, poison_pages
from jaxkv.errors import CapacityError
from jaxkv.parallel import make_placed
from jaxkv.steps import Pages

if TYPE_CHECKING:
    from jaxkv.memory import Memory


def make_arrays(memory: Memory) -> Pages:
    """Fresh pages for every layer group, and a pool of states where there are recurrent layers.

    Raises:
      CapacityError: the device has not that much memory.
    """
    pool, held, backend = memory.pool, memory.residency, memory.backend
    try:
        pages = tuple(
            make_placed(
                functools.partial(
                    make_pages,
                    memory.config,
                    group,
                    num_pages=held.capacity if held is not None and group.window else pool.num_pages,
                    page_size=pool.page_size,
                    dtype=memory.kv_dtype,
                    platform=backend.storage_platform,
                ),
                backend.mesh,
            )
            for group in memory.config.groups
        )
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        size = pool.num_pages * memory.page_bytes / 2**30
        raise CapacityError(
            f"num_pages is {pool.num_pages}, about {size:,.1f} GiB in {memory.kv_dtype}, expected a "
            "pool that fits the device's memory"
        ) from error
    if memory.poison:
        pages = tuple(poison_pages(group, np.arange(group.num_pages, dtype=np.int32)) for group in pages)
    if memory.states is None:
        return pages
    make = functools.partial(memory.states.make_pool, backend.storage_platform, poison=memory.poison)
    return (*pages, make_placed(make, backend.mesh))
