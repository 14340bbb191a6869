"""Paths of the repository, the package under test, and the data that the project does not ship."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""The repository these tests belong to."""


def data_path() -> Path:
    """Return the path of the test data: $NNFMQ_DATA, else the folder `shared` beside the repository."""
    return Path(os.environ.get("NNFMQ_DATA") or ROOT.parent / "shared").absolute()
