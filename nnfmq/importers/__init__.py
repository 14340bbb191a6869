"""Importers: model files converted to HAL models. A file format's module is imported when such a file is loaded."""

from __future__ import annotations

import os

from nnfmq.importers.examples import example_path
from nnfmq.importers.loaded_model import LoadedModel

__all__ = ["LoadedModel", "example_path", "load"]


def load(source: str | os.PathLike[str] | bytes) -> LoadedModel:
    """Return the model of a .tflite file, given its path or its bytes.

    The result has its own copy of all constants; the file may change or be deleted afterwards.

    Raises:
        InvalidArgument: If the file is corrupt or uses an unsupported feature; the message names operator and tensor.
        OSError: If the file cannot be read.
    """
    from nnfmq.importers import tflite

    return tflite.load(source)
