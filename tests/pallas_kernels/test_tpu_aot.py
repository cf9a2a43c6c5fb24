"""The TPU kernels compiled for v5e, v6e and tpu7x on a machine without one.

The compiler refuses what does not fit VMEM, what Mosaic cannot lower and blocks that are no tiles; its
memory analysis shows a hidden copy of the pages.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

HERE = Path(__file__).parent
CHIPS = ("v5e", "v6e", "tpu7x")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='not compiled for TPUs: libtpu is not installed (pip install "jaxkv[tpu]")',
)

HEADS = {
    "smollm2": {"kv_heads": 3, "group": 3, "head_dim": 64},
    "llama-8b": {"kv_heads": 8, "group": 4, "head_dim": 128},
    "gemma": {"kv_heads": 4, "group": 2, "head_dim": 256},
}
ROWS = 16_384  # of the page array: far more bytes than anything else in a program
# One program of each kind; the slow grid has all combinations.
FEW = [
    {"operation": "attention", "dtype": "bfloat16", **HEADS["smollm2"], "deltas": 4},
    {"operation": "attention", "dtype": "bfloat16", **HEADS["llama-8b"], "length": 256, "deltas": 4},
    {"operation": "attention", "dtype": "int8", **HEADS["smollm2"], "page_size": 32, "window": 512},
    {"operation": "append", "dtype": "bfloat16", **HEADS["smollm2"]},
    {"operation": "append", "dtype": "int8", **HEADS["smollm2"], "page_size": 64},
    {"operation": "relocate_pages", "dtype": "bfloat16", **HEADS["llama-8b"]},
]


def compiled(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the compiler says of each spec, from a process of its own."""
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / "aot_tpu.py")],
        input=json.dumps(specs),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def require_in_place(found: dict[str, Any]) -> None:
    """It compiled, writes pages where they are, and copies neither them nor their scales."""
    spec = found["spec"]
    assert "error" not in found, f"{spec}: {found['error']}"
    slots = ROWS * spec["kv_heads"] * spec.get("page_size", 16)
    pages = slots * 2 * spec["head_dim"] * jnp.dtype(spec["dtype"]).itemsize
    scaled = jnp.dtype(spec["dtype"]).itemsize == 1
    if spec["operation"] == "attention":
        # Queries are laid out anew, for each delta; scales are gathered in the order of the tables.
        rows = 4 * max(spec.get("length", 1) * spec["group"], 16) * spec["kv_heads"]
        queries = rows * spec.get("deltas", 1) * max(spec["head_dim"], 128) * 4
        gathered = 4 * 256 * spec["kv_heads"] * max(2 * spec.get("page_size", 16), 128) * 4
        allowed = 3 * queries + scaled * 4 * gathered + (2 << 20)
        assert found["alias"] == 0
    else:
        allowed = 2 << 20
        pages += scaled * ROWS * spec["kv_heads"] * max(2 * spec.get("page_size", 16), 128) * 4
        assert found["alias"] >= pages, f"{spec}: {found['alias']} bytes of {pages} are written in place"
    assert allowed < pages, "the case is too small to show a hidden copy"
    assert found["temp"] <= allowed, f"{spec}: {found['temp']} bytes of temporaries, pages have {pages}"


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile_without_a_hidden_copy(chip: str) -> None:
    results = compiled([{"chip": chip, **spec} for spec in FEW])
    assert len(results) == len(FEW)
    for found in results:
        require_in_place(found)


def grid() -> list[dict[str, Any]]:
    """Head dims and KV heads, page sizes, dtypes; decode, prefill, append, relocate."""
    specs = []
    for heads, size, dtype in itertools.product(
        HEADS.values(), (16, 64), ("float32", "bfloat16", "int8", "float8_e4m3fn")
    ):
        if jnp.dtype(dtype).itemsize == 1 and size < 32:
            continue
        base = {"dtype": dtype, "page_size": size, **heads}
        options = {"window": 1024, "soft_cap": 30.0} if heads["head_dim"] == 256 else {"deltas": 4}
        specs += [
            {"operation": "attention", **base, **options},
            {"operation": "attention", **base, **options, "length": 64},
            {"operation": "append", **base},
            {"operation": "relocate_pages", **base},
        ]
    return specs


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_the_whole_grid_compiles_without_a_hidden_copy(chip: str) -> None:
    specs = grid()
    results = compiled([{"chip": chip, **spec} for spec in specs])
    assert len(results) == len(specs)
    for found in results:
        require_in_place(found)


@needs_libtpu
def test_a_copy_of_the_pages_would_be_seen() -> None:
    """Pages that the caller keeps must be copied before a token is written: the assertions notice."""
    kept = compiled([{"chip": "v5e", **FEW[3], "donate": False}])[0]
    with pytest.raises(AssertionError, match="are written in place"):
        require_in_place(kept)
