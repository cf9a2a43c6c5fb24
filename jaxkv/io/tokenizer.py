"""Tokenizers: one small protocol over byte-pair models (`tokenizers`) and SentencePiece.

Each tokenizer is built from a *definition*, plain JSON-serializable data that says everything about
it. The definition is what a checkpoint stores and what `digest` hashes, so a converted model needs
no other file and two tokenizers with the same digest give the same ids.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import sentencepiece
import tokenizers

from jaxkv.errors import FormatError, TokenError
from jaxkv.io.chat import render_chat
from jaxkv.io.pretokenizers import pre_tokenizer
from jaxkv.io.sentencepiece_model import sentencepiece_model
from jaxkv.typing import Int32

# token types of GGUF, the same numbers as SentencePiece's
_CONTROL, _USER_DEFINED = 3, 4


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
      vocab_size: ids are 0..vocab_size-1.
      bos_id, eos_ids: beginning and end of sequence, as the model's file names them.
      chat_template: Jinja source, or None where the model has none.
      digest: SHA-256 of the definition (without the chat template), hex.
      template_digest: SHA-256 of the chat template, of nothing where there is none, hex.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None
    digest: str
    template_digest: str

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> Int32:
        """Returns i32[n].

        `parse_special=False` takes "<|im_end|>" in the text as plain characters: use it for text
        that users wrote.
        """
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Returns the text of `ids`; an id outside the vocabulary is a `TokenError`."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Returns the conversation as text, by the model's own template; encode it without BOS."""
        ...

    def definition(self) -> dict[str, Any]:
        """Returns everything `tokenizer_from_definition` needs, JSON-serializable."""
        ...


class _Base:
    """What all tokenizers share: special ids, digests, chat."""

    def __init__(self, definition: dict[str, Any], where: str) -> None:
        self._definition, self.where = definition, where
        self.bos_id: int | None = definition["bos_id"]
        self.eos_ids: tuple[int, ...] = tuple(definition["eos_ids"])
        self.chat_template: str | None = definition["chat_template"]
        core = {k: v for k, v in definition.items() if k != "chat_template"}
        self.digest = hashlib.sha256(_canonical(core)).hexdigest()
        self.template_digest = hashlib.sha256((self.chat_template or "").encode()).hexdigest()
        self.vocab_size = 0

    def definition(self) -> dict[str, Any]:
        """See `Tokenizer`."""
        return dict(self._definition)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """See `Tokenizer`."""
        if self.chat_template is None:
            raise TokenError(f"{self.where}: the model has no chat template, expected one")
        special = {name: text for name, text in self._named_tokens().items() if text is not None}
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables={**special, **variables},
        )

    def _named_tokens(self) -> dict[str, str | None]:
        eos = self.eos_ids[0] if self.eos_ids else None
        return {"bos_token": self._piece(self.bos_id), "eos_token": self._piece(eos)}

    def _piece(self, token: int | None) -> str | None:
        raise NotImplementedError

    def _check_special(self) -> None:
        for name, ids in (("bos", (self.bos_id,)), ("eos", self.eos_ids)):
            for i in ids:
                if i is not None and not 0 <= i < self.vocab_size:
                    raise FormatError(
                        f"{self.where}: {name} token id is {i}, expected under {self.vocab_size}"
                    )

    def _finish(self, ids: list[int], add_bos: bool) -> Int32:
        if add_bos:
            if self.bos_id is None:
                raise TokenError(f"{self.where}: add_bos is True, expected False: there is no BOS token")
            ids = [self.bos_id, *ids]
        return np.asarray(ids, np.int32)

    def _checked(self, ids: Iterable[int]) -> list[int]:
        array = np.asarray(list(ids) if not isinstance(ids, np.ndarray) else ids)
        if array.size == 0:
            return []
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise TokenError(
                f"token ids have shape {list(array.shape)} and dtype {array.dtype}, "
                "expected one row of integers"
            )
        bad = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if bad.size:
            raise TokenError(
                f"token id at index {bad[0]} is {array[bad[0]]}, expected 0 to {self.vocab_size - 1}"
            )
        result: list[int] = array.tolist()
        return result


class BytePairTokenizer(_Base):
    """A tokenizer of the `tokenizers` library: from a tokenizer.json or from GGUF's token lists."""

    def __init__(self, definition: dict[str, Any], where: str = "tokenizer") -> None:
        super().__init__(definition, where)
        self._tokenizer = self._build()
        # not the count of tokens: a tokenizer.json may leave ids out
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._check_special()

    def _build(self) -> tokenizers.Tokenizer:
        build = _from_json if self._definition["kind"] == "tokenizer.json" else _from_lists
        return build(self._definition, self.where)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A second instance: the library's switch is state that a call would leave behind."""
        tokenizer = self._build()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> Int32:
        """See `Tokenizer`."""
        tokenizer = self._tokenizer if parse_special else self._plain
        return self._finish(tokenizer.encode(text, add_special_tokens=False).ids, add_bos)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """See `Tokenizer`."""
        text: str = self._tokenizer.decode(self._checked(ids), skip_special_tokens=skip_special)
        return text

    def _piece(self, token: int | None) -> str | None:
        return None if token is None else self._tokenizer.id_to_token(token)


