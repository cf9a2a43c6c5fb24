"""agent_loop: a conversation that grows turn by turn while its agent edits the context.

Each turn appends an answer and a tool's result and applies one kind of edit: clear old tool results,
replace a file by its new version, strip reasoning, drop the oldest exchange, or reorder the documents.
The answer that truly follows is the continuation. Bodies are strips of the corpus (`stdlib` gives
source files), so any model can be asked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from experiments.workloads.case import Case, Turn
from experiments.workloads.words import Speaker
from jaxkv.errors import ConfigError
from jaxkv.typing import Int32

if TYPE_CHECKING:
    from collections.abc import Callable

    from experiments.config import ExperimentConfig
    from jaxkv.io.models import Model

AGENT_EDITS = ("clear_tools", "replace_file", "strip_reasoning", "drop_oldest", "reorder_documents")
KEEP_TOOLS = 2  # latest tool results that stay when old ones are cleared
REASONING = 48  # tokens of one reasoning block
SYSTEM = (
    "You are a programming assistant. You may call the tool read_file.\n"
    '{"name": "read_file", "parameters": {"path": {"type": "string"}}}\n'
)


@dataclasses.dataclass(frozen=True, eq=False)
class Message:
    """A role and what it said."""

    role: str
    body: Int32


def cases(
    config: ExperimentConfig, tokens: Int32, bos: int | None = None, model: Model | None = None
) -> list[Case]:
    """A conversation for each kind of edit, document and size of its messages."""
    assert model is not None, "this workload writes messages, so it needs the model's tokenizer"
    speaker = Speaker(model)
    edits = [edit for edit in config.edits if edit in AGENT_EDITS] or list(AGENT_EDITS)
    return [
        _case(config, speaker, tokens, bos, edit, document, size)
        for document in range(config.documents)
        for edit in edits
        for size in config.sizes
    ]


def _case(
    config: ExperimentConfig,
    speaker: Speaker,
    tokens: Int32,
    bos: int | None,
    edit: str,
    document: int,
    size: int,
) -> Case:
    rng = np.random.default_rng([config.seed, document, size, 11])
    need = (config.turns + 2) * (size + REASONING + 64) + config.continuation
    if len(tokens) < need:
        raise ConfigError(f"config.corpus has {len(tokens)} tokens, expected at least {need}")
    at = int(rng.integers(0, len(tokens) - need + 1))

    def strip(count: int) -> Int32:
        nonlocal at
        at += count
        return tokens[at - count : at]

    messages = [Message("system", speaker.encode(SYSTEM)), Message("user", strip(32))]
    messages += [Message("tool", strip(size)), Message("tool", strip(size))]
    states, continuations = [_render(messages, speaker, bos)], []
    for turn in range(config.turns):
        answer = strip(max(config.continuation, 32))
        messages += [Message("reasoning", strip(REASONING)), Message("assistant", answer)]
        messages += [Message("user", strip(32)), Message("tool", strip(size))]
        messages = _EDITS[edit](messages, turn, rng, speaker)
        states.append(_render(messages, speaker, bos, ask=True))
        continuations.append(tokens[at : at + config.continuation])
    turns = tuple(
        Turn(new=state, continuation=text)
        for state, text in zip(states[1:-1], continuations[:-1], strict=True)
    )
    return Case(
        id=f"agent-{edit}-{size}-t{config.turns}-d{document}",
        edit=edit,
        position="turns",
        size=size,
        context=len(states[0]),
        document=document,
        old=states[0],
        new=states[-1],
        continuation=continuations[-1].astype(np.int32),
        seams=(),
        before=turns,
    )


def _render(messages: list[Message], speaker: Speaker, bos: int | None, *, ask: bool = False) -> Int32:
    parts = [np.array([bos] if bos is not None else [], np.int32)]
    for message in messages:
        parts += [speaker.encode(f"<|{message.role}|>\n"), message.body, speaker.encode("\n")]
    if ask:
        parts.append(speaker.encode("<|assistant|>\n"))
    return np.concatenate(parts).astype(np.int32)


def _clear_tools(messages: list[Message], _turn: int, _rng: object, speaker: Speaker) -> list[Message]:
    tools = [i for i, m in enumerate(messages) if m.role == "tool"]
    cleared = set(tools[:-KEEP_TOOLS])
    gone = speaker.encode("[cleared]")
    return [Message("tool", gone) if i in cleared else m for i, m in enumerate(messages)]


def _replace_file(
    messages: list[Message], _turn: int, rng: np.random.Generator, _speaker: Speaker
) -> list[Message]:
    """The first file read is replaced by a version of which a tenth, in one place, differs."""
    first = next(i for i, m in enumerate(messages) if m.role == "tool")
    body = messages[first].body.copy()
    count = max(len(body) // 10, 1)
    start = int(rng.integers(0, len(body) - count + 1))
    body[start : start + count] = rng.permutation(body[start : start + count])
    return [Message("tool", body) if i == first else m for i, m in enumerate(messages)]


def _strip_reasoning(messages: list[Message], _turn: int, _rng: object, _speaker: Speaker) -> list[Message]:
    last = max(i for i, m in enumerate(messages) if m.role == "reasoning")
    return [m for i, m in enumerate(messages) if m.role != "reasoning" or i == last]


def _drop_oldest(messages: list[Message], turn: int, _rng: object, _speaker: Speaker) -> list[Message]:
    """Everything between the system prompt and the second user message goes."""
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    return [messages[0], *messages[users[1] :]] if turn and len(users) > 1 else messages


def _reorder_documents(messages: list[Message], _turn: int, _rng: object, _speaker: Speaker) -> list[Message]:
    """The two oldest tool results change places."""
    first, second = [i for i, m in enumerate(messages) if m.role == "tool"][:2]
    out = list(messages)
    out[first], out[second] = messages[second], messages[first]
    return out


_EDITS: dict[str, Callable[..., list[Message]]] = {
    "clear_tools": _clear_tools,
    "replace_file": _replace_file,
    "strip_reasoning": _strip_reasoning,
    "drop_oldest": _drop_oldest,
    "reorder_documents": _reorder_documents,
}
