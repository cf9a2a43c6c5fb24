"""What the serving loop may ask of its engine, which gives it for the length of one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.sequence import Sequence
from jaxkv.generation import Sampling
from jaxkv.memory import Memory
from jaxkv.results import Generation, StepResult
from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """An engine's calls and memory. Not kept: the loop must not keep its engine alive."""

    memory: Memory
    contract: Callable[[str], CacheContract]  # of a domain
    grid: int  # tokens that hits end on a multiple of
    reuse: bool  # whether there is a prefix cache
    prefill: Callable[..., StepResult]  # (tokens, domain=, reuse=)
    extend: Callable[[Sequence, Int32], StepResult]
    decode: Callable[[list[Sequence], list[int], list[Sampling]], list[Generation]]  # publishes nothing
    publish: Callable[[Sequence], None]
    release: Callable[[Sequence], None]
    text: Callable[[Int32], str | None]

    def live(self, sequence: Sequence) -> bool:
        """Whether the engine still holds its pages: a step that fails may let go of all."""
        self.memory.begin()
        return sequence.id in self.memory.live

    def current(self, sequence: Sequence) -> bool:
        """Whether it is live and made under today's contract: weights may have been replaced."""
        return self.live(sequence) and sequence.contract == self.contract(sequence.contract.tenant)

    def cached(self, tokens: Int32, domain: str) -> int:
        """Leading tokens of a prompt that `prefill` would find now. Pins and touches nothing."""
        if not self.reuse:
            return 0
        return self.memory.index.peek(self.contract(domain).digest(), tokens, limit=self._limit(tokens))

    def room(self, tokens: Int32, domain: str, released: Iterable[Int32]) -> tuple[int, int]:
        """Cached tokens of a prompt, and pages that could be had beside them.

        Args:
          tokens: i32[n]; none asks for the pages alone.
          domain: whose prompt.
          released: pages of sequences that would be released first, one array each.
        """
        memory = self.memory
        memory.begin()
        if not self.reuse or not len(tokens):
            return 0, memory.index.obtainable(released)
        root = self.contract(domain).digest()
        match = memory.index.match(root, tokens, limit=self._limit(tokens))
        try:  # the match is pinned, so what it would use does not count
            return match.length, memory.index.obtainable(released)
        finally:
            memory.release(match.pages)

    def _limit(self, tokens: Int32) -> int:
        return len(tokens) if self.grid == 1 else len(tokens) - 1
