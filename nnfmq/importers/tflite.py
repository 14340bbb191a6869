"""`load`: a TensorFlow Lite file → LoadedModel, the model in NNAPI's forms and what its inputs and outputs are.

    bytes ── flatcheck: bounded walk ── tflite_file: records ── tflite_operators: translation ── graph_builder ── Model

The file is not trusted: a corrupt one is refused with InvalidArgument that says what is wrong and where, and the work
and the memory are bounded by its size. What is well-formed but not supported is refused in the same way, naming
operator and tensor. Not supported: several subgraphs, variable and sparse tensors, external buffers, custom operators.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo, describe
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.loaded_model import LoadedModel
from nnfmq.importers.tflite_file import File, read
from nnfmq.importers.tflite_operators import Translation, translate

__all__ = ["load"]


def load(source: str | os.PathLike[str] | bytes) -> LoadedModel:
    """Do what `nnfmq.load` says."""
    if isinstance(source, bytes):
        return _import(read(source))
    try:
        return _import(read(_contents(Path(source))))
    except InvalidArgument as error:
        raise InvalidArgument(f"{os.fspath(source)}: {error}") from None


def _contents(path: Path) -> bytes:
    # A device or a pipe could give bytes without end.
    with path.open("rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidArgument("not a regular file")
        return file.read()


def _import(file: File) -> LoadedModel:
    # Constants may outgrow the file a little: missing biases become zeros. Four times covers one byte per weight.
    builder = GraphBuilder(max_constant_bytes=4 * file.size_bytes + 65536)
    graph = Translation(file, builder)
    inputs = [graph.model_input(index) for index in file.inputs]
    for operator in file.operators():
        translate(graph, operator)
    outputs = [graph.model_output(index) for index in file.outputs]
    if not inputs or not outputs:
        raise InvalidArgument(f"{len(inputs)} inputs and {len(outputs)} outputs: a model needs at least one of each")
    model = builder.build(inputs, outputs)
    return LoadedModel(model, _infos(graph, file.inputs, inputs), _infos(graph, file.outputs, outputs))


def _infos(graph: Translation, tensors: tuple[int, ...], operands: list[int]) -> tuple[TensorInfo, ...]:
    return tuple(
        describe(graph.builder[operand], graph.file.tensor(index).name)
        for index, operand in zip(tensors, operands, strict=True)
    )
