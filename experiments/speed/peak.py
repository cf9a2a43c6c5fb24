"""The peak memory of a process. Standard library only: peers run where nothing of ours is installed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """The most bytes that this process has held resident since it began to run its program.

    Linux's `ru_maxrss` begins with what the parent held when it forked, so a small child of a large process
    would report the parent's memory; the high-water mark of /proc belongs to the program alone.
    """
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Kibibytes, but bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
