"""Paged attention and relocation on plain arrays. Useful without jaxkv, and never imports it."""

from pallas_kernels.reference import append, paged_attention, relocate

__all__ = ["append", "paged_attention", "relocate"]
