"""What a run ran on, for `config.json` and the report. No host name, user or path."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("jaxkv", "jax", "jaxlib", "numpy", "flax", "tokenizers", "gguf")


def environment() -> dict[str, Any]:
    """Versions, operating system, processor and devices."""
    import jax

    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "devices": f"{len(devices)} × {devices[0].device_kind}",
        "platform": devices[0].platform,
        **{name: version(name) for name in PACKAGES},
    }


def version(package: str) -> str:
    """Installed version of `package`, or "not installed" (a source tree on the path)."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
