"""The result of one operation: a model made of it is validated, prepared by the interpreter and executed once.

An argument is an (operand, array) pair, which becomes an input of the model; an (operand, bytes) pair or a Python
value, which becomes a constant. With `known=False` all are inputs, of unknown rank where they are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.engines import interpreter
from nnfmq.hal.types import Operand, OperandType, OperationType, is_scalar
from nnfmq.operations.signature import NUMPY_TYPES
from nnfmq.validation import validate_model
from support.small_models import one_operation, scalar

Array = npt.NDArray[Any]

_MOST_BYTES = 1 << 16
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
    """Return what `code` computes; `output` says its type and quantization, its shape comes from the execution."""
    given = list(arguments) if known else [_as_input(argument) for argument in arguments]
    arrays = [argument[1] for argument in given if _is_input(argument)]
    operands = [argument[0] if _is_input(argument) else argument for argument in given]
    model = one_operation(code, operands, replace(output, dimensions=()))
    validate_model(model)
    buffer = bytearray(_MOST_BYTES)
    (shape,) = interpreter.prepare(model).execute(arrays, [buffer])
    dtype = NUMPY_TYPES[output.type]
    return np.frombuffer(buffer, dtype, int(np.prod(shape.dimensions))).reshape(shape.dimensions)


def _is_input(argument: Any) -> bool:
    return isinstance(argument, tuple) and isinstance(argument[1], np.ndarray)


def _as_input(argument: Any) -> tuple[Operand, Array]:
    operand, value = argument if isinstance(argument, tuple) else scalar(argument)
    array = value if isinstance(value, np.ndarray) else np.frombuffer(value, NUMPY_TYPES[operand.type])
    array = array.reshape(()) if is_scalar(operand.type) else array
    return replace(operand, dimensions=_unknown(operand)), array


def _unknown(operand: Operand) -> tuple[int, ...]:
    """Return dimensions that say as little as validation allows: the channels of a per-channel operand are known."""
    if operand.channel_quant is None:
        return ()
    channel = operand.channel_quant.channel_dim
    return tuple(extent if axis == channel else 0 for axis, extent in enumerate(operand.dimensions))
