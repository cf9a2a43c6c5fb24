"""Model families as data: what a file calls things, and which of its settings change the maths.

One `Family` row tells how Hugging Face and GGUF files of that family name hyperparameters and
tensors. A setting that would change the decoder's maths in a way we do not implement is refused by
name; nothing is ignored silently except what a row lists as harmless. A new family is a new row.

Host only: no jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import FormatError
from jaxkv.model.families.base import Family, part_names, part_shape
from jaxkv.model.families.common import HF_COMMON
from jaxkv.model.families.gemma import GEMMA3
from jaxkv.model.families.llama import LLAMA
from jaxkv.model.families.qwen import QWEN2, QWEN3
from jaxkv.model.families.qwen3_5 import QWEN3_5

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN2, QWEN3, GEMMA3, QWEN3_5)
_EXPERTS = "its layers choose among experts, which is not supported"
REFUSED = {  # by Hugging Face's names and by GGUF's
    "qwen3_5_moe": _EXPERTS,
    "qwen3_5_moe_text": _EXPERTS,
    "qwen3_next": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen35moe": _EXPERTS,
    "qwen3next": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "qwen2moe": _EXPERTS,
}

__all__ = [
    "FAMILIES",
    "HF_COMMON",
    "Family",
    "family_from_gguf",
    "family_from_hf",
    "part_names",
    "part_shape",
]


def family_from_hf(data: Mapping[str, Any], where: str) -> Family:
    """Finds the family of a Hugging Face config; raises `FormatError` naming what is supported."""
    kind, names = data.get("model_type"), data.get("architectures")
    for family in FAMILIES:
        for model_type, architecture in family.hf_names:
            if kind == model_type and names in (None, [], [architecture]):
                return family
    if kind in REFUSED:
        raise FormatError(f"{where}: model_type is {kind!r}: {REFUSED[kind]}, expected a dense model")
    known = ", ".join(f"{name} ({kind})" for f in FAMILIES for kind, name in f.hf_names)
    raise FormatError(
        f"{where}: model_type is {kind!r} with architectures {names!r}, expected one of {known}"
    )


def family_from_gguf(metadata: Mapping[str, Any], where: str) -> Family:
    """Finds the family of GGUF metadata; raises `FormatError` naming what is supported."""
    found = metadata.get("general.architecture")
    readable = [family for family in FAMILIES if family.gguf_architecture]
    for family in readable:
        if found == family.gguf_architecture:
            return family
    if isinstance(found, str) and found in REFUSED:
        raise FormatError(
            f"{where}: general.architecture is {found!r}: {REFUSED[found]}, expected a dense model"
        )
    known = ", ".join(f"'{f.gguf_architecture}'" for f in readable)
    raise FormatError(f"{where}: general.architecture is {found!r}, expected one of {known}")
