"""The files that belong to a model file: external data of ONNX, the weights of OpenVINO."""

from __future__ import annotations

from collections.abc import Mapping

from nnfmq.base.onnx_fields import external_files, with_external_data
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import is_file_name
from nnfmq.importers.file_format import ModelSource, read_source

__all__ = ["companion_files", "external_names", "in_one_file"]


def companion_files(format: str, file: ModelSource) -> Mapping[str, ModelSource]:
    """Return the files beside a model file that it needs, by name, read to sealed memory.

    Raises:
        InvalidArgument: If it names one outside its folder, or is given as bytes.
        OSError: If one cannot be read.
    """
    if format == "openvino" and file.path is not None:
        weights = file.path.with_suffix(".bin")
        return {weights.name: read_source(weights, is_sealed=True)} if weights.exists() else {}
    return _external_data(file, is_sealed=True) if format == "onnx" else {}


def external_names(file: ModelSource) -> tuple[str, ...]:
    """Return the names of the files that have tensors of an ONNX model. Raises InvalidArgument if it is corrupt."""
    return external_files(memoryview(file.data).cast("B"))


def in_one_file(file: ModelSource) -> bytes | memoryview:
    """Return an ONNX model with the tensors that it has in other files.

    Raises:
        InvalidArgument: If it is corrupt, or names a file outside its folder.
        OSError: If a file cannot be read.
    """
    files = {name: memoryview(source.data).cast("B") for name, source in _external_data(file, is_sealed=False).items()}
    return with_external_data(memoryview(file.data).cast("B"), files)


def _external_data(file: ModelSource, *, is_sealed: bool) -> Mapping[str, ModelSource]:
    names = external_names(file)
    for name in names:
        if not is_file_name(name):
            raise InvalidArgument(f"the model has tensors in {name!r:.80}: only files of its own folder are read")
    if names and file.path is None:
        raise InvalidArgument(f"the model has tensors in {names[0]!r}: give its path instead of its content")
    return {name: read_source(file.path.parent / name, is_sealed=is_sealed) for name in names if file.path is not None}
