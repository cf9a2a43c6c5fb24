"""Text and single-token words for workloads that ask questions."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.errors import ConfigError
from jaxkv.io.models import Model
from jaxkv.typing import Int32

# Everyday nouns and names; those that a tokenizer knows as one token behind a space are used.
_WORDS = """
apple bread candle river stone garden window silver horse winter summer paper bottle bridge castle doctor
engine father forest friend island jacket kitchen letter market mother mountain music number ocean orange
picture planet pocket queen rabbit school shadow ship sister snow spring street sugar table teacher temple
ticket tiger tower train valley village water weather wheel yellow zebra
"""


@dataclasses.dataclass(frozen=True)
class Speaker:
    """Turns templates into tokens for one model. Without a tokenizer, UTF-8 bytes are tokens."""

    model: Model

    def encode(self, text: str) -> Int32:
        """Tokens i32[n] of `text`."""
        if self.model.tokenizer is not None:
            return np.asarray(self.model.tokenizer.encode(text), np.int32)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def words(self, count: int) -> list[tuple[str, int]]:
        """`count` words, each with the one token that says it behind "… is".

        Raises:
          ConfigError: the vocabulary has fewer such words.
        """
        found = []
        for word in _WORDS.split() if self.model.tokenizer is not None else "abcdefghijklmnopqrstuvwxyz":
            ids = self.encode(f" {word}")
            stem = self.encode("The code is")
            whole = self.encode(f"The code is {word}")
            if self.model.tokenizer is None:
                found.append((word, int(ids[-1])))
            elif len(ids) == 1 and np.array_equal(whole, np.append(stem, ids)):
                found.append((word, int(ids[0])))
        if len(found) < count:
            raise ConfigError(
                f"model '{self.model.name}' has {len(found)} of the workload's words as single tokens, "
                f"expected at least {count}"
            )
        return found[:count] if count else found

    def question(self, text: str) -> Int32:
        """Tokens of a question whose next token is the answer's."""
        return self.encode(text if self.model.tokenizer is not None else text + " ")