class SentencePieceTokenizer(_Base):
    """A SentencePiece model, from its file or rebuilt from the vocabulary that a GGUF carries."""

    def __init__(self, definition: dict[str, Any], where: str = "tokenizer") -> None:
        super().__init__(definition, where)
        try:
            model = base64.b64decode(definition["model"], validate=True)
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size = self._model.get_piece_size()
        except (RuntimeError, ValueError, TypeError) as error:
            raise FormatError(f"{where}: not a SentencePiece model") from error
        if self.vocab_size == 0:
            raise FormatError(f"{where}: the SentencePiece model has no pieces")
        self._check_special()
        self._control = {
            self._model.id_to_piece(i): i for i in range(self.vocab_size) if self._model.is_control(i)
        }
        longest = sorted(self._control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest))) if longest else None

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> Int32:
        """See `Tokenizer`; the text is cut at control tokens, which SentencePiece never parses."""
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text) if parse_special and self._pattern else ():
            if match.start() > start:
                ids += self._model.encode(text[start : match.start()])
            ids.append(self._control[match.group()])
            start = match.end()
        if start < len(text):
            ids += self._model.encode(text[start:])
        return self._finish(ids, add_bos)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """See `Tokenizer`."""
        parts: list[str] = []
        run: list[int] = []
        for i in self._checked(ids):
            if not self._model.is_control(i):
                run.append(i)
                continue
            parts += [self._model.decode(run)] if run else []
            parts += [] if skip_special else [self._model.id_to_piece(i)]
            run = []
        return "".join(parts + ([self._model.decode(run)] if run else []))

    def _piece(self, token: int | None) -> str | None:
        return None if token is None else self._model.id_to_piece(token)


def _from_json(definition: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(definition["json"])
    except Exception as error:  # the library raises bare Exception for malformed input
        raise FormatError(f"{where}: not a tokenizer.json that the tokenizers library reads") from error


def _from_lists(definition: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    tokens, types = definition["tokens"], definition["token_types"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in definition["merges"]]
    for pair in merges:
        if len(pair) != 2 or not all(p in vocab for p in (*pair, "".join(pair))):
            raise FormatError(f"{where}: merge {' '.join(pair)!r} is not of two tokens giving a third")
    normalizer, pre, ignore_merges = pre_tokenizer(definition["pre"], where)
    model = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for kind, add in (
        (_CONTROL, tokenizer.add_special_tokens),
        (_USER_DEFINED, tokenizer.add_tokens),
    ):
        texts = [t for t, k in zip(tokens, types, strict=True) if k == kind]
        add([tokenizers.AddedToken(t, normalized=False, special=kind == _CONTROL) for t in texts])
    return tokenizer


def tokenizer_from_definition(definition: dict[str, Any], where: str = "tokenizer") -> Tokenizer:
    """Rebuilds a tokenizer from `Tokenizer.definition`; a malformed one is a `FormatError`."""
    kinds: dict[Any, type[BytePairTokenizer] | type[SentencePieceTokenizer]] = {
        "tokenizer.json": BytePairTokenizer,
        "gguf.bpe": BytePairTokenizer,
        "sentencepiece": SentencePieceTokenizer,
    }
    kind = definition.get("kind")
    if kind not in kinds:
        raise FormatError(f"{where}: tokenizer kind is {kind!r}, expected one of {', '.join(kinds)}")
    try:
        return kinds[kind](definition, where)
    except KeyError as error:
        raise FormatError(f"{where}: tokenizer definition lacks {error.args[0]!r}") from error


def tokenizer_from_gguf(metadata: dict[str, Any], where: str = "gguf") -> Tokenizer | None:
    """Builds the tokenizer that GGUF metadata carries; None where it carries none.

    Raises:
      FormatError: an unknown tokenizer model or pre-tokenizer, or lists that do not fit together.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None or model == "none":
        return None
    if model not in ("gpt2", "llama"):
        raise FormatError(f"{where}: tokenizer.ggml.model is {model!r}, expected 'gpt2' or 'llama'")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise FormatError(f"{where}: tokenizer.ggml.token_type does not have {len(tokens)} entries")
    if len(set(tokens)) != len(tokens):
        raise FormatError(f"{where}: tokenizer.ggml.tokens has duplicates, expected distinct tokens")
    eos = [_special(metadata, kind, where) for kind in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    definition: dict[str, Any] = {
        "bos_id": _special(metadata, "bos", where),
        "eos_ids": list(dict.fromkeys(i for i in eos if i is not None)),
        "chat_template": template if isinstance(template, str) else None,
    }
    if model == "gpt2":
        definition |= {
            "kind": "gguf.bpe",
            "pre": metadata.get("tokenizer.ggml.pre", "default"),
            "tokens": tokens,
            "token_types": types,
            "merges": _strings(metadata, "tokenizer.ggml.merges", where),
        }
    else:
        proto = sentencepiece_model(metadata, tokens, types, where)
        definition |= {"kind": "sentencepiece", "model": base64.b64encode(proto).decode()}
    return tokenizer_from_definition(definition, where)


def tokenizer_from_file(
    path: str | Path,
    *,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    chat_template: str | None = None,
) -> Tokenizer:
    """Reads a `tokenizer.json`, or any other file as a SentencePiece model.

    Raises:
      FormatError: the file cannot be read or is of neither kind.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path.name}: cannot be read: {error.strerror or error}") from error
    definition: dict[str, Any] = {
        "bos_id": bos_id,
        "eos_ids": list(eos_ids),
        "chat_template": chat_template,
    }
    if path.suffix == ".json":
        try:
            definition |= {"kind": "tokenizer.json", "json": raw.decode()}
        except UnicodeDecodeError as error:
            raise FormatError(f"{path.name}: not valid UTF-8") from error
    else:
        definition |= {"kind": "sentencepiece", "model": base64.b64encode(raw).decode()}
    return tokenizer_from_definition(definition, path.name)


def _special(metadata: dict[str, Any], kind: str, where: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise FormatError(f"{where}: {key} is {value!r}, expected an integer")
    return value


def _strings(metadata: dict[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise FormatError(f"{where}: {key} is missing, expected a list of strings")
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
