"""What is measured: our implementations, and baselines that need nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from experiments.kernels.problem import Problem

Array = Any
OURS = {"xla": "xla", "triton": "triton"}
PALLAS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}


class Skipped(Exception):
    """This candidate does not do this case here; the message says why."""


def implementation(name: str, platform: str) -> str:
    """Our implementation behind a candidate's name.

    Raises:
      Skipped: there is none for this platform.
    """
    if name == "pallas":
        if platform not in PALLAS:
            raise Skipped(f"no Pallas kernel runs on {platform}")
        return PALLAS[platform]
    if name == "triton" and platform != "gpu":
        raise Skipped("Triton needs a GPU")
    return OURS[name]


def attention(name: str, problem: Problem, platform: str) -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """A function (q, *rest) -> f32[B, T, K, G, H] and its arguments.

    Raises:
      Skipped: not for this case, or not here.
    """
    if name == "cudnn":
        return _cudnn(problem, platform)
    chosen = implementation(name, platform)

    def call(*arrays: Array) -> Array:
        case = problem.case
        return pallas_kernels.paged_attention(
            *arrays, window=case.window, soft_cap=case.soft_cap, implementation=chosen
        )

    return call, problem.arrays()


def relocation(name: str, platform: str) -> Callable[..., Array]:
    """A function of the arguments of `relocate_pages`.

    Raises:
      Skipped: this candidate relocates nothing.
    """
    if name not in ("pallas", "xla"):
        raise Skipped(f"{name} has no relocation")
    chosen = implementation(name, platform)
    return lambda *arrays: pallas_kernels.relocate_pages(*arrays, implementation=chosen)


def chained(call: Callable[..., Array]) -> Callable[..., Array]:
    """A step whose queries depend on the answer before, by an amount that rounds away."""

    def step(q: Array, *rest: Array) -> Array:
        out = call(q, *rest)
        return q + 1e-30 * out.reshape(q.shape[0], 1, *q.shape[2:])

    return step


def _ordinary(problem: Problem, name: str) -> None:
    case = problem.case
    if case.length != 1 or case.deltas != 1 or case.window or case.soft_cap or case.dtype != "bfloat16":
        raise Skipped(f"{name} is measured in decode over ordinary bfloat16 tables")


def _cudnn(problem: Problem, platform: str) -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """cuDNN's paged attention, which JAX has in a private module: a baseline and nothing else."""
    if platform != "gpu":
        raise Skipped("cuDNN needs an NVIDIA GPU")
    _ordinary(problem, "cuDNN")
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention
    except ImportError as error:
        raise Skipped(f"jax {jax.__version__} has no private cuDNN paged attention") from error
    case, table = problem.case, problem.table
    split = case.head_dim
    pages = jnp.asarray(np.minimum(table.page, table.rows - 1))[:, None, :, None]
    lengths = jnp.asarray(np.array(case.context, np.int32))

    def call(q: Array, keys: Array, values: Array, pages: Array, lengths: Array) -> Array:
        flat = q[:, 0, 0].reshape(case.batch, -1, 1, split).astype(jnp.bfloat16)  # [B, N, T, H]
        out = paged_attention(
            flat, keys, values, jnp.ones_like(lengths), lengths, pages, pages,
            scale=1.0, mask_type=MaskType.PADDING, qkv_layout="BNTH",
        )  # fmt: skip
        out = out[0] if isinstance(out, tuple | list) else out
        return out.astype(jnp.float32).reshape(case.batch, 1, case.kv_heads, case.group, split)

    return call, (problem.q, problem.kv[..., :split], problem.kv[..., split:], pages, lengths)


def torch_attention(problem: Problem, platform: str) -> tuple[Callable[[], Any], Any]:
    """PyTorch's scaled_dot_product_attention over contiguous keys and values, and the module torch.

    Raises:
      Skipped: without torch, a CUDA device, or a uniform ordinary case.
    """
    _ordinary(problem, "torch")
    if platform != "gpu":
        raise Skipped("torch is measured on a CUDA device")
    if len(set(problem.case.context)) > 1:
        raise Skipped("torch is measured over contiguous keys of one length")
    try:
        import torch
    except ImportError as error:
        raise Skipped("torch is not installed") from error
    case, table = problem.case, problem.table
    pages = jnp.asarray(np.minimum(table.page, table.rows - 1))
    rows = problem.kv[pages].transpose(0, 2, 1, 3, 4)  # [B, K, M, P, 2H]
    rows = rows.reshape(case.batch, case.kv_heads, -1, 2 * case.head_dim)[:, :, : case.context[0]]
    keys, values = (
        torch.from_dlpack(jnp.array(part, copy=True))
        for part in (rows[..., : case.head_dim], rows[..., case.head_dim :])
    )
    q = problem.q[:, 0, 0].reshape(case.batch, -1, 1, case.head_dim).astype(jnp.bfloat16)
    q = torch.from_dlpack(jnp.array(q, copy=True))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, keys, values, scale=1.0, enable_gqa=True), torch
