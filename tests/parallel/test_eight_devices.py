"""Runs the modules `mesh_*.py` of this directory on eight virtual CPU devices.

How many devices a CPU has is decided when JAX starts, so each module runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Small programs that run once: time is better spent running than optimizing them.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", sorted(path.name for path in HERE.glob("mesh_*.py")))
def test_on_eight_devices(module: str, tier: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            tier,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            str(HERE / module),
        ],
        cwd=HERE.parents[1],
        env={**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(done.stdout[-6000:])
    if tier == "slow" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return
    assert done.returncode == 0, done.stderr[-2000:]
    assert " passed" in done.stdout
