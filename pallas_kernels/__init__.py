"""Paged attention, appending and relocation on plain arrays. Useful without jaxkv, and never imports it.

    import jax.numpy as jnp
    from pallas_kernels import append, paged_attention

    kv = append(kv, row, slot, keys, values)                    # donate kv: written in place
    out = paged_attention(q, kv, page, first, lo, hi, delta_index, positions)

`reference` defines what each operation means; `docs/kernels.md` says how each backend does it.
"""

from pallas_kernels.api import append, paged_attention, relocate_pages
from pallas_kernels.dispatch import IMPLEMENTATIONS, compiling_for
from pallas_kernels.reference import relocate
from pallas_kernels.scales import pack_scales, scale_shape

__all__ = [
    "IMPLEMENTATIONS",
    "append",
    "compiling_for",
    "pack_scales",
    "paged_attention",
    "relocate",
    "relocate_pages",
    "scale_shape",
]
