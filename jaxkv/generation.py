"""Continuing sequences: sampling parameters as a value, and the loop around `decode_many`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxkv.cache.sequence import Sequence
from jaxkv.cache.table import PageTable, StateInput, bucket
from jaxkv.errors import ConfigError
from jaxkv.execute import extended
from jaxkv.memory import Memory
from jaxkv.model.params import Params
from jaxkv.model.sampling import SamplingInput
from jaxkv.schedule import Placement, for_shape, make_table
from jaxkv.steps import DecodeInput, DecodeOutput, Pages, decode_many
from jaxkv.typing import Array, Int32
from jaxkv.windows import group_inputs

LOOP_STEPS = 32  # tokens of one compiled loop; between loops the host looks whether all rows ended
COPY_BYTES = 2 << 30  # a loop's copy of its KV, at most; a batch that needs more reads its pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The same seed gives the same tokens in any batch."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    seed: int = 0
    stop: tuple[int, ...] = ()  # token ids that end a row

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ConfigError(f"{name} is {value!r}, expected a number")
        for name, most in (("top_k", 2**31), ("seed", 2**32)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} is {value!r}, expected a whole number")
            if not 0 <= value < most:
                raise ConfigError(f"{name} is {value}, expected 0 to {most - 1}")
        if not 0 <= self.temperature < 1e30:
            raise ConfigError(f"temperature is {self.temperature}, expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if not isinstance(self.stop, tuple) or not all(
            isinstance(token, int | np.integer) and 0 <= token < 2**31 for token in self.stop
        ):
            raise ConfigError(f"stop is {self.stop!r}, expected a tuple of token ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """One row's result."""

    tokens: Int32  # i32[n]
    stopped: bool
    logits: Array  # f32[V]


