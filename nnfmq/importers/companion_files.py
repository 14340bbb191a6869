"""The files that belong to a model file: external data of ONNX, the weights of OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nnfmq.base.onnx_fields import external_files, with_external_data
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import is_file_name
from nnfmq.importers.file_format import ModelSource, read_source

__all__ = ["companion_files", "companion_paths", "external_names", "in_one_file"]


def companion_files(format: str, file: ModelSource) -> Mapping[str, ModelSource]:
    """Return the files beside a model file that it needs, by name, read to sealed memory.

    Raises:
        InvalidArgument: If it names one outside its folder, or is given as bytes.
        OSError: If one cannot be read.
    """
    return {path.name: read_source(path, is_sealed=True) for path in companion_paths(format, file)}


def companion_paths(format: str, file: ModelSource) -> list[Path]:
    """Return the paths of the files beside a model file that it needs, in the order in which it names them.

    Raises:
        InvalidArgument: If it names one outside its folder, or is given as bytes.
    """
    if format == "onnx":
        return _external_paths(file)
    weights = [file.path.with_suffix(".bin")] if format == "openvino" and file.path is not None else []
    return [path for path in weights if path.exists()]


def external_names(file: ModelSource) -> tuple[str, ...]:
    """Return the names of the files that have tensors of an ONNX model. Raises InvalidArgument if it is corrupt."""
    return external_files(memoryview(file.data).cast("B"))


def in_one_file(file: ModelSource) -> bytes | memoryview:
    """Return an ONNX model with the tensors that it has in other files.

    Raises:
        InvalidArgument: If it is corrupt, or names a file outside its folder.
        OSError: If a file cannot be read.
    """
    files = {path.name: memoryview(read_source(path).data).cast("B") for path in _external_paths(file)}
    return with_external_data(memoryview(file.data).cast("B"), files)


def _external_paths(file: ModelSource) -> list[Path]:
    names = external_names(file)
    for name in names:
        if not is_file_name(name):
            raise InvalidArgument(f"the model has tensors in {name!r:.80}: only files of its own folder are read")
    if names and file.path is None:
        raise InvalidArgument(f"the model has tensors in {names[0]!r}: give its path instead of its content")
    return [file.path.parent / name for name in names if file.path is not None]
