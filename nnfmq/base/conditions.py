"""By which build, on which machine and when something was found: `conditions` in the JSON of commands and in traces."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nnfmq.base.packages import installed_version

__all__ = ["conditions", "cpu_model"]

_PACKAGES = ("nnfmq", "numpy", "llvmlite", "ai-edge-litert", "onnxruntime", "openvino")


def conditions(core: str) -> dict[str, Any]:
    """Return the date, the machine and the build of this process, which runs the core of this name. Blocks for 10 ms.

    `cpus_allowed` are those of the calling thread.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpu": cpu_model(),
        "cpus_allowed": sorted(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
        "core": core,
    }


def cpu_model() -> str:
    """Return the model name of the CPU; if /proc/cpuinfo has none (as on arm64), the machine type."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
