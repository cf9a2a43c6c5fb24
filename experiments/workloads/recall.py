"""recall and residue: does the answer know what changed, and does it know what it should not?

`recall`: a fact in the middle of a text gets another value. It is asked for directly, or through a
sentence that stands `distance` tokens behind it and depends on it without repeating it. `residue`: a
secret is deleted, and asked for all the same; a twin of each case had another secret, so that what an
answer tells of a past that its text does not show can be measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads.case import Case, Task
from experiments.workloads.words import Speaker
from jaxkv.errors import ConfigError
from jaxkv.typing import Int32

if TYPE_CHECKING:
    from experiments.config import ExperimentConfig
    from jaxkv.io.models import Model

CANDIDATES = 15
# A fact, a sentence that depends on it, and questions for either.
_FACTS = (
    (
        "\n\nThe secret word of the archive is {word}.\n\n",
        "\n\nThe guard opens the gate for whoever says the secret word of the archive.\n\n",
        "\n\nThe secret word of the archive is",
        "\n\nTo pass, the visitor tells the guard the secret word of the archive, which is",
    ),
    (
        "\n\nThe name of the ship is {word}.\n\n",
        "\n\nThe captain painted the name of the ship on its side.\n\n",
        "\n\nThe name of the ship is",
        "\n\nOn the side of the ship the captain painted its name, which is",
    ),
    (
        "\n\nThe password of the server is {word}.\n\n",
        "\n\nThe technician logs in with the password of the server.\n\n",
        "\n\nThe password of the server is",
        "\n\nThe technician types the password of the server, which is",
    ),
)


def cases(
    config: ExperimentConfig, tokens: Int32, bos: int | None = None, model: Model | None = None
) -> list[Case]:
    """Items × distances × ways to ask, each with texts and words of its own."""
    assert model is not None, "this workload asks questions, so it needs the model's tokenizer"
    speaker = Speaker(model)
    secret = config.workload == "residue"
    words = speaker.words(CANDIDATES)
    ways = ("residue",) if secret else ("direct", "derived")
    return [
        _case(config, speaker, words, tokens, bos, context, way, distance, item)
        for context in config.context
        for way in ways
        for distance in config.distances
        for item in range(config.num_items)
    ]


def _case(
    config: ExperimentConfig,
    speaker: Speaker,
    words: list[tuple[str, int]],
    tokens: Int32,
    bos: int | None,
    context: int,
    way: str,
    distance: int,
    item: int,
) -> Case:
    rng = np.random.default_rng([config.seed, context, distance, item, 5])
    fact, depends, direct, derived = _FACTS[item % len(_FACTS)]
    old_word, new_word, twin_word = (words[i] for i in rng.permutation(len(words))[:3])
    question = speaker.question(derived if way == "derived" else direct)
    link = speaker.encode(depends) if way == "derived" else np.zeros(0, np.int32)
    stated = [speaker.encode(fact.format(word=word)) for word, _ in (old_word, new_word, twin_word)]
    behind = distance if way == "derived" else max(distance, 1)
    room = context - len(stated[0]) - len(link) - len(question) - behind
    if room < 16:
        raise ConfigError(
            f"config.context holds {context}, expected at least {context + 16 - room} tokens for a "
            f"dependency distance of {distance}"
        )
    # Between what depends on the fact and the question stands more text; elsewhere distance is all of it.
    back = room - room // 2 if way == "derived" else 0
    front = room - back
    start = int(rng.integers(0, len(tokens) - context))
    text = tokens[start : start + context]
    head = text[:front] if bos is None else np.insert(text[:front], 0, bos)
    middle = text[front : front + behind]
    close = text[front + behind : front + behind + back]
    ending = np.concatenate([middle, link, close]).astype(np.int32)
    if way == "residue":
        old, twin = (np.concatenate([head, said, ending]) for said in (stated[0], stated[2]))
        new = np.concatenate([head, ending])
        answer, stale = old_word[1], None
        seams: tuple[int, ...] = (len(head),)
        size = len(stated[0])
    else:
        old, new, twin = (np.concatenate([head, said, ending]) for said in stated)
        answer, stale = new_word[1], old_word[1]
        seams = (len(head) + len(stated[1]),)
        size = 1
    return Case(
        id=f"{way}-{distance}-i{item}-c{context}",
        edit=way,
        position=f"distance {distance}",
        size=size,
        context=context,
        document=item,
        old=old.astype(np.int32),
        new=new.astype(np.int32),
        continuation=np.append(question, answer).astype(np.int32),
        seams=seams,
        task=Task(
            kind="residue" if way == "residue" else "recall",
            answer=answer,
            stale=stale,
            candidates=tuple(token for _, token in words),
            distance=distance,
        ),
        twin=twin.astype(np.int32) if way == "residue" else None,
    )
