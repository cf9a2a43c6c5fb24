"""Recurrent layers in an engine: whose each state is, and what such models do not have.

Part of the engine's memory, in a file of its own. A live sequence holds the state behind its last token; the
prefix index holds snapshots; a step under way holds the slots that it writes. Models without recurrent
layers have none of this.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from jaxkv.cache.eviction import EvictionPolicy
from jaxkv.cache.snapshots import Snapshots, StateSlots
from jaxkv.cache.states import StatePool, make_states, poison_states
from jaxkv.errors import ConfigError
from jaxkv.model.config import ModelConfig

DEFAULT_STATES = 64


class StateStore:
    """Slots of an engine's state pool, and the sequences that hold one."""

    def __init__(
        self, config: ModelConfig, *, num_states: int, every: int, dtype: str, operators: bool = False
    ) -> None:
        """`every`: tokens between the snapshots of a long text; `operators`: kept beside each state."""
        self.operators = operators
        self.begins: dict[int, int] = {}  # by slot: position behind which its operator begins
        self.config = config
        self.every = every
        self.dtype = dtype
        self.nbytes = config.state_bytes(2 if dtype == "bfloat16" else 4, operators)  # of one slot
        self.slots = StateSlots(num_states)
        self.live: dict[int, int] = {}  # by sequence
        self.snapshots = Snapshots(self.slots, self.nbytes)
        self._freed: list[int] = []

    @property
    def none(self) -> int:
        """The slot of the state before the first token, which no write reaches."""
        return self.slots.none

    def make_pool(self, platform: str, *, poison: bool) -> StatePool:
        """The pool on the device."""
        pool = make_states(
            self.config,
            num_slots=self.slots.num_slots,
            dtype=self.dtype,
            operators=self.operators,
            platform=platform,
        )
        return poison_states(pool, np.arange(pool.num_slots, dtype=np.int32)) if poison else pool

    def restart(self, keep: Container[int]) -> None:
        """Forgets all snapshots, and all sequences but those to keep."""
        self.live = {sequence: slot for sequence, slot in self.live.items() if sequence in keep}
        self._freed += self.slots.rebuild(self.live.values())
        self.snapshots = Snapshots(self.slots, self.nbytes)

    def allocate(self, policy: EvictionPolicy) -> int:
        """A slot to write, with one reference, after giving up a snapshot if it must.

        Raises:
          CapacityError: every slot is a running sequence's, or pinned.
        """
        if not self.slots.free_count:
            self.snapshots.evict(1, policy)
        return self.slots.allocate()

    def release(self, slot: int) -> None:
        """Gives back one reference."""
        if self.slots.release(slot):
            self._freed.append(slot)

    def adopt(self, sequence: int, slot: int) -> None:
        """Notes a reference of a sequence that is handed out."""
        self.slots.retain(slot)
        self.live[sequence] = slot

    def let_go(self, sequence: int) -> None:
        """Gives back the reference of a sequence, if it has one."""
        slot = self.live.pop(sequence, None)
        if slot is not None:
            self.release(slot)

    def take_freed(self) -> list[int]:
        """Slots that became free since the last call and are free still."""
        freed = [s for s in {*self._freed, *self.snapshots.freed} if not self.slots.refcount[s]]
        self._freed, self.snapshots.freed = [], []
        return freed

    def check(self) -> None:
        """Integrity: sequences and snapshots account for every reference, or a HandleError."""
        self.slots.check([*self.live.values(), *self.snapshots.references()])


def make_store(
    config: ModelConfig,
    num_states: int | None,
    every: int | None,
    *,
    chunk: int,
    grid: int,
    dtype: str,
    operators: bool,
) -> StateStore | None:
    """The states of an engine, None without recurrent layers; refuses what such models do not have."""
    num, step = check_states(config, num_states, every, chunk=chunk, grid=grid)
    if config.recurrent is None:
        if operators:
            raise ConfigError("keep_operators is True, expected False for a model without recurrent layers")
        return None
    return StateStore(config, num_states=num, every=step, dtype=dtype, operators=bool(operators))


def refuse(config: ModelConfig, what: str, instead: str) -> None:
    """Raises ConfigError for what a model with recurrent layers does not have."""
    if config.recurrent is not None:
        raise ConfigError(f"{what} is not there for models with recurrent layers, expected {instead}")


def check_states(
    config: ModelConfig, num_states: int | None, every: int | None, *, chunk: int, grid: int
) -> tuple[int, int]:
    """Returns the number of slots and the tokens between snapshots, or raises ConfigError.

    Args:
      config: a model; without recurrent layers both arguments must be None.
      num_states: slots, `DEFAULT_STATES` when None.
      every: tokens between snapshots, 4 chunks when None.
      chunk: the engine's chunk size.
      grid: where hits end on; `every` must be a multiple of it.
    """
    for name, value in (("num_states", num_states), ("snapshot_every", every)):
        if value is None:
            continue
        if config.recurrent is None:
            raise ConfigError(f"{name} is {value}, expected None for a model without recurrent layers")
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ConfigError(f"{name} is {value!r}, expected a positive whole number")
    if num_states is not None and num_states < 2:
        raise ConfigError("num_states is 1, expected at least 2: a step reads one and writes another")
    if every is not None and every % grid:
        raise ConfigError(
            f"snapshot_every is {every}, expected a multiple of chunk_size {grid} with chunk granularity"
        )
    return int(num_states or DEFAULT_STATES), int(every or 4 * chunk)
