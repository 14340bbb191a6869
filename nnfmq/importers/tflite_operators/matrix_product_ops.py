"""BATCH_MATMUL, whose batches broadcast in TFLite. Those of the HAL's operation are equal, and its rank is 4 at most.

If one right matrix is for all rows, they become the rows of one left matrix. Otherwise the batches are repeated to
their common shape, and become one dimension.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import DataLocation, LifeTime, OperandType
from nnfmq.importers.tflite_file import TfliteOperator, TfliteTensor
from nnfmq.importers.tflite_operators.conversion import QUANTIZED_TYPES, ConversionContext, OpConverter
from nnfmq.importers.tflite_operators.options import dynamically_quantized, emit_reshape

__all__ = ["CONVERTERS"]

_HAL_RANK = 4
Shape = tuple[int, ...]


def _batch_matmul(context: ConversionContext, operator: TfliteOperator) -> None:
    left, right = (context.file.tensor(index) for index in operator.inputs)
    options = operator.options
    adjoints = (bool(options.AdjX()), bool(options.AdjY())) if options is not None else (False, False)
    factors = _factors(context, operator, left, right, adjoints[0])
    flags = [context.builder.boolean(adjoint) for adjoint in adjoints]
    batches = left.shape[:-2], right.shape[:-2]
    is_the_hal_s = batches[0] == batches[1] and len(left.shape) <= _HAL_RANK
    if is_the_hal_s or not left.shape or not right.shape:
        return context.emit(OperationType.BATCH_MATMUL, operator, *factors, *flags)
    if min(len(left.shape), len(right.shape)) < 2:
        raise InvalidArgument(f"the shapes {list(left.shape)} and {list(right.shape)} are not both of matrices")
    batch = _common_batch(*batches)
    rows, columns = left.shape[-1 if adjoints[0] else -2], right.shape[-2 if adjoints[1] else -1]
    if math.prod(batches[1]) == 1 and not adjoints[0]:  # the batch is the left's
        rows_of_all = math.prod(batch) * rows
        shapes: tuple[Shape, Shape] = (rows_of_all, left.shape[-1]), right.shape[-2:]
        product: Shape = rows_of_all, columns
    else:
        factors = [_repeated(context, factor, batch) for factor in factors]
        shapes = (math.prod(batch), *left.shape[-2:]), (math.prod(batch), *right.shape[-2:])
        product = math.prod(batch), rows, columns
    factors = [_reshaped(context, factor, shape) for factor, shape in zip(factors, shapes, strict=True)]
    flat = context.temporary(context.file.tensor(operator.outputs[0]), product)
    context.builder.operation(OperationType.BATCH_MATMUL, [*factors, *flags], flat)
    return emit_reshape(context, operator, flat, (*batch, rows, columns))


def _factors(
    context: ConversionContext, operator: TfliteOperator, left: TfliteTensor, right: TfliteTensor, adjoint_left: bool
) -> list[int]:
    """Return the operands of both sides; TFLite quantizes a left side of floats for a constant of 8 bits."""
    is_hybrid = left.type == OperandType.TENSOR_FLOAT32 and right.type in QUANTIZED_TYPES and right.data is not None
    if not is_hybrid:
        return [context.value(left.index), context.value(right.index)]
    factors = [context.value(left.index), context.dequantized_constant(right)]
    if left.shape and not adjoint_left:
        asymmetric = operator.options is not None and bool(operator.options.AsymmetricQuantizeInputs())
        factors[0] = dynamically_quantized(context, left, left.shape[-1], asymmetric)
    return factors


def _common_batch(left: Shape, right: Shape) -> Shape:
    try:
        return tuple(np.broadcast_shapes(left, right))
    except ValueError:
        raise InvalidArgument(f"the batches {list(left)} and {list(right)} have no common shape") from None


def _repeated(context: ConversionContext, value: int, batch: Shape) -> int:
    """Return matrices repeated along dimensions of the batch that are 1, or that they do not have."""
    shape = context.builder[value].dimensions
    aligned = (1,) * (len(batch) + 2 - len(shape)) + shape
    multiples = [wanted // extent for wanted, extent in zip(batch, aligned[:-2], strict=True)]
    if max(multiples, default=1) == 1:
        return value
    value = _reshaped(context, value, aligned)
    found = _like(context, value, (*batch, *shape[-2:]))
    context.builder.operation(OperationType.TILE, [value, context.builder.int32_vector([*multiples, 1, 1])], found)
    return found


def _reshaped(context: ConversionContext, value: int, shape: Shape) -> int:
    if context.builder[value].dimensions == shape:
        return value
    found = _like(context, value, shape)
    context.builder.operation(OperationType.RESHAPE, [value, context.builder.int32_vector(shape)], found)
    return found


def _like(context: ConversionContext, value: int, shape: Shape) -> int:
    operand = context.builder[value]
    return context.builder.operand(
        replace(operand, dimensions=shape, lifetime=LifeTime.TEMPORARY_VARIABLE, location=DataLocation())
    )


CONVERTERS: dict[str, OpConverter] = {"BATCH_MATMUL": OpConverter(range(2, 3), _batch_matmul, "BatchMatMulOptions")}
