"""Reductions over axes, ARG_MAX and ARG_MIN, TOPK_V2 and LSH_PROJECTION.

A tensor reduced to one number has rank 0 in TFLite and shape (1,) in the HAL.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import Scheme, extended_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import OperandType
from nnfmq.importers.tflite.file import TfliteOperator
from nnfmq.importers.tflite.operators.conversion import SIXTEEN_BITS, ConversionContext, OpConverter
from nnfmq.importers.tflite.operators.options import (
    are_quantized,
    dequantized,
    emit_dequantized,
    emit_same_quantization,
    normalized_axis,
)

__all__ = ["CONVERTERS"]

_OF_FLOATS = (OperationType.REDUCE_PROD, OperationType.REDUCE_SUM)
_LOGICAL, _MAX_LOGICAL_RANK = ("REDUCE_ALL", "REDUCE_ANY"), 4
_PROJECTIONS = {1: 3, 2: 2}  # TFLite's SPARSE is NNAPI's third kind: its first one is deprecated


def _reduction(operation_type: OperationType) -> Callable[[ConversionContext, TfliteOperator], None]:
    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        _require_known_rank(context, operator)
        axes = context.value(operator.inputs[1])
        keeps = operator.options is not None and bool(operator.options.KeepDims())
        is_mean = operation_type == OperationType.MEAN  # the only one that takes a number
        flag = context.builder.int32(int(keeps)) if is_mean else context.builder.boolean(keeps)
        shape = _reduced_to_one(context, operator)
        own = _own_operation(context, operator, operation_type)
        if own != operation_type:
            arguments = [context.value(operator.inputs[0]), axes, context.builder.boolean(keeps)]
            return context.emit(own, operator, *arguments, shape=shape)
        if operation_type in _OF_FLOATS:
            return emit_dequantized(
                context, operator, operation_type, dequantized(context, operator.inputs[0]), axes, flag, shape=shape
            )
        return emit_same_quantization(context, operator, operation_type, axes, flag, shape=shape)

    return convert


def _require_known_rank(context: ConversionContext, operator: TfliteOperator) -> None:
    """Require that axes which are no constant leave the same number of dimensions, at least one, whatever they are.

    A result of rank 0 has shape (1,) in the HAL; an axis may be given twice.
    """
    x, axes = (context.file.tensor(index) for index in operator.inputs)
    keeps = operator.options is not None and bool(operator.options.KeepDims())
    if axes.data is not None or not x.shape:
        return
    if not keeps and (math.prod(axes.shape) > 1 or len(x.shape) == 1):
        raise InvalidArgument(f"the rank of its result depends on {axes}, which is not a constant")
    if operator.name in _LOGICAL and len(x.shape) > _MAX_LOGICAL_RANK:
        raise InvalidArgument(f"rank {len(x.shape)}: at most {_MAX_LOGICAL_RANK} is supported")


def _own_operation(
    context: ConversionContext, operator: TfliteOperator, operation_type: OperationType
) -> OperationType:
    """Return TFLite's operation on 8-bit tensors where the HAL has none: MEAN keeps the quantization there."""
    x, y = context.file.tensor(operator.inputs[0]), context.file.tensor(operator.outputs[0])
    keeps = (x.scale, x.zero_point) == (y.scale, y.zero_point)
    if operation_type == OperationType.MEAN and keeps and not context.file.follows_tflite:
        return operation_type
    is_quantized = are_quantized(context, x.index, y.index)
    return extended_code(operation_type, Scheme.TFLITE) if is_quantized else operation_type


def _reduced_to_one(context: ConversionContext, operator: TfliteOperator) -> tuple[int, ...]:
    """Return (1,) if every axis is reduced, so that the output has rank 0, and () if not or if that is unknown."""
    x, axes = (context.file.tensor(index) for index in operator.inputs)
    if axes.data is None or not x.shape:
        return ()
    reduced = {normalized_axis(axis, len(x.shape)) for axis in context.ints(axes.index)}
    return (1,) if len(reduced) == len(x.shape) else ()


def _arg(operation_type: OperationType) -> Callable[[ConversionContext, TfliteOperator], None]:
    def convert(context: ConversionContext, operator: TfliteOperator) -> None:
        x = context.file.tensor(operator.inputs[0])
        axis = normalized_axis(context.one_int(operator.inputs[1]), len(x.shape))
        shape = (1,) if len(x.shape) == 1 else ()
        context.emit(operation_type, operator, context.value(x.index), context.builder.int32(axis), shape=shape)

    return convert


def _topk_v2(context: ConversionContext, operator: TfliteOperator) -> None:
    arguments = [context.value(operator.inputs[0]), context.builder.int32(context.one_int(operator.inputs[1]))]
    outputs = [context.result(index) for index in operator.outputs]
    own = context.file.follows_tflite and context.builder[arguments[0]].type != SIXTEEN_BITS
    code = extended_code(OperationType.TOPK_V2, Scheme.TFLITE) if own else OperationType.TOPK_V2
    context.builder.operation(code, arguments, *outputs)


def _lsh_projection(context: ConversionContext, operator: TfliteOperator) -> None:
    kind = operator.options.Type()
    if kind not in _PROJECTIONS:
        raise InvalidArgument(f"projection type {kind} is neither SPARSE (1) nor DENSE (2)")
    hashes, x = map(context.value, operator.inputs[:2])
    weights = context.optional(operator, 2, OperandType.TENSOR_FLOAT32)
    context.emit(OperationType.LSH_PROJECTION, operator, hashes, x, weights, context.builder.int32(_PROJECTIONS[kind]))


_TWO = range(2, 3)
_REDUCTIONS = {
    "MEAN": OperationType.MEAN,
    "REDUCE_ALL": OperationType.REDUCE_ALL,
    "REDUCE_ANY": OperationType.REDUCE_ANY,
    "REDUCE_MAX": OperationType.REDUCE_MAX,
    "REDUCE_MIN": OperationType.REDUCE_MIN,
    "REDUCE_PROD": OperationType.REDUCE_PROD,
    "SUM": OperationType.REDUCE_SUM,
}

CONVERTERS: dict[str, OpConverter] = {
    **{name: OpConverter(_TWO, _reduction(code), "ReducerOptions") for name, code in _REDUCTIONS.items()},
    "ARG_MAX": OpConverter(_TWO, _arg(OperationType.ARGMAX)),
    "ARG_MIN": OpConverter(_TWO, _arg(OperationType.ARGMIN)),
    "LSH_PROJECTION": OpConverter(range(2, 4), _lsh_projection, "LSHProjectionOptions", True),
    "TOPK_V2": OpConverter(_TWO, _topk_v2, output_counts=_TWO),
}
