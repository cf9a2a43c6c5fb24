"""The GPU kernels compiled for Hopper without one: spills, shared memory, hidden copies, aliasing.

Mosaic GPU's passes and ptxas run for real. A kernel that asks for more than 227 KB of shared memory does not
compile, so a case that compiles is within it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aot_gpu
import pytest

MISSING = aot_gpu.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"no compiler for GPUs: {MISSING}")

SMALL: list[dict[str, Any]] = [
    {"kernel": "decode", "head_dim": 64, "kv_heads": 3, "group": 3},
    {"kernel": "decode", "deltas": 7, "window": 1000, "soft_cap": 30.0},
    {"kernel": "decode", "dtype": "int8", "deltas": 4},
    {"kernel": "decode", "dtype": "float8_e4m3fn", "head_dim": 64},
    {"kernel": "prefill", "length": 256, "batch": 1, "head_dim": 64, "kv_heads": 3, "group": 3, "deltas": 4},
    {"kernel": "relocate"},
    {"kernel": "relocate", "head_dim": 256, "kv_heads": 3, "dtype": "float32"},
    {"kernel": "append"},
    {"kernel": "triton"},
]
GRID: list[dict[str, Any]] = [
    *(
        {
            "kernel": kernel,
            "head_dim": head_dim,
            "kv_heads": heads,
            "page_size": size,
            "deltas": deltas,
            **more,
        }
        for (kernel, more), head_dim, (heads, size, deltas) in itertools.product(
            [("decode", {}), ("prefill", {"length": 128, "batch": 2, "soft_cap": 30.0, "window": 1000})],
            [64, 128, 192, 256],
            [(1, 8, 1), (3, 16, 7), (8, 32, 4), (8, 64, 1), (2, 128, 4)],
        )
    ),
    *(
        {"kernel": "decode", "head_dim": head_dim, "dtype": dtype, "page_size": size, "deltas": deltas}
        for dtype, head_dim, (size, deltas) in itertools.product(
            ["int8", "float8_e4m3fn"], [64, 128, 192, 256], [(16, 1), (64, 7)]
        )
    ),
    *(
        {"kernel": "relocate", "head_dim": head_dim, "kv_heads": heads, "page_size": size, "dtype": dtype}
        for dtype, head_dim, (heads, size) in itertools.product(
            ["bfloat16", "float32"], [64, 128, 256], [(1, 8), (3, 16), (8, 64)]
        )
    ),
    *(
        {"kernel": "relocate", "head_dim": head_dim, "rotary_dim": rotary}
        for head_dim, rotary in [(64, 32), (128, 32), (256, 64)]
    ),
    *(
        {
            "kernel": "triton",
            "head_dim": head_dim,
            "dtype": dtype,
            "deltas": deltas,
            "kv_heads": 3,
            "group": 3,
        }
        for head_dim, dtype, deltas in itertools.product([64, 128, 256], ["bfloat16", "float32"], [1, 4])
    ),
]


def _reports(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(aot_gpu.__file__)), json.dumps(cases)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(cases)
    return found


def _check(report: dict[str, Any]) -> None:
    assert report["error"] is None, report
    # A hidden copy of the pages would be a temporary of their size.
    assert report["temp"] < report["pages"] / 2, report
    if report["kernel"] in ("relocate", "append"):
        assert report["alias"] == report["pages"], report
    if report["kernel"] not in ("triton", "append"):  # ptxas speaks of Mosaic GPU kernels only
        assert len(report["registers"]) == 1, report
        # Tiles of one byte are widened beside the outputs, and outputs of 256 columns take 128 registers.
        narrow = report["dtype"] in ("int8", "float8_e4m3fn")
        wide = report["kernel"] == "prefill" and report["head_dim"] == 256
        assert max(report["spilled"]) <= (64 if narrow else 8 if wide else 0), report


def test_kernels_compile_without_spills_or_hidden_copies() -> None:
    for report in _reports(SMALL):
        _check(report)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_the_grid_of_shapes_compiles_without_spills_or_hidden_copies(part: int) -> None:
    for report in _reports(GRID[part::8]):
        _check(report)


def test_what_the_kernels_refuse_is_refused_for_hopper_too_and_auto_takes_xla() -> None:
    cases = [
        {"kernel": "decode", "dtype": "float32"},
        {"kernel": "prefill", "length": 64, "dtype": "int8"},
        {"kernel": "decode", "head_dim": 80},
        {"kernel": "relocate", "rotary_dim": 24},
        {"kernel": "auto", "dtype": "float32", "head_dim": 80},
    ]
    *refused, auto = _reports(cases)
    for report in refused:
        assert report["error"].startswith("NotImplementedError: "), report
        assert "Hopper" in report["error"], report
    assert auto["error"] is None
    assert auto["registers"] == []


def test_too_much_shared_memory_does_not_compile() -> None:
    """So that compiling says something about shared memory: a ring twice as large as a multiprocessor's."""
    (report,) = _reports([{"kernel": "decode", "shared_bytes": 1 << 20, "deltas": 64}])
    assert "exceeds available shared memory" in report["error"]
