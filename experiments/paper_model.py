"""Models that are counted on paper: their figures, not their weights."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.typing import Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperModel:
    """What FLOPs and bytes depend on.

    C_token is 2 × body parameters, C_attn 4 × full-attention layers × query heads × head dim
    (arXiv 2609.37725, Appendix C).
    """

    name: str
    c_token: float  # FLOPs of a token, keys not counted
    attention_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes of a stored element
    state_bytes: int = 0  # recurrent state of one sequence, one snapshot

    @property
    def c_attn(self) -> int:
        """FLOPs of a token and attended key."""
        return 4 * self.attention_layers * self.query_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that a token keeps."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * self.itemsize

    def flops(self, positions: Int32) -> float:
        """FLOPs of computing tokens at `positions` i32[n] with everything before them in memory."""
        keys = int(np.sum(np.asarray(positions, np.int64) + 1))
        return self.c_token * len(positions) + self.c_attn * keys


QWEN36_27B = PaperModel(
    name="Qwen3.6-27B",
    c_token=48.70e9,
    attention_layers=16,
    query_heads=24,
    kv_heads=4,
    head_dim=256,
    itemsize=2,
    state_bytes=150_994_944 + 2_949_120,  # 48 recurrent layers: state in float32, convolution in bfloat16
)
