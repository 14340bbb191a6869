"""The files that belong to a model file: external data of ONNX, the weights of OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping

from nnfmq.importers.file_format import FileContent, ModelSource, read_source

__all__ = ["companion_files"]


def companion_files(format: str, file: ModelSource) -> Mapping[str, FileContent]:
    """Return the contents of the files beside a model file that it needs, by name.

    Raises:
        InvalidArgument: If it names one outside its folder, or is given as bytes.
        OSError: If one cannot be read.
    """
    if format == "openvino" and file.path is not None:
        weights = file.path.with_suffix(".bin")
        return {weights.name: read_source(weights).data} if weights.exists() else {}
    return {}
