"""Model files → `hal.types.Model`. One module per file format, which is imported when a file of it is loaded."""

from __future__ import annotations

import os

from nnfmq.importers.examples import example_path
from nnfmq.importers.loaded_model import LoadedModel

__all__ = ["LoadedModel", "example_path", "load"]


def load(source: str | os.PathLike[str] | bytes) -> LoadedModel:
    """Read a .tflite model from a path, or from the bytes of such a file.

    The result owns its constants (one copy of the weights); the file may change or vanish afterwards. Raises
    InvalidArgument if the file is corrupt, or uses what is not supported; the message names the operator and the
    tensor. Raises OSError if the file cannot be read.
    """
    from nnfmq.importers import tflite

    return tflite.load(source)
