"""Running decided work: chunks of tokens through the step, moved runs through `relocate`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxkv.cache.sequence import EMPTY_SEGMENTS, HI, LO, concatenate, ends, slots_of, starts
from jaxkv.cache.table import BLOCK_SLOTS, StepInput, bucket
from jaxkv.carry import Carry, StateRun
from jaxkv.memory import Memory
from jaxkv.model.params import Params
from jaxkv.model.transformer import StepOutput
from jaxkv.schedule import Placement, coalesce, delta_of, for_shape, make_table, step_input
from jaxkv.steps import Moves, Pages, relocate, run_step
from jaxkv.typing import Array, Bool, Int32
from jaxkv.windows import group_inputs, refuse_bound

MOVE_SLOTS = 1024  # slots of one relocation step: bounds its temporaries
SCATTERED = 4  # rows a page's worth of moved tokens may take, beyond a block, before they are copied together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """What `compute` ran. Whoever called it releases `placement.fresh` and the slots of `states`."""

    placement: Placement
    outputs: list[tuple[StepOutput, int]]  # each step's output and its valid tokens, in order
    shapes: set[tuple[Any, ...]]  # static shapes that ran
    states: tuple[tuple[int, int], ...] = ()  # positions and slots of states left behind, the end's last

    @property
    def state(self) -> int | None:
        """Slot of the state behind the last token, where there are recurrent layers."""
        return self.states[-1][1] if self.states else None

    @property
    def logits(self) -> Array:
        """f32[V] of the last token."""
        return self.outputs[-1][0].logits[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Materialized:
    """Segments without any delta, the pages made for them (one reference each), and tokens moved."""

    segments: Int32
    fresh: Int32
    moved: int


def compute(
    memory: Memory,
    params: Params,
    *,
    segments: Int32,
    attended: Int32,
    tokens: Int32,
    positions: Int32,
    rotate: bool,
    max_deltas: int,
    chunk_size: int,
    write: bool = True,
    kept: Bool | None = None,
    carry: Carry | None = None,
    logits: str = "last",
    capture: bool = False,
) -> Computed:
    """Computes `tokens` at `positions` (ascending) over what is already there.

    One table serves all chunks: slots that a later chunk writes are hidden by causality until then.

    Args:
      memory: gives slots and holds the pages.
      params: weights; of the first layers only, to stop behind them.
      segments: i32[W, 4] as born; new tokens are appended behind them where there is room.
      attended: i32[W', 4] that attention reads.
      tokens, positions: i32[f].
      rotate: whether queries are rotated by -delta.
      max_deltas: R of the table when there are any.
      chunk_size: tokens of a step.
      write: False only reads: the tokens' KV is there already.
      kept: bool[f], tokens of which that is so, if not of all or none.
      carry: where recurrent layers start and leave states behind; needed if there are any.
      logits, capture: as in `forward_step`.

    Raises:
      CapacityError: not enough pages.
    """
    drop = memory.pool.num_slots
    written = np.full(len(positions), write) if kept is None else ~kept
    placement = Placement.of(EMPTY_SEGMENTS)
    slots = np.full(len(positions), drop, np.int32)

    def one(pages: Pages, step: StepInput) -> tuple[Pages, StepOutput]:
        out = run_step(
            params,
            pages,
            step,
            config=memory.config,
            logits=logits,
            capture=capture,
            backend=memory.backend,
        )
        # The pages belong to the memory alone: the next step takes them.
        return out.pages, out.replace(pages=())  # type: ignore[attr-defined]

    outputs: list[tuple[StepOutput, int]] = []
    shapes: set[tuple[Any, ...]] = set()
    states = StateRun(memory, carry, positions)
    try:
        if written.any():
            placement = memory.place(segments, positions[written])
            slots[written] = placement.slots
        rows = [(extended(attended, placement), rotate)]
        table = make_table(memory.pool, rows, max_deltas)
        done = 0
        for count, shape in states.step_sizes(chunk_size):
            part = slice(done, done + count)
            fitting = for_shape(table, shape, max_deltas)
            step = step_input(
                tokens[part],
                positions[part],
                slots[part],
                shape,
                fitting,
                drop=drop,
                states=states.slots(),
            )
            shared = step.groups[0]
            groups = group_inputs(
                memory, shared.slots, shared.table, rows, [positions[part]], max_deltas=max_deltas
            )
            step = step.replace(groups=groups)  # type: ignore[attr-defined]
            out = memory.run(one, step)
            outputs.append((out, count))
            shapes.add(("step", shape, *table.page.shape, fitting.deltas.shape[1], logits, capture))
            if groups[-1].table is not shared.table:
                shapes.add(("local", shape, *groups[-1].table.page.shape, groups[-1].table.deltas.shape[1]))
            done += count
        shapes |= states.shapes
        memory.wait([out.logits for out, _ in outputs])
    except BaseException:
        memory.release(placement.fresh)
        states.release()
        raise
    return Computed(placement=placement, outputs=outputs, shapes=shapes, states=tuple(states.left))


def extended(segments: Int32, placement: Placement) -> Int32:
    """Segments with newly placed ones; a page that was appended to stays one row."""
    return coalesce(concatenate([segments, placement.segments]))


def materialize(memory: Memory, segments: Int32) -> Materialized:
    """Copies every moved run into fresh pages, keys rotated to where they stand.

    Raises:
      CapacityError: not enough pages.
      RelocationError: the model's rotations do not compose.
    """
    delta = delta_of(memory.pool, segments, rotate=True)
    moving = segments[delta != 0]
    positions, source = slots_of(moving, memory.pool.page_size)
    deltas = np.repeat(delta[delta != 0], moving[:, HI] - moving[:, LO]).astype(np.int32)
    placement = memory.place(EMPTY_SEGMENTS, positions)
    try:
        move_slots(memory, source, placement.slots, deltas)
    except BaseException:
        memory.release(placement.fresh)
        raise
    memory.commit(placement)
    return Materialized(
        segments=concatenate([segments[delta == 0], placement.segments]),
        fresh=placement.fresh,
        moved=len(positions),
    )


def move_slots(memory: Memory, source: Int32, target: Int32, delta: Int32) -> None:
    """Copies slots, keys rotated by `delta`, i32[n] each, in steps that bound the temporaries."""
    refuse_bound(memory, "copying KV between slots")
    drop = memory.pool.num_slots

    def move(pages: Pages, moves: Moves) -> tuple[Pages, None]:
        every = (moves,) * len(memory.config.groups)
        return relocate(pages, every, config=memory.config, backend=memory.backend), None

    for start in range(0, len(source), MOVE_SLOTS):
        part = slice(start, start + MOVE_SLOTS)
        count = len(source[part])
        padded = np.zeros((3, bucket(count, 64)), np.int32)
        padded[1] = drop
        padded[:, :count] = source[part], target[part], delta[part]
        memory.run(move, Moves(source=padded[0], target=padded[1], delta=padded[2]))
    memory.wait(memory.pages)


def must_materialize(memory: Memory, segments: Int32, *, form: str, max_deltas: int) -> bool:
    """Whether moved keys are to be copied: asked for, more deltas than a table holds, or too scattered."""
    delta = delta_of(memory.pool, segments, rotate=True)
    moving = segments[delta != 0]
    if not len(moving):
        return False
    distinct = len(np.unique(delta[delta != 0]))
    # Rows that a copy would take: whole pages, from each run of neighbouring positions on.
    begins = np.flatnonzero(np.append(True, starts(moving)[1:] != ends(moving)[:-1]))
    tokens = np.add.reduceat(moving[:, HI] - moving[:, LO], begins)
    size = memory.pool.page_size
    gathered = int((-(-tokens // size)).sum())
    scattered = len(moving) > SCATTERED * gathered + BLOCK_SLOTS // size
    return form != "view" or distinct >= max_deltas or scattered
