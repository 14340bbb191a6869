"""The files that belong to a model file: external data of ONNX, the weights of OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping

from nnfmq.importers.file_format import FileContent, ModelSource

__all__ = ["companion_files"]


def companion_files(format: str, file: ModelSource) -> Mapping[str, FileContent]:
    """Return the contents of the files beside a model file that it needs, by name.

    Raises:
        InvalidArgument: If it names one outside its folder, or is given as bytes.
        OSError: If one cannot be read.
    """
    del format, file
    return {}
