"""Going on behind a sequence: the compiled decode loop, and looks ahead that keep nothing."""

from __future__ import annotations

import numpy as np

from jaxkv.cache.sequence import Sequence, clip, frozen
from jaxkv.carry import Carry
from jaxkv.checks import check_length
from jaxkv.core import EngineCore
from jaxkv.execute import Computed, compute, extended
from jaxkv.generation import Decoded, Sampling, decode_batch
from jaxkv.results import Generation
from jaxkv.schedule import Placement
from jaxkv.typing import Int32


class Continuing(EngineCore):
    """The part of `Engine` that decodes and scores."""

    def _decode(
        self, sequences: list[Sequence], limits: list[int], samplings: list[Sampling], *, publish: bool
    ) -> list[Generation]:
        """Continues live sequences, each by at most its limit, in one compiled loop."""
        placements: list[Placement] = []
        written: list[int] = []  # state slots
        claimed: set[int] = set()
        try:
            for sequence, limit in zip(sequences, limits, strict=True):
                positions = np.arange(limit, dtype=np.int32) + len(sequence)
                placements.append(self._memory.place(sequence.segments, positions, claimed))
            if self._memory.states is not None:
                written.extend(self._memory.new_state() for _ in sequences)
                self._memory.states.begins |= dict(zip(written, map(len, sequences), strict=True))
            decoded = decode_batch(
                self._memory,
                self._params,
                sequences,
                placements,
                limits=limits,
                samplings=samplings,
                max_deltas=self.max_deltas,
                written=written or None,
            )
            states: list[int | None] = [*written] or [None] * len(sequences)
            rows = zip(sequences, placements, decoded, states, strict=True)
            done = [self._finish(*row) for row in rows]
        finally:
            for placement in placements:
                self._memory.release(placement.fresh)
            self._memory.release_states(written)
        if publish:
            for generation in done:
                self._publish(generation.sequence)
        return done

    def _peek(self, sequence: Sequence, tokens: Int32) -> Computed:
        """Runs tokens behind a sequence without keeping what they wrote.

        Always with all logits and attention outputs: one compiled step serves every question.
        """
        self._require_live(sequence)
        check_length(len(sequence) + len(tokens), self.config)
        done = compute(
            self._memory,
            self._params,
            segments=sequence.segments,
            attended=sequence.table_segments,
            tokens=tokens,
            positions=np.arange(len(tokens), dtype=np.int32) + len(sequence),
            rotate=sequence.rotate,
            max_deltas=self.max_deltas,
            chunk_size=self.chunk_size,
            carry=self._carry(sequence, len(tokens)),
            logits="all",
            capture=True,
        )
        self._memory.release(done.placement.fresh)
        self._memory.release_states(slot for _, slot in done.states)
        self._shapes |= done.shapes
        return done

    def _carry(self, sequence: Sequence, added: int) -> Carry | None:
        """Recurrent layers go on from a sequence's own state."""
        if sequence.state is None:
            return None
        return Carry(sequence.state, len(sequence), (len(sequence) + added,))

    def _finish(
        self, source: Sequence, placement: Placement, decoded: Decoded, state: int | None
    ) -> Generation:
        """Hands out a generation; slots that were reserved and not written go back."""
        end = len(source) + len(decoded.tokens)
        written = Placement.of(clip(placement.segments, 0, end))
        self._memory.commit(written)
        copies = source.copies
        sequence = self._memory.adopt(
            lambda id: Sequence(
                id=id,
                tokens=frozen(np.concatenate([source.tokens, decoded.tokens])),
                segments=extended(source.segments, written),
                copies=None if copies is None else extended(copies, written),
                provenance=source.continued(end),
                contract=source.contract,
                grid_length=source.grid_length,
                priority=source.priority,
                rotate=source.rotate,
                sight=source.sight,
                logits=decoded.logits,
                state=state if len(decoded.tokens) else source.state,
            ),
            self._memory.places.get(source.id),
        )
        self._counters["generated"] += len(decoded.tokens)
        return Generation(
            tokens=decoded.tokens,
            text=self._text(decoded.tokens),
            sequence=sequence,
            finish_reason="stop" if decoded.stopped else "length",
        )

    def _text(self, tokens: Int32) -> str | None:
        tokenizer = self.model.tokenizer
        # A model's vocabulary may be padded beyond its tokenizer's.
        return tokenizer.decode(tokens[tokens < tokenizer.vocab_size]) if tokenizer else None
