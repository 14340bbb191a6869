"""Codes of the built-in extension `nnfmq.tflite`: what TFLite and ONNX models need beyond the HAL.

`operations.tflite_extension` declares the operations, and importers emit them. The numbers are the extension's
interface: models contain them, so they never change. The extension has prefix 1 in every process (`operations` installs
it before all others) and in every model of an importer.
"""

from __future__ import annotations

from enum import IntEnum

from nnfmq.hal.extension_codes import extension_code, with_name
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.types import OperandType

__all__ = ["DTYPES", "ELEMENTS", "NAME", "PREFIX", "TENSOR_COMPLEX64", "TfliteOperation", "operation_code"]

NAME = "nnfmq.tflite"
PREFIX = 1


class TfliteOperation(IntEnum):
    """The operations of the extension, by their number within it."""

    # 0 to 63: builtin and custom operators of TFLite that the HAL has no operation for
    GELU = 0
    COS = 1
    ROUND = 2
    SIGN = 3

    # 64 to 127: quantization schemes of TFLite that the HAL does not have

    # 128 to 159: recurrent operators

    # 160 to 199: operators of ONNX


def operation_code(operation: TfliteOperation) -> OperationType:
    """Return the code of an operation in this process and in the models of importers."""
    return with_name(OperationType(extension_code(PREFIX, operation)), f"{NAME}.{operation.name}")


TENSOR_COMPLEX64 = with_name(OperandType(extension_code(PREFIX, 0)), "TENSOR_COMPLEX64")

DTYPES: dict[OperandType, str] = {TENSOR_COMPLEX64: "complex64"}
"""NumPy's name of the element type of each operand type."""

ELEMENTS = {operand_type: ElementInfo(dtype, is_scalar=False) for operand_type, dtype in DTYPES.items()}
"""The same as the client needs it for arrays."""
