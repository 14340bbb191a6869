"""The result of one operation, and the shortest way to write its arguments.

An argument is an (operand, array) pair, which becomes an input of the model; an (operand, bytes) pair or a Python
value, which becomes a constant. With `known=False` all are inputs, of unknown rank where they are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.hal.types import Operand, OperandType, OperationType, is_scalar
from nnfmq.operations.declaration import NUMPY_TYPES
from support.executed import executed
from support.small_models import scalar

Array = npt.NDArray[Any]

_TYPES = {
    "float32": OperandType.TENSOR_FLOAT32,
    "float16": OperandType.TENSOR_FLOAT16,
    "int32": OperandType.TENSOR_INT32,
    "uint8": OperandType.TENSOR_QUANT8_ASYMM,
    "int8": OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
}


def tensor(values: Any, dtype: str = "float32", scale: float = 0.0, zero_point: int = 0) -> tuple[Operand, Array]:
    """Return an input: numbers of `dtype`, or codes where it is an 8-bit one."""
    array = np.array(values, dtype)
    return Operand(_TYPES[dtype], array.shape, scale, zero_point), array


def truths(values: Any) -> tuple[Operand, Array]:
    """Return an input of TENSOR_BOOL8, byte by byte."""
    array = np.array(values, np.uint8)
    return Operand(OperandType.TENSOR_BOOL8, array.shape), array


def result_of(code: OperationType, arguments: Sequence[Any], output: Operand, *, known: bool = True) -> Array:
    """Return what `code` computes; `output` has its type and quantization, the execution returns its shape."""
    (result,) = results_of(code, arguments, [output], known=known)
    return result


def results_of(
    code: OperationType, arguments: Sequence[Any], outputs: Sequence[Operand], *, known: bool = True
) -> list[Array]:
    """Return all outputs of `code`, as `result_of` does the only one."""
    constants = [position for position, argument in enumerate(arguments) if not _is_input(argument)]
    return executed(code, [_pair(argument) for argument in arguments], outputs, constants, unknown=not known)


def _is_input(argument: Any) -> bool:
    return isinstance(argument, tuple) and isinstance(argument[1], np.ndarray)


def _pair(argument: Any) -> tuple[Operand, Array]:
    operand, value = argument if isinstance(argument, tuple) else scalar(argument)
    if isinstance(value, np.ndarray):
        return operand, value
    array = np.frombuffer(value, NUMPY_TYPES[operand.type])
    return operand, array.reshape(() if is_scalar(operand.type) else operand.dimensions)
