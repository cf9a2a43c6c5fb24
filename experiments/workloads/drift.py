"""drift: many consecutive edits that move the same span, there and back by varying distances.

Text is inserted in front of the span and deleted again, so the context stays about as long as it
was. KL and the error of K against its value at birth are measured after 1, 2, 4, … edits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads.case import Case, Turn
from jaxkv.errors import ConfigError
from jaxkv.typing import Int32

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig

LONGEST = 48  # tokens of one inserted piece


def cases(config: ExperimentConfig, tokens: Int32, bos: int | None = None) -> list[Case]:
    """One case a document, context and number of moves."""
    result = []
    need = max(config.context) + config.continuation
    if len(tokens) < need * config.documents + LONGEST:
        raise ConfigError(
            f"config.corpus has {len(tokens)} tokens, expected at least {need * config.documents + LONGEST}"
        )
    for context in config.context:
        for document in range(config.documents):
            rng = np.random.default_rng([config.seed, context, document, 7])
            start = int(rng.integers(0, len(tokens) - context - config.continuation + 1))
            text = tokens[start : start + context + config.continuation]
            states = _states(text[:context], tokens, max(config.moves), rng)
            if bos is not None:
                states = [np.insert(state, 0, bos) for state in states]
            result += [
                _case(config, states[: moves + 1], text[context:], context, document)
                for moves in config.moves
            ]
    return result


def _states(text: Int32, tokens: Int32, moves: int, rng: np.random.Generator) -> list[Int32]:
    """The text before any edit and after each: a piece comes in front of the span, or goes again."""
    at = len(text) // 4
    head, span = text[:at], text[at:]
    states, piece = [text], np.zeros(0, np.int32)
    for number in range(moves):
        if len(piece) and number % 2:
            piece = piece[: int(rng.integers(0, len(piece)))]
        else:
            start = int(rng.integers(0, len(tokens) - LONGEST))
            added = tokens[start : start + int(rng.integers(1, LONGEST - len(piece) + 1))]
            piece = np.concatenate([piece, added])[:LONGEST]
        states.append(np.concatenate([head, piece, span]).astype(np.int32))
    return states


def _case(config: ExperimentConfig, states: list[Int32], rest: Int32, context: int, document: int) -> Case:
    continuation = rest[: config.continuation].astype(np.int32)
    moves = len(states) - 1
    measured = {2**power for power in range(moves.bit_length())} | {moves}
    turns = tuple(
        Turn(new=state, continuation=continuation if number in measured else continuation[:0])
        for number, state in enumerate(states[1:-1], 1)
    )
    span = context - context // 4
    return Case(
        id=f"drift-{moves}-c{context}-d{document}",
        edit=f"{moves} moves",
        position="25%",
        size=moves,
        context=context,
        document=document,
        old=states[0].astype(np.int32),
        new=states[-1],
        continuation=continuation,
        seams=(len(states[-1]) - span,),
        before=turns,
    )
