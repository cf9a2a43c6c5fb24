"""Compiling ahead: every step that prompts and answers up to some length will take, run once on padding."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxkv.cache.table import (
    PageTable,
    StateInput,
    StepInput,
    block_entries,
    bucket,
    empty_table,
    table_entries,
)
from jaxkv.checks import check_count, check_length
from jaxkv.continuing import Continuing
from jaxkv.core import interruptible
from jaxkv.generation import LOOP_STEPS, copied_blocks, cut, run_loop
from jaxkv.model.sampling import SamplingInput
from jaxkv.model.transformer import StepOutput
from jaxkv.schedule import for_shape, step_input, step_shapes
from jaxkv.steps import DecodeInput, Pages, run_step
from jaxkv.typing import Array
from jaxkv.windows import empty_groups


class Warming(Continuing):
    """The part of `Engine` that is called before the first request."""

    @interruptible
    def warm_up(self, *, tokens: int, batch: int = 1, moved: bool = False) -> int:
        """Compiles ahead, so that no request waits for it: call it before serving.

        Every step runs once on padding: no page is written, no state kept, nothing published. Together with
        `jaxkv.enable_compilation_cache` a second process finds the programs on disk.

        Args:
          tokens: of the longest sequence to come, its answer included.
          batch: sequences that are decoded together, at most.
          moved: also whole chunks over keys that stand elsewhere than they were born: what an edit of a
            long text takes under a policy that relocates. Small steps serve both.

        Returns:
          Programs that this engine ran for the first time. On CPU, where decode loops copy their KV, there
          is one for every width of the copy, so a long `tokens` takes minutes.

        Raises:
          ConfigError, CapacityError: `batch` is not positive, or `tokens` more than the model's positions.
        """
        check_length(check_count("tokens", tokens), self.config)
        batch = bucket(check_count("batch", batch))
        self._memory.begin()
        before = len(self._shapes)
        page_size = self._memory.pool.page_size
        blocks = -(-tokens // (page_size * block_entries(page_size)))
        widest = table_entries(blocks, page_size)
        entries = [table_entries(1, page_size)]
        while entries[-1] < widest:
            entries.append(2 * entries[-1])
        logits = None
        for width in entries:
            for shape in step_shapes(self.chunk_size):
                for deltas in (1, self.max_deltas) if moved else (1,):
                    logits = self._warm_step(shape, width, deltas)
        assert logits is not None
        rows = 1
        while rows <= batch:
            for width, used in self._loops(entries, blocks):
                self._warm_loop(rows, width, used, logits)
            rows *= 2
        return len(self._shapes) - before

    def _table(self, batch: int, entries: int, shape: int, deltas: int) -> PageTable:
        pool = self._memory.pool
        table = empty_table(batch, entries, num_pages=pool.num_pages, page_size=pool.page_size, deltas=deltas)
        return for_shape(table, shape, self.max_deltas)

    def _warm_step(self, shape: int, entries: int, deltas: int) -> Array:
        """Runs a step without a valid token; returns logits f32[V] of nothing."""
        memory = self._memory
        table = self._table(1, entries, shape, deltas)
        none = np.zeros(0, np.int32)
        states = None if memory.states is None else (memory.states.none, memory.states.none, True)
        step = step_input(none, none, none, shape, table, drop=memory.pool.num_slots, states=states)
        shared = step.groups[0]
        step = step.replace(groups=empty_groups(memory, shared.slots, shared.table))  # type: ignore[attr-defined]

        def one(pages: Pages, step: StepInput) -> tuple[Pages, StepOutput]:
            out = run_step(self._params, pages, step, config=memory.config, backend=memory.backend)
            return out.pages, out.replace(pages=())  # type: ignore[attr-defined]

        out = memory.run(one, step)
        memory.wait(out.logits)
        self._shapes.add(("step", shape, *table.page.shape, table.deltas.shape[1], "last", False))
        logits: Array = out.logits[0]
        return logits

    def _loops(self, entries: list[int], blocks: int) -> Iterator[tuple[int, int]]:
        """Entries of a decode loop's table and the blocks that it uses, each once per program."""
        if not self._memory.backend.copies_kv:
            yield from ((width, 1) for width in entries)
            return
        block = block_entries(self._memory.pool.page_size)
        for used in sorted({copied_blocks(n) for n in range(1, blocks + 1)}):
            yield next((width for width in entries if width >= used * block), entries[-1]), used

    def _warm_loop(self, rows: int, entries: int, used: int, logits: Array) -> None:
        """Runs a decode loop in which no row may draw a token."""
        memory = self._memory
        slots = np.full((rows, LOOP_STEPS), memory.pool.num_slots, np.int32)
        groups = empty_groups(memory, slots, self._table(rows, entries, 1, 1))
        zeros = np.zeros(rows, np.int32)
        states = None
        if memory.states is not None:
            none = np.full(rows, memory.states.none, np.int32)
            states = StateInput(read=none, write=none, fresh=np.ones(rows, bool))
        inputs = DecodeInput(
            logits=jnp.stack([logits] * rows),
            positions=zeros,
            limits=zeros,
            stop=np.full((rows, bucket(len(self.end_tokens), 4)), -1, np.int32),
            slots=tuple(group.slots for group in groups),
            tables=tuple(group.table for group in groups),
            sampling=SamplingInput(
                temperature=np.zeros(rows, np.float32),
                top_k=zeros,
                top_p=np.ones(rows, np.float32),
                seed=np.zeros(rows, np.uint32),
            ),
            states=states,
        )
        most = [group.table.delta_index.shape[1] for group in groups]
        copied = None
        if memory.backend.copies_kv:
            copied = cut(memory, inputs.tables, [min(used, blocks) for blocks in most])
        out = run_loop(memory, self._params, inputs, copied)
        self._shapes.add(("loop", rows, entries, used if copied is not None else 0))
        for row in range(rows):
            out.logits[row].block_until_ready()  # how a generation's logits are taken is a program too
