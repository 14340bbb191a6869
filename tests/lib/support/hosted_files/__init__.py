"""Programs that write model files with a framework, with inputs and the outputs that it computes itself.

They are run in processes of their own: no test imports a framework. `made` runs one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def made(program: str, folder: Path) -> Path:
    """Run `program` of this package, which writes its files into a folder; return the folder."""
    ended = subprocess.run(
        [sys.executable, HERE / f"{program}.py", folder], capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder


def assert_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Check that arrays have the same element types, shapes and bits."""
    assert [(array.dtype, array.shape) for array in found] == [(array.dtype, array.shape) for array in expected]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))


def examples(folder: Path, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return inputs and outputs that a program has written for a file."""
    with np.load(folder / f"{name}.npz") as arrays:
        groups = [[arrays[key] for key in sorted(arrays.files) if key.startswith(kind)] for kind in ("in", "out")]
    return groups[0], groups[1]
