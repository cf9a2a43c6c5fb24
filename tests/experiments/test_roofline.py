"""The sheet's arithmetic by hand, and that the committed page is the one the script makes."""

from __future__ import annotations

import pytest

from experiments import roofline
from experiments.kernels.chips import CHIPS


def test_bytes_and_flops_of_decode_by_hand() -> None:
    work = roofline.decode("llama-8b", 8, 4096)
    kv = 8 * 4096 * 8 * 2 * 128 * 2  # sequences, slots, KV heads, K and V, head dim, bytes
    assert work.bytes == kv + 8 * 32 * 128 * 4 * 2
    assert work.flops == 8 * 4096 * 32 * 128 * 2 * 2
    seconds, roof = roofline.expected(work, CHIPS["h200"])
    assert roof == "HBM"
    assert seconds == pytest.approx(work.bytes / 4.8e12)
    assert roofline.padded(work, CHIPS["h200"]) == pytest.approx(16 * work.flops / 989e12)  # 4 rows of 64


def test_a_long_prefill_is_bound_by_the_matrix_units_and_a_relocation_by_memory() -> None:
    work = roofline.prefill("llama-8b", 2048, 2048)
    assert work.flops == 4 * 32 * 128 * (2048 * 2049 // 2)  # the causal triangle
    assert roofline.expected(work, CHIPS["v5e"])[1] == "matrix units"
    moved = roofline.relocate("llama-8b", 256)
    assert moved.bytes == 2 * 256 * 8 * 16 * 256 * 2
    assert roofline.expected(moved, CHIPS["tpu7x"]) == (moved.bytes / 3.7e12, "HBM")


def test_the_committed_page_is_up_to_date() -> None:
    """All but what compilers said, which needs their wheels."""
    committed = roofline.PAGE.read_text(encoding="utf-8").split("## Expected microseconds")[0]
    assert committed == roofline.page(roofline.sheet(), {}, "").split("## Expected microseconds")[0]
    page = roofline.PAGE.read_text(encoding="utf-8").split("## Expected microseconds")[1]
    for work in roofline.sheet():
        row = next(line for line in page.splitlines() if line.startswith(f"| {work.kernel} | {work.shape} |"))
        for cell, chip in zip(row.strip("| ").split(" | ")[2:], CHIPS.values(), strict=True):
            seconds, roof = roofline.expected(work, chip)
            assert cell.startswith(f"{seconds * 1e6:,.1f}{'' if roof == 'HBM' else ' c'}")
