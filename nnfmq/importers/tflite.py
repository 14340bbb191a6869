"""Import of TensorFlow Lite files: a HAL model, and descriptions of its inputs and outputs.

    bytes ── flatbuffer_verifier ── tflite_file: records ── tflite_operators: conversion ── graph_builder ── Model

The file is not trusted: time and memory are bounded by its size. A corrupt file raises InvalidArgument with the field
and the byte offset, an unsupported feature with the operator and the tensor. Several subgraphs, sparse tensors,
external buffers and custom operators are not supported.
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.file_format import ModelSource
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.loaded_model import LoadedModel
from nnfmq.importers.tflite_file import TfliteFile, read
from nnfmq.importers.tflite_operators import ConversionContext, convert_operator, live_operators

__all__ = ["import_model"]


def import_model(source: ModelSource) -> LoadedModel:
    """Return the model of a .tflite file.

    Raises:
        InvalidArgument: If the file is corrupt or uses an unsupported feature.
    """
    if source.shapes:
        raise InvalidArgument("inputs of .tflite files cannot be resized")
    return _import(read(source.data))


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
