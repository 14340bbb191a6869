"""TensorInfo: what an application needs to know of a model's input or output to make a numpy array for it.

Importers fill it from a model file, the client from the model that it prepared. It holds numpy's name of the element
type rather than a dtype, so that the vocabulary stays free of numpy. A scalar operand has the shape (), which
`is_scalar` tells from a tensor of unknown rank; an unknown extent is 0, as in `Operand.dimensions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import Operand, OperandType, is_scalar

__all__ = ["ElementInfo", "TensorInfo", "dtype_name", "operand_info"]

_DTYPES: dict[OperandType, str] = {
    OperandType.FLOAT32: "float32",
    OperandType.INT32: "int32",
    OperandType.UINT32: "uint32",
    OperandType.TENSOR_FLOAT32: "float32",
    OperandType.TENSOR_INT32: "int32",
    OperandType.TENSOR_QUANT8_ASYMM: "uint8",
    OperandType.BOOL: "bool",
    OperandType.TENSOR_QUANT16_SYMM: "int16",
    OperandType.TENSOR_FLOAT16: "float16",
    OperandType.TENSOR_BOOL8: "bool",
    OperandType.FLOAT16: "float16",
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: "int8",
    OperandType.TENSOR_QUANT16_ASYMM: "uint16",
    OperandType.TENSOR_QUANT8_SYMM: "int8",
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "int8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output: real value = scale × (element − zero_point); scale 0.0 means not quantized.

    `is_state` marks what the caller carries from an output of one execution to the same input of the next. It starts
    with every element at `zero_point`. States are the last inputs and the last outputs, in the same order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: float = 0.0
    zero_point: int = 0
    is_scalar: bool = False
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class ElementInfo:
    """What an application needs to know of an extension's operand type: numpy's name of its elements, and its kind."""

    dtype: str
    is_scalar: bool


def dtype_name(operand_type: OperandType) -> str:
    """Return numpy's name of an operand type's elements. Raises InvalidArgument for SUBGRAPH and the OEM types."""
    try:
        return _DTYPES[operand_type]
    except KeyError:
        raise InvalidArgument(f"operand type {operand_type!r} has no numpy element type") from None


def operand_info(
    operand: Operand, name: str = "", extension_types: Mapping[OperandType, ElementInfo] | None = None
) -> TensorInfo:
    """Return the TensorInfo of a model's operand; `extension_types` has what is known of extensions' types."""
    element = (extension_types or {}).get(operand.type)
    if element is None:
        element = ElementInfo(dtype_name(operand.type), is_scalar(operand.type))
    return TensorInfo(name, operand.dimensions, element.dtype, operand.scale, operand.zero_point, element.is_scalar)
