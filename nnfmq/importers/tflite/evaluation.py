"""The values of operations on constants, for importers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnfmq.hal.types import LifeTime, Operand, Operation
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.operations import REGISTRY, declaration
from nnfmq.operations.declaration import NUMPY_TYPES, Array, Role
from nnfmq.operations.preparation import infer_shapes, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT

__all__ = ["evaluate"]


def evaluate(builder: GraphBuilder, wanted: Sequence[int], bytes_max: int) -> list[Array] | None:
    """Return the values of the `wanted` operands, computed by the operations; None if they take too many bytes.

    Raises:
        InvalidArgument: If an operation does not exist for these types.
        GeneralFailure: If a constraint of an operation is violated.
    """
    values: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for operation in builder.operations:
            results = _results(builder, operation, values, bytes_max)
            if results is None:
                return None
            values.update(zip(operation.outputs, results, strict=True))
            bytes_max -= sum(result.nbytes for result in results)
    return [_value(builder, index, values) for index in wanted]


def _results(
    builder: GraphBuilder, operation: Operation, values: dict[int, Array], bytes_max: int
) -> list[Array] | None:
    inputs, outputs = ([builder[index] for index in indexes] for indexes in (operation.inputs, operation.outputs))
    match = declaration.match(REGISTRY[operation.type], inputs, outputs)
    arrays = [
        None if operand.lifetime == LifeTime.NO_VALUE else _value(builder, index, values)
        for index, operand in zip(operation.inputs, inputs, strict=True)
    ]
    arguments = [
        None if array is None else tensor_of(operand, array.shape, None if parameter.role is Role.DATA else array)
        for parameter, operand, array in zip(match.parameters, inputs, arrays, strict=True)
    ]
    shaped = infer_shapes(match, arguments, outputs)
    if sum(map(_bytes, shaped.shapes, outputs)) > bytes_max:
        return None
    data = [array for parameter, array in zip(match.parameters, arrays, strict=True) if parameter.role is Role.DATA]
    found: Any = shaped.bind()(*data)
    results = list(found) if len(outputs) > 1 else [found]
    return [
        np.ascontiguousarray(np.asarray(result, NUMPY_TYPES[o.type]))
        for result, o in zip(results, outputs, strict=True)
    ]


def _bytes(shape: tuple[int, ...], operand: Operand) -> int:
    return math.prod(extent for extent in shape if extent != DATA_DEPENDENT) * NUMPY_TYPES[operand.type].itemsize


def _value(builder: GraphBuilder, index: int, values: dict[int, Array]) -> Array:
    if index in values:
        return values[index]
    operand = builder[index]
    return np.frombuffer(builder.content(index), NUMPY_TYPES[operand.type]).reshape(operand.dimensions)
