"""What chips can do, with the source of every number. One entry is one device as JAX counts them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Peak rates of one device."""

    name: str
    flops: float  # bfloat16 multiply-adds counted as two, a second, dense
    bandwidth: float  # bytes a second of HBM
    fast_bytes: int  # VMEM of a TensorCore, or shared memory of a multiprocessor
    rows: int  # query rows that one matrix instruction of the decode kernel holds, padding included
    source: str


_JAX = "JAX's hardware table (docs.jax.dev/en/latest/pallas/tpu/hardware.html)"
_CLOUD = "docs.cloud.google.com/tpu/docs/v6e"
_NVIDIA = "NVIDIA H100 and H200 SXM data sheets, dense"
_HOPPER = "228 KB of shared memory a multiprocessor: CUDA programming guide, compute capability 9.0"

CHIPS = {
    "v5e": Chip(
        name="TPU v5e", flops=197e12, bandwidth=8.2e11, fast_bytes=128 << 20, rows=8,
        source=f"FLOP/s: {_CLOUD}; HBM and VMEM: {_JAX}",
    ),
    "v6e": Chip(
        name="TPU v6e", flops=918e12, bandwidth=1.64e12, fast_bytes=128 << 20, rows=8,
        source=f"FLOP/s: {_CLOUD}; HBM and VMEM: {_JAX}",
    ),
    "tpu7x": Chip(
        name="TPU7x, one of two TensorCores", flops=2307e12 / 2, bandwidth=7.4e12 / 2,
        fast_bytes=64 << 20, rows=8,
        source=f"FLOP/s: docs.cloud.google.com/tpu/docs/tpu7x; HBM and VMEM: {_JAX}; half a chip each",
    ),
    "h100": Chip(
        name="H100 SXM", flops=989e12, bandwidth=3.35e12, fast_bytes=228 << 10, rows=64,
        source=f"{_NVIDIA}; {_HOPPER}",
    ),
    "h200": Chip(
        name="H200 SXM", flops=989e12, bandwidth=4.8e12, fast_bytes=228 << 10, rows=64,
        source=f"{_NVIDIA}; {_HOPPER}",
    ),
}  # fmt: skip
# What a copy was measured to move: streams can hope for this, not for the data sheet's rate.
MEASURED_COPY = {"h200": 4.3e12}
