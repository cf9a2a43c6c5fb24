"""Real text that every Python install carries, or a file. Each corpus has a digest."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from jaxkv.errors import ConfigError, TokenError
from jaxkv.io.models import Model
from jaxkv.typing import Int32

_STDLIB_BYTES = 2_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text and its identity."""

    name: str
    text: str
    digest: str  # SHA-256 of the UTF-8 bytes, hex

    @classmethod
    def of(cls, name: str, text: str) -> Corpus:
        """A corpus of `text`, which must not be blank."""
        if not text.strip():
            raise ConfigError(f"config.corpus '{name}' holds no text, expected some thousand words")
        return cls(name=name, text=text, digest=hashlib.sha256(text.encode()).hexdigest())


def load_corpus(name: str) -> Corpus:
    """Loads "topics" (Python's reference prose), "stdlib" (its sources) or a UTF-8 text file.

    Both built-in corpora differ between Python versions: compare digests, not names.

    Raises:
      ConfigError: no such file, not UTF-8, or blank.
    """
    if name == "topics":
        from pydoc_data.topics import topics

        return Corpus.of(name, "\n\n".join(topics[key] for key in sorted(topics)))
    if name == "stdlib":
        return Corpus.of(name, _stdlib())
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"config.corpus is '{name}', expected 'topics', 'stdlib' or the path of a text file"
        )
    try:
        return Corpus.of(path.name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"config.corpus '{name}' is not UTF-8 at byte {error.start}") from error


def encode(corpus: Corpus, model: Model) -> Int32:
    """Tokens i32[n] of the whole corpus. A model without a tokenizer reads UTF-8 bytes as tokens.

    Raises:
      TokenError: the model has no tokenizer and a vocabulary below 256.
    """
    if model.tokenizer is not None:
        return np.asarray(model.tokenizer.encode(corpus.text), np.int32)
    if model.config.vocab_size < 256:
        raise TokenError(
            f"model '{model.name}' has no tokenizer and a vocabulary of {model.config.vocab_size}, "
            "expected at least 256 to read bytes as tokens"
        )
    return np.frombuffer(corpus.text.encode(), np.uint8).astype(np.int32)


def _stdlib() -> str:
    """Top-level modules of the standard library in name order, up to about two megabytes."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        parts.append(text)
        size += len(text)
        if size > _STDLIB_BYTES:
            break
    return "\n\n".join(parts)
