"""What a serving-speed run measures, typed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import ml_collections

from experiments import fields
from experiments.config import TINY_MODEL
from experiments.speed.peers import PEERS
from jaxkv.cache.dtypes import check_dtype
from jaxkv.checks import check_geometry
from jaxkv.reuse.policies import policy_from_name

SMOKE: dict[str, Any] = {
    "model": TINY_MODEL,
    "prefill": (32, 64),
    "contexts": (64,),
    "batches": (1, 2),
    "decode_tokens": 4,
    "edit_context": 256,
    "edit_size": 16,
    "policies": ("exact", "scr(min_span=16)"),
    "repeats": 1,
    "chunk_size": 32,
    "start_up": False,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedConfig(fields.Fields):
    """Prefill, decode and edits of one model, interleaved with peers."""

    experiment: str = "serving"
    name: str = "serving"

    prefill: tuple[int, ...] = (128, 512, 2048, 4096)  # tokens of a prompt, nothing cached
    contexts: tuple[int, ...] = (512, 2048, 4096)  # tokens before a decode
    batches: tuple[int, ...] = (1, 4, 8)
    decode_tokens: int = 32  # on CPU a compiled loop, which copies its KV once, has as many
    edit_context: int = 4096
    edit_position: float = 0.25
    edit_size: int = 16  # tokens replaced
    policies: tuple[str, ...] = ("exact", "scr", "scr(form=copy)", "first_k(32)", "sinks(4)")
    repeats: int = 3
    page_size: int = 16
    chunk_size: int = 512
    kv_dtype: str = "model"  # of the pages; "model" is the model's own
    implementation: str = "auto"
    interpret: bool = False  # run a forced Pallas implementation on the CPU, slowly
    start_up: bool = True  # also time two fresh processes: import, load, first token
    peers: tuple[str, ...] = ("none",)  # of experiments.speed.peers.PEERS
    peer_python: str = ""  # a Python that has the peers installed; this one when empty
    peer_gguf: str = ""  # the GGUF that peers load; needed with peers

    def __post_init__(self) -> None:
        least = {
            "seed": 0,
            "prefill": 1,
            "contexts": 1,
            "batches": 1,
            "decode_tokens": 1,
            "edit_context": 8,
            "edit_size": 1,
            "edit_position": 0,
            "repeats": 1,
        }
        self.check(least, {"peers": ("none", *PEERS)})
        check_geometry(
            num_pages=1,
            page_size=self.page_size,
            chunk_size=self.chunk_size,
            reuse_granularity="token",
            max_deltas=2,
        )
        check_dtype(self.kv_dtype, "config.kv_dtype", also=("model",))
        for policy in self.policies:
            policy_from_name(policy)


KNOWN_KEYS = fields.known_keys(SpeedConfig)


def defaults(**values: Any) -> ml_collections.ConfigDict:
    """A ConfigDict with every key, holding `values`."""
    return fields.defaults_of(SpeedConfig, **values)


def resolve(config: Mapping[str, Any], given: Collection[str] = ()) -> SpeedConfig:
    """Checks `config` and fills in what it leaves out; see `experiments.fields.build`."""
    return fields.build(SpeedConfig, config, SMOKE, given)
