"""Import of TensorFlow Lite files: a HAL model, and descriptions of its inputs and outputs.

    bytes ── flatbuffer_verifier ── tflite_file: records ── tflite_operators: conversion ── graph_builder ── Model

The file is not trusted: time and memory are bounded by its size. A corrupt file raises InvalidArgument with the field
and the byte offset, an unsupported feature with the operator and the tensor. Several subgraphs, sparse tensors,
external buffers and custom operators are not supported.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.loaded_model import LoadedModel
from nnfmq.importers.tflite_file import TfliteFile, read
from nnfmq.importers.tflite_operators import ConversionContext, convert_operator, live_operators

__all__ = ["load"]


def load(source: str | os.PathLike[str] | bytes) -> LoadedModel:
    """Implement `nnfmq.load`."""
    if isinstance(source, bytes):
        _require_tflite(source)
        return _import(read(source))
    try:
        data = _contents(Path(source))
        _require_tflite(data)
        return _import(read(data))
    except InvalidArgument as error:
        raise InvalidArgument(f"{os.fspath(source)}: {error}") from None


_OTHER_FORMATS = {
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"PK\x03\x04": "a zip archive, such as a PyTorch, Keras or .npz file",
    b"\x89HDF": "an HDF5 file, such as a Keras model",
    b"GGUF": "a GGUF model",
}
"""Formats of files that users confuse with models of this format, by their first bytes."""


def _require_tflite(data: bytes) -> None:
    """Raise InvalidArgument if `data` is a file of another known format; the message names both."""
    kind = next((name for start, name in _OTHER_FORMATS.items() if data.startswith(start)), None)
    if data[4:8] == b"TFL3":
        return
    # An ONNX file is a protocol buffer: field 1, the IR version, then usually field 2, the name of the producer.
    if kind is None and data[:1] == b"\x08" and data[2:3] == b"\x12":
        kind = "an ONNX model"
    if kind is not None:
        raise InvalidArgument(f"this is {kind}; models are read from TensorFlow Lite files (.tflite)")


def _contents(path: Path) -> bytes:
    # Reading a device or a pipe might never end.
    with path.open("rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidArgument("not a regular file")
        return file.read()


def _import(file: TfliteFile) -> LoadedModel:
    # Constants may be larger than the file: missing biases become zeros, dequantized weights four times their size.
    builder = GraphBuilder(max_constant_bytes=4 * file.size_bytes + 65536)
    context = ConversionContext(file, builder)
    inputs = [context.model_input(index) for index in file.inputs]
    for operator in live_operators(file):
        convert_operator(context, operator)
    outputs = [context.model_output(index) for index in file.outputs]
    if not inputs or not outputs:
        raise InvalidArgument(f"{len(inputs)} inputs and {len(outputs)} outputs: a model needs at least one of each")
    inputs += [state.before for state in context.states]
    outputs += [state.after for state in context.states]
    model = builder.build(inputs, outputs)
    return LoadedModel(model, context.infos(file.inputs), context.infos(file.outputs))