def copied_blocks(used: int) -> int:
    """Blocks that a copy of `used` ones takes: 2, 3, 4, 5, 6, 8, 10, 12, 16, ..."""
    size = bucket(used, 2)
    return next(n for n in (size * 5 // 8, size * 3 // 4, size) if n >= max(used, 2))


def narrowed(memory: Memory, tables: tuple[PageTable, ...]) -> tuple[PageTable, ...] | None:
    """The tables without the empty entries behind, if a loop over them is to copy its KV first, else None."""
    if not memory.backend.copies_kv:
        return None
    used = []
    for table in tables:
        entries = np.flatnonzero(np.asarray(table.hi).any(axis=0))
        block = table.page.shape[1] // table.delta_index.shape[1]
        used.append(int(entries[-1]) // block + 1 if len(entries) else 1)
    return cut(memory, tables, used)


def cut(memory: Memory, tables: tuple[PageTable, ...], used: list[int]) -> tuple[PageTable, ...] | None:
    """The tables as wide as a copy of `used` blocks of each is; None where that takes more than `COPY_BYTES`.

    Three widths an octave, from 512 slots on: a copy has what it needs and a third more at most, and few
    shapes are compiled.
    """
    narrow, nbytes = [], 0
    for group, table, blocks in zip(memory.config.groups, tables, used, strict=True):
        width = min(copied_blocks(blocks), table.delta_index.shape[1])
        entries = width * (table.page.shape[1] // table.delta_index.shape[1])
        narrow.append(
            table.replace(  # type: ignore[attr-defined]
                **{name: getattr(table, name)[:, :entries] for name in ("page", "first", "lo", "hi")},
                delta_index=table.delta_index[:, :width],
            )
        )
        slots = table.page.shape[0] * entries * memory.pool.page_size
        nbytes += 8 * slots * memory.config.num_kv_heads * memory.config.head_dim * len(group.layers)
    return tuple(narrow) if nbytes <= COPY_BYTES else None


def run_loop(
    memory: Memory, params: Params, inputs: DecodeInput, copied: tuple[PageTable, ...] | None
) -> DecodeOutput:
    """One compiled loop on the memory's pages, over a copy of what `copied` shows if that is not None."""
    if copied is not None:
        inputs = inputs.replace(tables=copied)  # type: ignore[attr-defined]

    def one(pages: Pages, inputs: DecodeInput) -> tuple[Pages, DecodeOutput]:
        out = decode_many(
            params, pages, inputs, config=memory.config, backend=memory.backend, copied=copied is not None
        )
        return out.pages, out.replace(pages=())  # type: ignore[attr-defined]

    out = memory.run(one, inputs)
    memory.wait(out.counts)
    return out


def decode_batch(
    memory: Memory,
    params: Params,
    sequences: list[Sequence],
    placements: list[Placement],
    *,
    limits: list[int],
    samplings: list[Sampling],
    max_deltas: int,
    written: list[int] | None = None,
) -> list[Decoded]:
    """Generates up to its limit for each sequence into the slots of its placement.

    With recurrent layers each row writes its state into its slot of `written`; a row without tokens leaves
    that as it was.

    The shapes depend on the batch's bucket alone: a loop ends when all rows have, so a short
    generation costs no more in the one compiled loop than in one of its own.
    """
    batch, size = len(sequences), bucket(len(sequences))
    idle = size - batch
    steps = LOOP_STEPS
    drop = memory.pool.num_slots
    rows = [(extended(s.table_segments, p), s.rotate) for s, p in zip(sequences, placements, strict=True)]
    nothing = (rows[0][0][:0], True)
    table = for_shape(make_table(memory.pool, rows + [nothing] * idle, max_deltas), 1, max_deltas)
    rounds = -(-max(limits) // steps)
    slots = np.full((size, rounds * steps), drop, np.int32)
    for b, placement in enumerate(placements):
        slots[b, : limits[b]] = placement.slots
    stop = np.full((size, bucket(max(len(s.stop) for s in samplings), 4)), -1, np.int32)
    for b, choice in enumerate(samplings):
        stop[b, : len(choice.stop)] = choice.stop

    def column(name: str, dtype: type, empty: float) -> np.ndarray:
        return np.array([getattr(s, name) for s in samplings] + [empty] * idle, dtype)

    sampling = SamplingInput(
        temperature=column("temperature", np.float32, 0.0),
        top_k=column("top_k", np.int32, 0),
        top_p=column("top_p", np.float32, 1.0),
        seed=column("seed", np.uint32, 0),
    )
    logits = jnp.stack([s.logits for s in sequences] + [sequences[0].logits] * idle)
    lengths = np.array([len(s) for s in sequences] + [0] * idle, np.int32)
    left = np.array(limits + [0] * idle, np.int32)
    tokens: list[list[Int32]] = [[] for _ in sequences]
    stopped = np.zeros(size, bool)

    states = None
    if memory.states is not None and written is not None:
        unused = [memory.states.none] * idle
        read = [memory.states.none if s.state is None else s.state for s in sequences]
        states = np.array([read + unused, written + unused], np.int32)

    for number in range(rounds):
        limit = np.where(stopped, 0, np.minimum(left, steps)).astype(np.int32)
        part = slots[:, number * steps : (number + 1) * steps]
        queries = [np.arange(lengths[b], lengths[b] + limit[b], dtype=np.int32) for b in range(batch)]
        groups = group_inputs(memory, part, table, rows, queries, max_deltas=max_deltas)
        inputs = DecodeInput(
            logits=logits,
            positions=lengths,
            limits=limit,
            stop=stop,
            slots=tuple(group.slots for group in groups),
            tables=tuple(group.table for group in groups),
            sampling=sampling,
            states=None
            if states is None
            else StateInput(read=states[min(number, 1)], write=states[1], fresh=np.full(size, number == 0)),
        )
        out = run_loop(memory, params, inputs, narrowed(memory, inputs.tables))
        logits = out.logits
        counts = np.asarray(out.counts)
        drawn = np.asarray(out.tokens)
        for b in range(batch):
            tokens[b].append(drawn[b, : counts[b]])
        lengths, left = lengths + counts, left - counts
        stopped = stopped | np.asarray(out.stopped)
        if stopped[:batch].all():
            break
    return [
        Decoded(tokens=np.concatenate(tokens[b]), stopped=bool(stopped[b]), logits=logits[b])
        for b in range(batch)
    ]
