"""Peak memory is a process's own, not what its parent held when it forked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.speed import peak

ROOT = Path(__file__).parents[2]


def test_a_peak_grows_with_what_is_held() -> None:
    before = peak.peak_bytes()
    held = np.ones(before + (64 << 20), np.uint8)  # resident, as it is written
    assert peak.peak_bytes() >= held.nbytes


@pytest.mark.skipif(not peak.STATUS.exists(), reason="only Linux says it of the program alone")
def test_a_small_child_does_not_report_its_parents_memory() -> None:
    held = np.ones(256 << 20, np.uint8)
    program = "from experiments.speed.peak import peak_bytes; print(peak_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < held.nbytes
