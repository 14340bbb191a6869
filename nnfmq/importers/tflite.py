"""`load`: a TensorFlow Lite file → LoadedModel, the model in NNAPI's forms and what its inputs and outputs are.

    bytes ── flatcheck: bounded walk ── tflite_file: records ── tflite_operators: translation ── graph_builder ── Model

The file is not trusted: a corrupt one is refused with InvalidArgument that says what is wrong and where, and the work
and the memory are bounded by its size. What is well-formed but not supported is refused in the same way, naming
operator and tensor. Not supported: several subgraphs, sparse tensors, external buffers, custom operators.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.loaded_model import LoadedModel
from nnfmq.importers.tflite_file import File, read
from nnfmq.importers.tflite_operators import Translation, needed, translate

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
    # Constants may outgrow the file: missing biases become zeros, and codes float32, of four times their size.
    builder = GraphBuilder(max_constant_bytes=4 * file.size_bytes + 65536)
    graph = Translation(file, builder)
    inputs = [graph.model_input(index) for index in file.inputs]
    for operator in needed(file):
        translate(graph, operator)
    outputs = [graph.model_output(index) for index in file.outputs]
    if not inputs or not outputs:
        raise InvalidArgument(f"{len(inputs)} inputs and {len(outputs)} outputs: a model needs at least one of each")
    inputs += [state.before for state in graph.states]
    outputs += [state.after for state in graph.states]
    model = builder.build(inputs, outputs)
    return LoadedModel(model, graph.infos(file.inputs), graph.infos(file.outputs))
