"""Reads Hugging Face model directories: config.json, *.safetensors, tokenizer files.

Tensors are read as rows of the mapped file, after the `safetensors` package has checked the header;
bfloat16 comes through `ml_dtypes`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from jaxkv.errors import FormatError
from jaxkv.io.configs import config_from_hf
from jaxkv.io.tokenizer import Tokenizer, tokenizer_from_file
from jaxkv.io.weights import Progress, TensorSource, build_params
from jaxkv.model.config import ModelConfig
from jaxkv.model.families import family_from_hf
from jaxkv.model.params import Params

_FLOATS = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type: str
    data: np.ndarray[Any, Any]  # u8[bytes], a view of the mapped file
    where: str

    def rows(self, lo: int, hi: int) -> np.ndarray[Any, Any]:
        if self.type not in _FLOATS:
            raise FormatError(
                f"{self.where}: tensor '{self.name}' has type {self.type}, "
                f"expected one of {', '.join(_FLOATS)}"
            )
        row = self.data.size // self.shape[0]
        raw = self.data[lo * row : hi * row].view(_FLOATS[self.type])
        return raw.reshape(hi - lo, *self.shape[1:]).astype(np.float32)


def open_safetensors(path: str | Path) -> dict[str, TensorSource]:
    """Maps a safetensors file; returns its tensors by name, `FormatError` where it is malformed."""
    path = Path(path)
    where = path.name
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # checks header, offsets and size
        data = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise FormatError(f"{where}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # SafetensorError derives from Exception alone
        raise FormatError(f"{where}: not a whole safetensors file ({error})") from error
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    return {
        name: _Tensor(
            name=name,
            shape=tuple(info["shape"]),
            type=info["dtype"],
            data=np.asarray(data[start + info["data_offsets"][0] : start + info["data_offsets"][1]]),
            where=where,
        )
        for name, info in header.items()
    }


def read_hf_directory(
    path: str | Path, *, dtype: str = "float32", progress: Progress | None = None
) -> tuple[ModelConfig, Params, Tokenizer | None]:
    """Reads a Hugging Face model directory.

    Args:
      path: holds config.json and model.safetensors or its shards with an index; tokenizer.json or
        tokenizer.model, tokenizer_config.json, chat_template.jinja and generation_config.json are
        read where present.
      dtype: "float32" or "bfloat16", of the weight matrices.

    Returns:
      (config, params, tokenizer); the tokenizer is None where the directory has none.

    Raises:
      FormatError: a file is missing, malformed or unsupported; the message names it.
    """
    path = Path(path)
    data = read_json(path / "config.json", required=True)
    generation = read_json(path / "generation_config.json")
    if generation.get("eos_token_id") is not None:  # what the model's authors stop generation at
        data["eos_token_id"] = generation["eos_token_id"]
    where = f"{path.name}/config.json"
    config = config_from_hf(data, where)
    family = family_from_hf(data, where)
    tokenizer = _tokenizer(path, config)
    params = build_params(
        config,
        {renamed(name, family.hf_renames): held for name, held in _all_tensors(path).items()},
        names=family.hf_tensors,
        interleaved=False,
        dtype=dtype,
        where=path.name,
        ignored=lambda name: (
            name.endswith(family.hf_derived_tensors)
            or name.startswith(family.hf_ignored)
            or (config.tie_embeddings and name == family.hf_tensors["unembed"])
        ),
        norm_offset=family.norm_offset,
        progress=progress,
    )
    return config, params, tokenizer


def renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """A tensor's name with the first beginning that `renames` lists replaced."""
    for old, new in renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file; {} where it is absent and not required."""
    where = f"{path.parent.name}/{path.name}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise FormatError(f"{where}: is missing, expected a Hugging Face model directory") from error
        return {}
    except OSError as error:
        raise FormatError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise FormatError(f"{where}: is a {type(data).__name__}, expected a JSON object")
    return data


def _all_tensors(path: Path) -> dict[str, TensorSource]:
    index = read_json(path / _INDEX)
    if not index:
        if not (path / _SINGLE).is_file():
            raise FormatError(f"{path.name}: has neither {_SINGLE} nor {_INDEX}")
        return open_safetensors(path / _SINGLE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise FormatError(f"{path.name}/{_INDEX}: weight_map is missing, expected tensor -> file name")
    tensors: dict[str, TensorSource] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise FormatError(f"{path.name}/{_INDEX}: file name {shard!r} leaves the directory")
        if not (path / shard).is_file():
            raise FormatError(f"{path.name}: shard {shard} is missing, {_INDEX} names it")
        held = open_safetensors(path / shard)
        for name in (n for n, s in weight_map.items() if s == shard):
            if name not in held:
                raise FormatError(f"{path.name}/{shard}: tensor '{name}' is missing, {_INDEX} names it")
            tensors[name] = held[name]
    return tensors


def _tokenizer(path: Path, config: ModelConfig) -> Tokenizer | None:
    settings = read_json(path / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        defaults = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        try:
            template = jinja.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise FormatError(f"{path.name}/{jinja.name}: cannot be read as UTF-8 text") from error
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            return tokenizer_from_file(
                path / name,
                bos_id=config.bos_token_id,
                eos_ids=config.eos_token_ids,
                chat_template=template if isinstance(template, str) else None,
            )
    return None
