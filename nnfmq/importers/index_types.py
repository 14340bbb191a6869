"""Indices and sizes of 64 bits for operations that take INT32, and results of INT32 as 64 bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import TENSOR_INT64
from nnfmq.hal.types import Operand, OperandType
from nnfmq.operations import REGISTRY

__all__ = ["indices_of", "results_of_32_bits", "saturated"]

_I32 = OperandType.TENSOR_INT32
_LIMITS = np.iinfo(np.int32)


def indices_of(operation: OperationType, inputs: Sequence[Operand]) -> list[int]:
    """Return the positions of the TENSOR_INT64 arguments that an operation takes as INT32, whatever its other types."""
    if operation not in REGISTRY:  # of a plug-in
        return []
    expanded = (overload.expand(len(inputs)) for overload in REGISTRY[operation].overloads)
    parameters = [found[0] for found in expanded if found is not None]
    return [
        position
        for position, operand in enumerate(inputs)
        if operand.type == TENSOR_INT64 and parameters and all(each[position].type == _I32 for each in parameters)
    ]


def results_of_32_bits(operation: OperationType, outputs: Sequence[Operand]) -> list[int]:
    """Return the positions of the TENSOR_INT64 outputs that an operation returns as INT32."""
    if operation not in REGISTRY:
        return []
    types, _ = REGISTRY[operation].expand_outputs(len(outputs)) or ((), 0)
    pairs = enumerate(zip(types, outputs, strict=False))
    return [at for at, (kind, operand) in pairs if kind == _I32 and operand.type == TENSOR_INT64]


def saturated(content: bytes | memoryview) -> bytes:
    """Return the elements of a TENSOR_INT64 as INT32: those beyond it become its limits, which no extent reaches."""
    wide = np.frombuffer(content, "<i8")
    narrow: bytes = np.clip(wide, _LIMITS.min, _LIMITS.max).astype("<i4").tobytes()
    return narrow
