"""drift: many consecutive edits that move the same span, there and back by varying distances.

Text is inserted in front of the span and deleted again, so the context stays about as long as it
was. With several places the edits take turns at them, and each part comes to stand at a distance of
its own: past the engine's `max_deltas` a view is materialized. KL and the error of K against its value
at birth are measured after 1, 2, 4, … edits.
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
            states = _states(text[:context], tokens, max(config.moves), config.places, rng)
            if bos is not None:
                states = [
                    (np.insert(state, 0, bos).astype(np.int32), tuple(s + 1 for s in seams))
                    for state, seams in states
                ]
            result += [
                _case(config, states[: moves + 1], text[context:], context, document)
                for moves in config.moves
            ]
    return result


State = tuple[Int32, tuple[int, ...]]  # tokens, and where the text goes on behind each piece


def _states(text: Int32, tokens: Int32, moves: int, places: int, rng: np.random.Generator) -> list[State]:
    """The text before any edit and after each: a piece comes in front of a span, or goes again.

    The first quarter is never touched; places are spread evenly over the rest and take turns, so that
    spans come to stand at as many distances as there are places.
    """
    head = len(text) // 4
    parts = np.split(text, [head + i * (len(text) - head) // places for i in range(places)])
    pieces = [text[:0]] * places
    states: list[State] = [(text.astype(np.int32), ())]
    for number in range(moves):
        turn, place = divmod(number, places)
        piece = pieces[place]
        if len(piece) and turn % 2:
            piece = piece[: int(rng.integers(0, len(piece)))]
        else:
            start = int(rng.integers(0, len(tokens) - LONGEST))
            added = tokens[start : start + int(rng.integers(1, LONGEST - len(piece) + 1))]
            piece = np.concatenate([piece, added])[:LONGEST]
        pieces[place] = piece
        ends = np.cumsum([len(p) + len(q) for p, q in zip(parts, pieces, strict=False)])
        joined = [x for pair in zip(parts, pieces, strict=False) for x in pair]
        states.append((np.concatenate([*joined, parts[-1]]).astype(np.int32), tuple(ends.tolist())))
    return states


def _case(config: ExperimentConfig, states: list[State], rest: Int32, context: int, document: int) -> Case:
    continuation = rest[: config.continuation].astype(np.int32)
    moves = len(states) - 1
    measured = {2**power for power in range(moves.bit_length())} | {moves}
    turns = tuple(
        Turn(new=state, continuation=continuation if number in measured else continuation[:0])
        for number, (state, _) in enumerate(states[1:-1], 1)
    )
    scattered = f"-p{config.places}" if config.places > 1 else ""
    return Case(
        id=f"drift-{moves}{scattered}-c{context}-d{document}",
        edit=f"{moves} moves",
        position="25%",
        size=moves,
        context=context,
        document=document,
        old=states[0][0],
        new=states[-1][0],
        continuation=continuation,
        seams=states[-1][1],
        before=turns,
    )
