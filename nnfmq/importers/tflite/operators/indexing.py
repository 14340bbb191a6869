"""Operators on indices, segments and matrices that become operations of the extension `nnfmq.tflite`."""

from __future__ import annotations

from collections.abc import Callable

from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.importers.tflite.file import TfliteOperator
from nnfmq.importers.tflite.operators.conversion import ConversionContext, OpConverter
from nnfmq.importers.tflite.operators.elementwise import of_inputs
from nnfmq.importers.tflite.operators.options import emit_reshape, normalized_axis

__all__ = ["CONVERTERS"]

_REDUCTIONS = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3}


def _cumsum(context: ConversionContext, operator: TfliteOperator) -> None:
    options = operator.options
    flags = (options is not None and options.Exclusive(), options is not None and options.Reverse())
    arguments = [*map(context.value, operator.inputs), *(context.builder.boolean(bool(flag)) for flag in flags)]
    context.emit(operation_code(TfliteOperation.CUMSUM), operator, *arguments)


def _one_hot(context: ConversionContext, operator: TfliteOperator) -> None:
    axis = context.builder.int32(operator.options.Axis() if operator.options is not None else 0)
    arguments, code = list(map(context.value, operator.inputs)), operation_code(TfliteOperation.ONE_HOT)
    if context.file.tensor(operator.inputs[0]).rank:
        return context.emit(code, operator, *arguments, axis)
    depth = context.one_int(operator.inputs[1])
    row = context.temporary(context.file.tensor(operator.outputs[0]), (1, depth))
    context.builder.operation(code, [*arguments, context.builder.int32(1)], row)
    return emit_reshape(context, operator, row, (depth,))


def _unsorted_segment(reduction: int) -> Callable[[ConversionContext, TfliteOperator], None]:
    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        arguments = [*map(context.value, operator.inputs), context.builder.int32(reduction)]
        context.emit(operation_code(TfliteOperation.UNSORTED_SEGMENT), operator, *arguments)

    return convert


def _reverse_sequence(context: ConversionContext, operator: TfliteOperator) -> None:
    x, options = context.file.tensor(operator.inputs[0]), operator.options
    axes = [normalized_axis(axis, len(x.shape)) for axis in (options.SeqDim(), options.BatchDim())]
    arguments = [*map(context.value, operator.inputs), *map(context.builder.int32, axes)]
    context.emit(operation_code(TfliteOperation.REVERSE_SEQUENCE), operator, *arguments)


def _unique(context: ConversionContext, operator: TfliteOperator) -> None:
    results = [context.result(index) for index in operator.outputs]
    context.builder.operation(operation_code(TfliteOperation.UNIQUE), [context.value(operator.inputs[0])], *results)


def _rank(context: ConversionContext, operator: TfliteOperator) -> None:
    """Convert a rank that is an output of the model: copy a constant; folding does all others."""
    rank = context.builder.int32_vector([context.file.tensor(operator.inputs[0]).rank])
    context.emit(OperationType.RESHAPE, operator, rank, context.builder.int32_vector([1]), shape=(1,))


_ONE, _TWO, _THREE, _FOUR = range(1, 2), range(2, 3), range(3, 4), range(4, 5)

CONVERTERS: dict[str, OpConverter] = {
    "CUMSUM": OpConverter(_TWO, _cumsum, "CumsumOptions"),
    "DYNAMIC_UPDATE_SLICE": OpConverter(_THREE, of_inputs(TfliteOperation.DYNAMIC_UPDATE_SLICE)),
    "GATHER_ND": OpConverter(_TWO, of_inputs(TfliteOperation.GATHER_ND)),
    "MATRIX_DIAG": OpConverter(_ONE, of_inputs(TfliteOperation.MATRIX_DIAG)),
    "MATRIX_SET_DIAG": OpConverter(_TWO, of_inputs(TfliteOperation.MATRIX_SET_DIAG)),
    "ONE_HOT": OpConverter(_FOUR, _one_hot, "OneHotOptions"),
    "RANGE": OpConverter(_THREE, of_inputs(TfliteOperation.RANGE)),
    "RANK": OpConverter(_ONE, _rank),
    "REVERSE_SEQUENCE": OpConverter(_TWO, _reverse_sequence, "ReverseSequenceOptions", True),
    "SCATTER_ND": OpConverter(_THREE, of_inputs(TfliteOperation.SCATTER_ND)),
    "SEGMENT_SUM": OpConverter(_TWO, of_inputs(TfliteOperation.SEGMENT_SUM)),
    "SHAPE": OpConverter(_ONE, of_inputs(TfliteOperation.SHAPE), "ShapeOptions"),
    "SPARSE_TO_DENSE": OpConverter(_FOUR, of_inputs(TfliteOperation.SPARSE_TO_DENSE)),
    "UNIQUE": OpConverter(_ONE, _unique, output_counts=_TWO),
    "WHERE": OpConverter(_ONE, of_inputs(TfliteOperation.WHERE)),
    **{
        f"UNSORTED_SEGMENT_{name}": OpConverter(_THREE, _unsorted_segment(number))
        for name, number in _REDUCTIONS.items()
    },
}
