"""The environment of a Python process that nnfmq starts: it finds this copy of nnfmq, and its BLAS has one thread."""

from __future__ import annotations

import os
import site
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["child_environment"]

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # idle threads of BLAS spin
_NONE: Mapping[str, str] = MappingProxyType({})


def child_environment(variables: Mapping[str, str] = _NONE) -> dict[str, str]:
    """Return the environment of this process with what a child needs, and with `variables`.

    The child is started with -P, so that it imports nothing from the working directory.
    """
    environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), **variables}
    root = str(Path(__file__).parents[1])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not inherited else f"{root}{os.pathsep}{inherited}"
    return environment
