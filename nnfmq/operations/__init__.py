"""The HAL's operations: one declaration each, found in `REGISTRY` by OperationType.

A declaration (see `signature`) is everything that is known of an operation: forms, types per feature level, shape
rule, kernels. Validation, the interpreter and compiling engines read the same one. A file holds one family; what
vendors add is installed by `extensions`.
"""

from __future__ import annotations

from nnfmq.hal.types import OperationType
from nnfmq.operations import (
    activation,
    arranging,
    blocks,
    boxes,
    comparison,
    control_flow,
    conversion,
    convolution,
    detection,
    elementwise,
    fully_connected,
    generation,
    grouped,
    keypoints,
    lookup,
    lstm,
    lstm_16bit,
    matmul,
    normalization,
    padding,
    pooling,
    projection,
    quantized_lstm,
    recurrent,
    reduction,
    regions,
    resizing,
    sampling,
    selection,
    shaping,
    slicing,
    softmax,
    transposed,
    unary,
)
from nnfmq.operations.signature import Declaration

_FAMILIES = (
    activation,
    arranging,
    blocks,
    boxes,
    comparison,
    control_flow,
    conversion,
    convolution,
    detection,
    elementwise,
    fully_connected,
    generation,
    grouped,
    keypoints,
    lookup,
    lstm,
    lstm_16bit,
    matmul,
    normalization,
    padding,
    pooling,
    projection,
    quantized_lstm,
    recurrent,
    reduction,
    regions,
    resizing,
    sampling,
    selection,
    shaping,
    slicing,
    softmax,
    transposed,
    unary,
)

REGISTRY: dict[OperationType, Declaration] = {
    declaration.code: declaration for family in _FAMILIES for declaration in family.DECLARATIONS
}

__all__ = ["REGISTRY", "Declaration"]
