"""Machines and models of the plan, with the source of every number."""

from __future__ import annotations

import dataclasses

from experiments.kernels.chips import CHIPS, MEASURED_COPY
from jaxkv.model.config import ModelConfig, RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal chips joined by links."""

    name: str
    chip: str  # a key of CHIPS
    hosts: int
    devices: int
    hbm_bytes: float  # of one device
    link_rate: float  # bytes a second that a device sends in a ring within a host or slice
    hop_seconds: float  # from one device of a ring to the next; an assumption, see docs/scale.md
    cross_rate: float = 0.0  # bytes a second that a device sends to another host; 0: by the same links
    topology: str = ""  # under which libtpu compiles for it

    @property
    def bandwidth(self) -> float:
        """Bytes a second of HBM: what a copy was measured to move, else the data sheet's."""
        return MEASURED_COPY.get(self.chip, CHIPS[self.chip].bandwidth)


# A ring over a slice leaves and enters each chip by two of its four ports, and is used in both directions: a
# device sends over two links, each with a quarter of the published bandwidth halved for one direction.
V5E_RATE, V6E_RATE = 2 * 400e9 / 4 / 2, 2 * 800e9 / 4 / 2
NVLINK_RATE, INFINIBAND_RATE = 900e9 / 2, 50e9
HOP = 1e-6
MACHINES = (
    Machine(
        name="v5e-8", chip="v5e", hosts=1, devices=8, hbm_bytes=16e9, link_rate=V5E_RATE, hop_seconds=HOP,
        topology="v5e:2x4",
    ),
    Machine(
        name="v6e-8", chip="v6e", hosts=1, devices=8, hbm_bytes=32e9, link_rate=V6E_RATE, hop_seconds=HOP,
        topology="v6e:2x4",
    ),
    Machine(
        name="8 × H200", chip="h200", hosts=1, devices=8, hbm_bytes=141e9, link_rate=NVLINK_RATE,
        hop_seconds=HOP,
    ),
    Machine(
        name="v5e-16, two hosts", chip="v5e", hosts=2, devices=16, hbm_bytes=16e9, link_rate=V5E_RATE,
        hop_seconds=HOP, topology="v5e:4x4",
    ),
    Machine(
        name="2 × 8 × H200", chip="h200", hosts=2, devices=16, hbm_bytes=141e9, link_rate=NVLINK_RATE,
        hop_seconds=HOP, cross_rate=INFINIBAND_RATE,
    ),
)  # fmt: skip
SOURCES = """HBM and ICI: docs.cloud.google.com/tpu/docs/v5e and /v6e (16 and 32 GB; 400 and 800 GB/s of ICI a
chip, both directions of four ports together). H200: NVIDIA's data sheet (141 GB, 900 GB/s of NVLink, both
directions together); between hosts 400 Gbit/s of InfiniBand a GPU, as in NVIDIA's HGX reference. HBM rates
are those of docs/roofline.md, on the H200 the 4.3 TB/s that a copy was measured to move."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the plan. What `config` cannot express stands beside it, counted on paper."""

    name: str
    config: ModelConfig
    paper_weights: int = 0  # parameters that are not in `config`, split over "model" by heads and MLP
    paper_state: int = 0  # bytes of recurrent state of one sequence, split likewise
    paper_reduces: int = 0  # all-reduces of [B, D] in float32 that those layers add


def _config(**values: object) -> ModelConfig:
    head_dim = values["head_dim"]
    return ModelConfig(rope=RopeConfig(rotary_dim=head_dim), **values)  # type: ignore[arg-type]


SMOLLM2 = Subject(
    name="SmolLM2-135M",
    config=_config(
        vocab_size=49_152, num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, head_dim=64,
        mlp_dim=1536, max_positions=8192, tie_embeddings=True,
    ),
)  # fmt: skip
LLAMA3_8B = Subject(
    name="Llama-3-8B",
    config=_config(
        vocab_size=128_256, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_dim=14_336, max_positions=8192,
    ),
)  # fmt: skip
# The 16 layers that attend, each with its MLP, are a config and compile. The other 48 keep a recurrent state:
# per layer query, key and value projections (2 · 16 + 48 heads of 128), gate, output, two small projections
# and the MLP; and the attention layers' output gates.
_D, _F = 5120, 17_408
_RECURRENT = _D * (2 * 16 * 128 + 48 * 128) + 2 * _D * 48 * 128 + 2 * _D * 48 + 3 * _D * _F
QWEN36_27B = Subject(
    name="Qwen3.6-27B",
    config=_config(
        vocab_size=248_320, num_layers=16, embed_dim=_D, num_heads=24, num_kv_heads=4, head_dim=256,
        mlp_dim=_F, max_positions=32_768,
    ),
    paper_weights=48 * _RECURRENT + 16 * _D * 24 * 256,
    paper_state=150_994_944 + 2_949_120,  # as in experiments.paper_model
    paper_reduces=2 * 48,
)  # fmt: skip
SUBJECTS = (SMOLLM2, LLAMA3_8B, QWEN36_27B)
