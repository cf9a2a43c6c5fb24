"""What the serving loop may ask of its engine, which gives it for the length of one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.domain import Domain
from jaxkv.cache.sequence import EMPTY_SEGMENTS, PAGE, Sequence
from jaxkv.generation import Sampling
from jaxkv.memory import Memory
from jaxkv.results import Generation, StepResult
from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """An engine's calls and memory. Not kept: the loop must not keep its engine alive."""

    memory: Memory
    contract: Callable[[str | Domain], CacheContract]  # of a domain
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
        return self.live(sequence) and sequence.contract == self.contract(sequence.contract.domain)

    def cached(self, tokens: Int32, domain: str | Domain) -> int:
        """Leading tokens of a prompt that `prefill` would find now."""
        return self._peek(tokens, domain)[0]

    def room(self, tokens: Int32, domain: str | Domain, released: Iterable[Int32]) -> tuple[int, int]:
        """Cached tokens of a prompt, and pages that could be had beside them.

        Args:
          tokens: i32[n]; none asks for the pages alone.
          domain: whose prompt.
          released: pages of sequences that would be released first, one array each.
        """
        self.memory.begin()
        matched, pages = self._peek(tokens, domain)
        return matched, self.memory.index.obtainable(released, kept=pages)

    def _peek(self, tokens: Int32, domain: str | Domain) -> tuple[int, Int32]:
        if not self.reuse or not len(tokens):
            return 0, EMPTY_SEGMENTS[:, PAGE]
        limit = len(tokens) if self.grid == 1 else len(tokens) - 1
        return self.memory.peek(self.contract(domain), tokens, limit=limit)
