"""A TFLite file executed by nnfmq and by LiteRT's reference kernels, on the same inputs, with states carried over.

LiteRT keeps variable tensors itself, initially zeros; in nnfmq they are the last inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from nnfmq.client.model.handle import initial_values
from nnfmq.engines import interpreter
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.importers import LoadedModel, load, load_source
from nnfmq.importers.file_format import read_source
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.tflite import file
from nnfmq.importers.tflite.operators import ConversionContext, convert_operator
from nnfmq.validation import validate_model

Array = npt.NDArray[Any]
Arrays = list[Array]


def stored(array: Array) -> Array:
    """Return truths as the bytes that the interpreter takes, and everything else as it is."""
    return array.view(np.uint8) if array.dtype == bool else array


def blank(info: TensorInfo) -> Array:
    """Return an array for an output, in the shape of its operand."""
    shape = (1,) if info.is_scalar or info.is_empty else info.shape
    return stored(np.full(shape, info.zero_point, info.dtype))


def _as_operand(array: Array, info: TensorInfo) -> Array:
    """Return an array for an input, in the shape of its operand."""
    return blank(info) if info.is_empty else stored(array.astype(info.dtype)).reshape(array.shape or (1,))


def _as_info(array: Array, info: TensorInfo) -> Array:
    """Return what an operand of an output stands for."""
    return array[:0].reshape(info.shape) if info.is_empty else array.reshape(() if info.is_scalar else array.shape)


class Ours:
    """A loaded model that is executed with its states carried from one execution to the next."""

    def __init__(self, loaded: LoadedModel) -> None:
        validate_model(loaded.model)
        self.loaded = loaded
        self.states: Arrays = [stored(array) for array in initial_values(loaded.states)]
        self._program = interpreter.prepare(loaded.model)

    def __call__(self, inputs: Sequence[Array]) -> Arrays:
        outputs = [*map(blank, self.loaded.outputs), *map(np.empty_like, self.states)]
        given = [_as_operand(array, info) for array, info in zip(inputs, self.loaded.inputs, strict=False)]
        self._program.execute([*given, *self.states], outputs)
        count = len(outputs) - len(self.states)
        self.states = outputs[count:]
        return [_as_info(array, info) for array, info in zip(outputs, self.loaded.outputs, strict=False)]


def ours(content: bytes, shapes: Mapping[str | int, Sequence[int]] | None = None) -> Ours:
    """Load `content`, with inputs of `shapes`, and make it ready to run."""
    return Ours(load(content, shapes=shapes))


def ours_following_tflite(content: bytes) -> Ours:
    """Load `content` as `nnfmq.compat.litert` does, with TFLite's definitions, and make it ready to run."""
    return Ours(load_source(replace(read_source(content), follows_tflite=True)))


class Theirs:
    """A model loaded by LiteRT, with its reference kernels or the `optimized` ones. `keep_all` keeps inner tensors."""

    def __init__(
        self,
        content: bytes,
        *,
        keep_all: bool = False,
        optimized: bool = False,
        shapes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
        kernels = litert.OpResolverType
        self.runner = litert.Interpreter(
            model_content=content,
            experimental_op_resolver_type=kernels.BUILTIN_WITHOUT_DEFAULT_DELEGATES
            if optimized
            else kernels.BUILTIN_REF,
            experimental_preserve_all_tensors=keep_all,
            num_threads=1,
        )
        for position, shape in (shapes or {}).items():
            self.runner.resize_tensor_input(self.runner.get_input_details()[position]["index"], shape)
        self.runner.allocate_tensors()

    def __call__(self, inputs: Sequence[Array]) -> Arrays:
        for detail, array in zip(self.runner.get_input_details(), inputs, strict=True):
            self.runner.set_tensor(detail["index"], array.astype(detail["dtype"]))
        self.runner.invoke()
        return [stored(self.runner.get_tensor(detail["index"])) for detail in self.runner.get_output_details()]

    def tensor(self, index: int) -> Array:
        """Return an inner tensor of the last run."""
        found: Array = self.runner.get_tensor(index)
        return found


class Layers:
    """The operators of a file one by one, each on given inputs, so that differences do not accumulate."""

    def __init__(self, content: bytes) -> None:
        self._size_bytes = len(content)
        self._file = file.read(content)
        self.operators = list(self._file.operators())

    def run(self, operator: file.TfliteOperator, tensor: Callable[[int], Array]) -> Array:
        """Return the only output of `operator`; `tensor` gives its inputs by their index in the file."""
        self._file.outputs = operator.outputs
        graph = ConversionContext(self._file, GraphBuilder(max_constant_bytes=8 * self._size_bytes))
        given = [index for index in operator.inputs if self._file.tensor(index).data is None]
        inputs = [graph.model_input(index) for index in given]
        convert_operator(graph, operator)
        outputs = [graph.model_output(index) for index in operator.outputs]
        (found,) = (blank(info) for info in graph.infos(operator.outputs, outputs))
        program = interpreter.prepare(graph.builder.build(inputs, outputs))
        program.execute([tensor(index) for index in given], [found])
        return found
