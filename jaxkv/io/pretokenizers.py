"""How text is cut before byte-pair merging, by the name GGUF files give it (`tokenizer.ggml.pre`).

A GGUF file stores only a name. Each row here is the pre-tokenizer of the model that the name stands
for; a name without a row is refused, because a wrong cut changes ids silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from tokenizers import Regex, normalizers, pre_tokenizers

from jaxkv.errors import FormatError, nearest

# The two published word patterns; both need a regular-expression engine with \p{..} classes.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen3.5: that of Qwen2, but marks that combine with a letter belong to its word.
_MARKS = (
    (_CL100K % 1).replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Patterns applied in order, each isolating its matches in what the earlier ones left."""

    patterns: tuple[str, ...]
    nfc: bool = False  # Unicode normalization form C first
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say


_DIGITS = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer(patterns=(_CL100K % 3,), ignore_merges=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer(
            patterns=(
                r"[\p{P}\$\+<=>\^~\|]+",
                _GPT2.rsplit("|", 1)[0],
                r"\p{N}+",
                r"[0-9][0-9][0-9]",
            )
        ),
        "gpt-2": PreTokenizer(patterns=(_GPT2,)),
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": PreTokenizer(patterns=(_CL100K % 1,), nfc=True),
        "qwen35": PreTokenizer(patterns=(_MARKS,), nfc=True),
    }
)


def pre_tokenizer(
    name: str, where: str
) -> tuple[normalizers.Normalizer | None, pre_tokenizers.PreTokenizer, bool]:
    """Builds (normalizer, pre-tokenizer, ignore_merges) for `name`; unknown is a `FormatError`."""
    row = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if row is None:
        known = list(PRE_TOKENIZERS)
        raise FormatError(
            f"{where}: tokenizer.ggml.pre is {name!r}, expected one of {', '.join(known)}"
            f"{nearest(str(name), known)}"
        )
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in row.patterns]
    steps = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return normalizers.NFC() if row.nfc else None, pre_tokenizers.Sequence(steps), row.ignore_merges
