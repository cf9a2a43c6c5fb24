"""The cases of a run: shapes from `pallas_kernels.shapes`, and page moves."""

from __future__ import annotations

import dataclasses

from experiments.kernels.config import KernelsConfig
from pallas_kernels import shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moves:
    """A relocation of whole pages; bytes are those read and those written."""

    name: str
    pages: int  # n
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all heads."""
        width = 2 if self.dtype == "bfloat16" else 4
        return self.kv_heads * self.page_size * 2 * self.head_dim * width

    @property
    def kv_bytes(self) -> int:
        """Bytes that must move: every page in and out."""
        return 2 * self.pages * self.page_bytes

    @property
    def flops(self) -> int:
        """Of the rotations: 6 for each pair of components of a key."""
        return self.pages * self.kv_heads * self.page_size * self.head_dim // 2 * 6


def attention_cases(config: KernelsConfig) -> list[shapes.Case]:
    """Decode shapes, then prefill shapes, those with more KV than `max_gib` left out."""
    size, deltas = config.page_size[0], config.deltas[0]
    at = {"batch": config.vary_batch, "context": config.vary_context}
    cases = []
    for heads in config.heads:
        common = {"heads": heads, "dtype": config.dtype}
        for batch in config.batch:
            cases += [
                shapes.benchmark_case(**common, batch=batch, context=context, page_size=size, deltas=deltas)
                for context in config.context
            ]
        cases.append(shapes.benchmark_case(**common, **at, page_size=size, deltas=deltas, ragged=True))
        cases += [shapes.benchmark_case(**common, **at, page_size=size, deltas=r) for r in config.deltas]
        cases += [shapes.benchmark_case(**common, **at, page_size=p, deltas=deltas) for p in config.page_size]
        one = {"batch": 1, "context": config.vary_context, "page_size": size}
        cases += [
            shapes.benchmark_case(**common, **one, length=length, deltas=r)
            for length in config.prefill
            for r in dict.fromkeys((deltas, config.deltas[-1]))
        ]
    unique = {case.name: case for case in cases}
    return [case for case in unique.values() if case.kv_bytes <= config.max_gib * 2**30]


def move_cases(config: KernelsConfig) -> list[Moves]:
    """Relocations of `moves` pages, for every kind of heads and page size."""
    cases = []
    for heads in config.heads:
        kv_heads, _, head_dim = shapes.HEADS[heads]
        for size in config.page_size:
            cases += [
                Moves(
                    name=f"{heads}-relocate-n{n}-p{size}-{config.dtype}",
                    pages=n,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    page_size=size,
                    dtype=config.dtype,
                )
                for n in config.moves
            ]
    return [case for case in cases if case.kv_bytes <= config.max_gib * 2**30]
