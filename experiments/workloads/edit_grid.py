"""edit_grid: edit type × position × size × context length, over real text.

A position is the share of the untouched text that stands before the edit, so every size fits at
every position: at 90% a tenth of what survives comes behind the edit. Inserted and replacing text
is real text from a part of the corpus that no context uses. The continuation is what truly follows
the context.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads.case import Case, position_label
from jaxkv.errors import ConfigError
from jaxkv.typing import Int32

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig

EDITS = ("append", "delete", "insert", "replace", "reorder", "strip")
STRIP_PIECE = 16  # tokens in each of the many deletions of a `strip`


def cases(config: ExperimentConfig, tokens: Int32, bos: int | None = None) -> list[Case]:
    """All cases, those with the same cached text next to each other."""
    result = []
    for context in config.context:
        texts, other = _deal(config, tokens, context)
        for document, text in enumerate(texts):
            for edit, position, size, dealt in _cells(config):
                if dealt == document:
                    result.append(_case(config, edit, position, size, context, document, text, other, bos))
    return result


def _cells(config: ExperimentConfig) -> list[tuple[str, float | None, int, int]]:
    """Cells (edit, position, size, document) of the grid that `thin` keeps.

    Neighbours differ in every axis, so thinning by as much as an axis is long loses none of its values;
    an edit keeps its first cell however thin the grid. Documents rotate over edit and position, so
    neither stands for one text.
    """
    cells: list[tuple[str, float | None, int, int]] = []
    for i, edit in enumerate(config.edits):
        # Appending has one place, the end.
        positions = (None,) if edit == "append" else config.positions
        mine = [
            (i + j + k, (edit, position, size, (i + j) % config.documents))
            for j, position in enumerate(positions)
            for k, size in enumerate(config.sizes)
        ]
        cells += [cell for number, cell in mine if number % config.thin == 0] or [mine[0][1]]
    return cells


def _deal(config: ExperimentConfig, tokens: Int32, context: int) -> tuple[list[Int32], Int32]:
    """A text for each document, from its own strip of the corpus, and a strip to borrow from."""
    need = context + max(config.sizes) + config.continuation
    strip = len(tokens) // (config.documents + 1)
    if strip < need:
        raise ConfigError(
            f"config.corpus has {len(tokens)} tokens, expected at least "
            f"{need * (config.documents + 1)} for {config.documents} documents of context {context}"
        )
    texts = []
    for document in range(config.documents):
        rng = np.random.default_rng([config.seed, context, document])
        start = document * strip + int(rng.integers(0, strip - need + 1))
        texts.append(tokens[start : start + need])
    return texts, tokens[config.documents * strip :]


def _case(
    config: ExperimentConfig,
    edit: str,
    position: float | None,
    size: int,
    context: int,
    document: int,
    text: Int32,
    other: Int32,
    bos: int | None,
) -> Case:
    label = "end" if position is None else position_label(position)
    name = f"{edit}-{label}-{size}-c{context}-d{document}"
    old, rest = text[:context], text[context:]
    seams: tuple[int, ...] = ()
    if edit == "append":
        new, rest = text[: context + size], text[context + size :]
    else:
        new, seams = _apply(edit, old, position or 0.0, size, _borrow(config, name, other, size))
    if bos is not None:
        old, new = np.insert(old, 0, bos), np.insert(new, 0, bos)
        seams = tuple(seam + 1 for seam in seams)
    return Case(
        id=name,
        edit=edit,
        position=label,
        size=size,
        context=context,
        document=document,
        old=old.astype(np.int32),
        new=new.astype(np.int32),
        continuation=rest[: config.continuation].astype(np.int32),
        seams=tuple(seam for seam in seams if seam < len(new)),
    )


def _apply(
    edit: str, old: Int32, position: float, size: int, borrowed: Int32
) -> tuple[Int32, tuple[int, ...]]:
    """New tokens and seams of one edit."""
    touched = {"insert": 0, "delete": size, "replace": size, "reorder": 2 * size, "strip": size}[edit]
    if touched >= len(old):
        raise ConfigError(
            f"config.sizes holds {size}, expected that {edit} touches fewer tokens than the "
            f"context has, {len(old)}"
        )
    at = round(position * (len(old) - touched))
    head, tail = old[:at], old[at + touched :]
    if edit == "delete":
        return np.concatenate([head, tail]), (at,)
    if edit in ("insert", "replace"):
        return np.concatenate([head, borrowed, tail]), (at + size,)
    if edit == "reorder":
        first, second = old[at : at + size], old[at + size : at + touched]
        return np.concatenate([head, second, first, tail]), (at, at + size, at + touched)
    return _strip(old, at, size)


def _strip(old: Int32, at: int, size: int) -> tuple[Int32, tuple[int, ...]]:
    """Deletes `size` tokens from `at` on, in pieces spread evenly over the rest of the context."""
    sizes = [STRIP_PIECE] * (size // STRIP_PIECE)
    if size % STRIP_PIECE:
        sizes.append(size % STRIP_PIECE)
    gap = (len(old) - at - size) / len(sizes)  # survivors behind each piece
    keep = np.ones(len(old), np.bool_)
    seams: list[int] = []
    removed = 0
    for number, piece in enumerate(sizes):
        start = at + int(number * gap) + removed
        keep[start : start + piece] = False
        seams.append(start - removed)
        removed += piece
    return old[keep], tuple(dict.fromkeys(seams))


def _borrow(config: ExperimentConfig, name: str, other: Int32, size: int) -> Int32:
    """`size` tokens of text that no context holds; which ones depends on seed and case id only."""
    digest = hashlib.sha256(f"{config.seed}:{name}".encode()).digest()
    start = int.from_bytes(digest[:8], "little") % (len(other) - size + 1)
    return other[start : start + size]
