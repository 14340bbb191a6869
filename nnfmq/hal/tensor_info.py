"""TensorInfo: name, shape, element type and quantization of a model's input or output.

Importers create it from a model file, and the client from the model that it prepared. The element type is NumPy's name
of it instead of a dtype, so that `hal` does not import NumPy. A scalar operand and a tensor of rank 0 have the shape ()
and `is_scalar`; a tensor of unknown rank has the shape () without it. An unknown dimension is 0, as in
`Operand.dimensions`, unless `is_empty` says that the tensor has no elements.

The HAL has no tensors of rank 0 and none without elements: the operand of either has the shape (1,), and that one
element of an empty tensor means nothing. The client restores the shape, which is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import clipped, tensor_text
from nnfmq.hal.types import Operand, OperandType, is_scalar

__all__ = ["ElementInfo", "StateInfo", "TensorInfo", "dtype_name", "operand_info"]

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


class TensorInfo(Struct, frozen=True):
    """One input or output of a model: real value = scale × (element − zero_point); scale 0.0 means not quantized.

    `is_bfloat16`: the elements are bfloat16, which NumPy lacks: `dtype` is "uint16", and has their bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: float = 0.0
    zero_point: int = 0
    is_scalar: bool = False
    is_empty: bool = False
    is_bfloat16: bool = False

    @property
    def has_unknown_shape(self) -> bool:
        """True if a dimension, or the rank, is unknown."""
        return not self.is_empty and (0 in self.shape or not (self.shape or self.is_scalar))

    def __repr__(self) -> str:
        given = [clipped(repr(self.name), 64), tensor_text(self.dtype, self.shape, self.is_empty)]
        given += [f"scale {self.scale:g}, zero point {self.zero_point}"] if self.scale else []
        given += ["scalar"] if self.is_scalar else []
        given += ["empty"] if self.is_empty else []
        given += ["bfloat16"] if self.is_bfloat16 else []
        return f"<TensorInfo: {', '.join(given)}>"


class StateInfo(Struct, frozen=True):
    """A state of a model: what its executions keep between them.

    The HAL's model has an input and an output of this tensor for each state, after all others and in the order of the
    states. `initial` has the elements at first, as stored bytes; if it is empty, each element is the zero point.
    """

    tensor: TensorInfo
    initial: bytes = b""

    def __repr__(self) -> str:
        return f"<StateInfo: {repr(self.tensor).removeprefix('<TensorInfo: ')}"


class ElementInfo(Struct, frozen=True):
    """NumPy's element type of an extension's operand type, and whether the type is a scalar."""

    dtype: str
    is_scalar: bool


def dtype_name(operand_type: OperandType) -> str:
    """Return NumPy's name of the element type of an operand type.

    Raises:
        InvalidArgument: If the type has none: SUBGRAPH, OEM types, extensions.
    """
    try:
        return _DTYPES[operand_type]
    except KeyError:
        raise InvalidArgument(f"operand type {operand_type!r} has no NumPy element type") from None


def operand_info(
    operand: Operand, name: str = "", extension_types: Mapping[OperandType, ElementInfo] | None = None
) -> TensorInfo:
    """Return the TensorInfo of an operand; `nnfmq.client.connection.device` describes the operand types of extensions.

    Raises:
        InvalidArgument: If the operand's type has no NumPy element type.
    """
    element = (extension_types or {}).get(operand.type)
    if element is None:
        element = ElementInfo(dtype_name(operand.type), is_scalar(operand.type))
    return TensorInfo(name, operand.dimensions, element.dtype, operand.scale, operand.zero_point, element.is_scalar)
