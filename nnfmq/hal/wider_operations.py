"""Operations of the HAL that the extension `nnfmq.tflite` offers for more operand types and for ranks above 4.

Those on elements of 64 bits and UINT32 (`tflite_codes.WIDE_TYPES`) are all operations that the extension has by the
same name.

An importer emits operations of the HAL, and `widened` replaces those whose operands the HAL does not accept. Functions
of elements and of rows take tensors of higher ranks in another shape (`flat_shape`). 16-bit tensors have operations of
their own (`tflite_codes.SIXTEEN_BIT`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import TENSOR_COMPLEX64, WIDE_TYPES, TfliteOperation, operation_code
from nnfmq.hal.types import Operand, OperandType

__all__ = ["WIDER_OPERATIONS", "WiderOperation", "flat_shape", "widened"]

_HAL_RANK = 4
_INT32, _BOOL8 = OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8
_INT8 = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
_UINT8 = OperandType.TENSOR_QUANT8_ASYMM


class WiderOperation(Struct, frozen=True):
    """The operand types that only the extension accepts, and the argument that has the type.

    `is_limited`: the HAL limits the rank of the arguments to 4.
    """

    types: frozenset[OperandType] = frozenset()
    position: int = 0
    is_limited: bool = True


_REST = frozenset((_INT32, _BOOL8))  # besides floats and 8-bit values
_FEW = frozenset((_BOOL8,))
_COMPLEX = frozenset((TENSOR_COMPLEX64,))
_ARITHMETIC = WiderOperation()
_MOVED = WiderOperation(_REST)

WIDER_OPERATIONS: dict[OperationType, WiderOperation] = {
    OperationType.ADD: _ARITHMETIC,
    OperationType.SUB: _ARITHMETIC,
    OperationType.MUL: _ARITHMETIC,
    OperationType.DIV: _ARITHMETIC,
    OperationType.POW: WiderOperation(frozenset((_INT32,)), is_limited=False),
    OperationType.RESHAPE: WiderOperation(_FEW | _COMPLEX),
    OperationType.SQUEEZE: WiderOperation(_REST | _COMPLEX),
    OperationType.EXPAND_DIMS: WiderOperation(_FEW | _COMPLEX),
    OperationType.CONCATENATION: _MOVED,
    OperationType.PACK: WiderOperation(_FEW, position=1),
    OperationType.SLICE: WiderOperation(_FEW, is_limited=False),
    OperationType.STRIDED_SLICE: _MOVED,
    OperationType.SPLIT: WiderOperation(_FEW, is_limited=False),
    OperationType.PAD: _MOVED,
    OperationType.PAD_V2: _MOVED,
    OperationType.MIRROR_PAD: WiderOperation(_FEW, is_limited=False),
    OperationType.TRANSPOSE: _MOVED,
    OperationType.REVERSE: WiderOperation(_FEW, is_limited=False),
    OperationType.TILE: WiderOperation(_FEW, is_limited=False),
    OperationType.GATHER: WiderOperation(_FEW, is_limited=False),
    OperationType.SELECT: WiderOperation(_FEW, position=1, is_limited=False),
    OperationType.MEAN: WiderOperation(frozenset((_INT32,))),
    OperationType.REDUCE_MAX: WiderOperation(frozenset((_INT32,))),
    OperationType.REDUCE_MIN: WiderOperation(frozenset((_INT32,))),
    OperationType.REDUCE_SUM: WiderOperation(frozenset((_INT32,))),
    OperationType.REDUCE_PROD: WiderOperation(frozenset((_INT32,))),
    OperationType.CAST: WiderOperation(frozenset((_BOOL8, _INT8)), is_limited=False),
}


def widened(operation_type: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> OperationType:
    """Return the extension's operation of the same name if the HAL's does not accept the operands."""
    if any(operand.type in WIDE_TYPES for operand in (*inputs, *outputs)):
        return _OF_THE_EXTENSION.get(operation_type, operation_type)
    wider = WIDER_OPERATIONS.get(operation_type)
    if wider is None:
        return operation_type
    data = inputs[wider.position]
    too_high = wider.is_limited and len(data.dimensions) > _HAL_RANK
    if operation_type == OperationType.CAST:
        # INT32 to bytes wraps around in TFLite and ONNX; the HAL saturates.
        kinds = {data.type, outputs[0].type}
        unusual = (len(kinds) > 1 and bool(kinds & wider.types)) or (data.type, outputs[0].type) == (_INT32, _UINT8)
    else:
        unusual = data.type in wider.types
    if operation_type in _BINARY:
        too_high = any(len(operand.dimensions) > _HAL_RANK for operand in inputs[:2])
    return operation_code(TfliteOperation[operation_type.name]) if unusual or too_high else operation_type


def flat_shape(operation_type: OperationType, inputs: Sequence[Operand]) -> tuple[int, ...]:
    """Return the shape of rank 1 or 2 in which the HAL takes the first input, whose rank is above 4; else ().

    It has an operation on elements or on the rows of the last dimension, whose result has the input's shape.
    """
    shape = inputs[0].dimensions if inputs else ()
    if len(shape) <= _HAL_RANK or 0 in shape:
        return ()
    if operation_type in _OF_ELEMENTS:
        return (math.prod(shape),)
    return (math.prod(shape[:-1]), shape[-1]) if len(inputs) == _OF_ROWS.get(operation_type) else ()


_OF_ELEMENTS = frozenset(
    OperationType[name] for name in ("DEQUANTIZE", "FLOOR", "LOGISTIC", "RELU", "RELU1", "RELU6", "TANH")
)
_OF_ROWS = {
    OperationType.L2_NORMALIZATION: 1,
    operation_code(TfliteOperation.Q8_L2_NORMALIZATION): 1,
    OperationType.SOFTMAX: 2,
}
"""The number of inputs without an axis."""

_OF_THE_EXTENSION = {
    OperationType[operation.name]: operation_code(operation)
    for operation in TfliteOperation
    if operation.name in OperationType.__members__ and operation is not TfliteOperation.TOPK_V2  # TFLite's definition
}
_BINARY = (OperationType.ADD, OperationType.SUB, OperationType.MUL, OperationType.DIV)
