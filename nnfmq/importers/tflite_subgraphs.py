"""Import of the subgraphs of a TFLite file that IF and WHILE call.

Each call imports its subgraph with the operands that it is given, so that their shapes are known inside. The number of
calls and their depth are limited, because the tables of a hostile file can overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import LifeTime
from nnfmq.importers.operation_check import require_computable
from nnfmq.importers.problems import Problems
from nnfmq.importers.tflite_folding import Folding
from nnfmq.importers.tflite_operators import ConversionContext, convert_operator, live_operators
from nnfmq.importers.tflite_operators.conversion import CalledSubgraph

__all__ = ["Subgraphs"]

_CALLS_MAX = 64
_DEPTH_MAX = 8


class Subgraphs:
    """The calls of one import so far. It refers to no context: a cycle would keep the content of the file."""

    def __init__(self) -> None:
        self._calls = 0
        self._depth = 0

    def call(self, caller: ConversionContext, index: int, inputs: Sequence[int]) -> CalledSubgraph:
        """Import a subgraph to be called with these operands of the caller.

        Raises:
            InvalidArgument: If there are too many calls, or the subgraph is not supported; the message has all reasons.
        """
        self._calls += 1
        if self._calls > _CALLS_MAX or self._depth >= _DEPTH_MAX:
            raise InvalidArgument(f"more than {_CALLS_MAX} subgraphs are called, or deeper than {_DEPTH_MAX}")
        self._depth += 1
        try:
            return self._import(caller, index, inputs)
        finally:
            self._depth -= 1

    def _import(self, caller: ConversionContext, index: int, inputs: Sequence[int]) -> CalledSubgraph:
        context = ConversionContext(caller.file.subgraph(index), caller.builder.child())
        context.subgraphs = self
        given = self._give(caller, context, inputs)
        problems, folding = Problems(), Folding(context)
        convert = folding.or_convert(partial(convert_operator, context))
        for operator in live_operators(context.file):
            begin = context.builder.operation_count
            try:
                convert(operator)
                require_computable(context.builder, begin)
            except InvalidArgument as error:
                problems.add(str(error), operator.index, operator.name, context.file.types(operator))
                context.assume_written(operator)
        try:
            problems.raise_if_any()
            outputs = _outputs(context)
        except InvalidArgument as error:
            raise InvalidArgument(f"subgraph {index}: {error}") from None
        if context.states() or context.variables:
            raise InvalidArgument(f"subgraph {index} has states or variables: that is not supported")
        number = context.builder.refer(given, outputs)
        return CalledSubgraph(number, tuple(context.builder[output] for output in outputs))

    def _give(self, caller: ConversionContext, context: ConversionContext, inputs: Sequence[int]) -> list[int]:
        """Return operands of the subgraph's inputs, of the types and shapes of the caller's."""
        if len(inputs) != len(context.file.inputs):
            raise InvalidArgument(f"{len(inputs)} values for a subgraph of {len(context.file.inputs)} inputs")
        given = []
        for tensor_index, outer in zip(context.file.inputs, inputs, strict=True):
            operand, tensor = caller.builder[outer], context.file.tensor(tensor_index)
            if operand.type != tensor.type or not operand.dimensions or 0 in operand.dimensions:
                raise InvalidArgument(f"{tensor} of a subgraph gets a value of another type or of unknown shape")
            inner = replace(operand, lifetime=LifeTime.SUBGRAPH_INPUT, location=type(operand.location)())
            given.append(context.builder.operand(inner))
            context.given(tensor_index, given[-1])
        return given


def _outputs(context: ConversionContext) -> list[int]:
    """Return the operands of the outputs: copies of inputs, constants and other outputs, which the HAL requires."""
    found: list[int] = []
    for index in context.file.outputs:
        operand = context.value(index)
        if not context.builder[operand].dimensions:
            context.builder.set_dimensions(operand, context.file.tensor(index).shape or (1,))
        if 0 in context.builder[operand].dimensions:
            raise InvalidArgument(f"{context.file.tensor(index)} is a result of unknown shape")
        is_output = context.builder[operand].lifetime == LifeTime.SUBGRAPH_OUTPUT
        found.append(operand if is_output and operand not in found else context.copied(operand))
    return found
