"""IF and WHILE, whose subgraphs become referenced subgraphs of the model."""

from __future__ import annotations

from collections.abc import Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import Operand
from nnfmq.importers.tflite_file import TfliteOperator
from nnfmq.importers.tflite_operators.conversion import ConversionContext, OpConverter

__all__ = ["CONVERTERS"]


def _if(context: ConversionContext, operator: TfliteOperator) -> None:
    options, builder = operator.options, context.builder
    condition, *values = _known(context, operator.inputs)
    then = context.call(options.ThenSubgraphIndex(), values)
    otherwise = context.call(options.ElseSubgraphIndex(), values)
    _require_same("branches", then.outputs, otherwise.outputs)
    callees = [builder.callee(callee.index) for callee in (then, otherwise)]
    _emit(context, operator, OperationType.IF, [condition, *callees, *values], then.outputs)


def _while(context: ConversionContext, operator: TfliteOperator) -> None:
    options, builder = operator.options, context.builder
    values = _known(context, operator.inputs)
    condition = context.call(options.CondSubgraphIndex(), values)
    body = context.call(options.BodySubgraphIndex(), values)
    if len(condition.outputs) != 1:
        raise InvalidArgument(f"its condition has {len(condition.outputs)} outputs: one is required")
    _require_same("values before and after the loop", tuple(builder[value] for value in values), body.outputs)
    callees = [builder.callee(callee.index) for callee in (condition, body)]
    _emit(context, operator, OperationType.WHILE, [*callees, *values], body.outputs)


def _known(context: ConversionContext, indexes: Sequence[int]) -> list[int]:
    """Return the operands of tensors; those of rank 0 have one dimension from here on."""
    values = [context.value(index) for index in indexes]
    for index, value in zip(indexes, values, strict=True):
        if not context.builder[value].dimensions and context.file.tensor(index).rank == 0:
            context.builder.set_dimensions(value, (1,))
    return values


def _require_same(what: str, first: Sequence[Operand], second: Sequence[Operand]) -> None:
    kinds = [[(o.type, o.dimensions, o.scale, o.zero_point) for o in operands] for operands in (first, second)]
    if kinds[0] != kinds[1]:
        raise InvalidArgument(f"its {what} differ in number, type, shape or quantization: that is not supported")


def _emit(
    context: ConversionContext,
    operator: TfliteOperator,
    operation_type: OperationType,
    arguments: Sequence[int],
    results: Sequence[Operand],
) -> None:
    if len(operator.outputs) != len(results):
        raise InvalidArgument(f"{len(operator.outputs)} outputs for {len(results)} results of its subgraphs")
    outputs = [context.result(index, o.dimensions) for index, o in zip(operator.outputs, results, strict=True)]
    for output, result in zip(outputs, results, strict=True):
        context.builder.set_dimensions(output, result.dimensions)
    context.builder.operation(operation_type, arguments, *outputs)


_MANY = range(1, 1 << 16)

CONVERTERS: dict[str, OpConverter] = {
    "IF": OpConverter(range(2, 1 << 16), _if, "IfOptions", True, _MANY),
    "WHILE": OpConverter(_MANY, _while, "WhileOptions", True, _MANY),
}
