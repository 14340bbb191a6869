"""Shapes of the results of operations, for models whose inputs are resized when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import LifeTime, Operand, Operation
from nnfmq.operations import REGISTRY, signature
from nnfmq.operations.prepare import infer_shapes, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT

__all__ = ["output_shapes"]

_POSITIONS = ("indices", "lookups")  # attributes of which shape rules only use the shape; 0 is always valid


def output_shapes(
    operation: Operation, operands: Sequence[Operand], contents: Mapping[int, bytes | memoryview]
) -> list[tuple[int, ...]]:
    """Return the shapes of an operation's outputs. `contents` are the values of the constants, by offset.

    Raises:
        InvalidArgument: If a shape depends on the data.
        GeneralFailure: If the inputs' shapes violate a constraint of the operation, or its result has no elements.
    """
    outputs = [operands[index] for index in operation.outputs]
    inputs = [operands[index] for index in operation.inputs]
    match = signature.match(REGISTRY[operation.type], inputs, outputs)
    pairs = zip(match.parameters, inputs, strict=True)
    arguments = [_argument(parameter, operand, contents) for parameter, operand in pairs]
    if match.variant.plan is None:
        raise InvalidArgument(f"{match.declaration.name} of these types cannot be resized")
    shapes = list(infer_shapes(match, arguments, outputs).shapes)
    if any(DATA_DEPENDENT in shape for shape in shapes):
        raise InvalidArgument("the shape of its result depends on the data")
    if any(0 in shape for shape in shapes):
        raise GeneralFailure("its result has no elements, which is not supported here")
    return shapes


def _argument(
    parameter: signature.Parameter, operand: Operand, contents: Mapping[int, bytes | memoryview]
) -> signature.Tensor | None:
    """Return what a shape rule takes: attributes with their values. Raises InvalidArgument if one is computed."""
    if operand.lifetime == LifeTime.NO_VALUE:
        return None
    value, dtype = None, signature.NUMPY_TYPES[operand.type]
    if operand.lifetime == LifeTime.CONSTANT_COPY:
        value = np.frombuffer(contents[operand.location.offset], dtype).reshape(operand.dimensions)
    elif parameter.name in _POSITIONS:
        value = np.zeros(operand.dimensions, dtype)
    elif parameter.role is signature.Role.ATTRIBUTE:
        raise InvalidArgument(f"the shape of its result depends on its {parameter.name}, which is not a constant")
    return tensor_of(operand, operand.dimensions, value)
