"""Whole steps on Pallas kernels, compiled for TPUs that are not here: pages stay where they are."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "aot_steps.py"
STEPS = ("prefill", "decode", "decode_many", "relocate")


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='not compiled for TPUs: libtpu is not installed (pip install "jaxkv[tpu]")',
)
@pytest.mark.parametrize(
    ("chip", "dtype"),
    [
        ("v5e", "bfloat16"),
        *(
            pytest.param(chip, dtype, marks=pytest.mark.slow)
            for chip, dtype in itertools.product(("v5e", "v6e", "tpu7x"), ("bfloat16", "int8"))
            if (chip, dtype) != ("v5e", "bfloat16")
        ),
    ],
)
def test_steps_on_kernels_write_pages_in_place(chip: str, dtype: str) -> None:
    paths = [str(SCRIPT.parents[1]), str(SCRIPT.parent / "pallas_kernels"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), chip, dtype],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # the compiler itself is asked
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert tuple(each["step"] for each in found) == STEPS
    for each in found:
        assert "error" not in each, f"{each['step']}: {each['error']}"
        assert each["kernels"] > 0, f"{each['step']} runs on no kernel"
        assert each["alias"] >= each["pages"], f"{each['step']} does not write its pages in place"
        assert each["temp"] < each["pages"] // 8, f"{each['step']} has {each['temp']} bytes of temporaries"
