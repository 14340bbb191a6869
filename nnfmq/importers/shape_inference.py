"""Shapes of the results of operations, for models whose inputs are resized when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extensions import HAL_RANK, TENSOR_INT64, Scheme, extended_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import LifeTime, Operand, OperandType, Operation
from nnfmq.operations import REGISTRY, declaration
from nnfmq.operations.preparation import ShapedOp, infer_shapes, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT

__all__ = ["accepts_only_wider", "indices_of", "output_shapes", "require_plan", "results_of_32_bits", "saturated"]

_POSITIONS = ("indices", "lookups")
"""Attributes of which shape rules only use the shape; 0 is always valid."""
_PLACES_WITHIN = {"SLICE": "begin", "REVERSE": "axis", "CUMSUM": "axis"}
"""The same of operations that have other attributes of this name. Where a SLICE begins decides how long its rest is."""


def output_shapes(
    operation: Operation, operands: Sequence[Operand], contents: Mapping[int, bytes | memoryview]
) -> list[tuple[int, ...]]:
    """Return the shapes of an operation's outputs; a size that depends on the data is 0.

    `contents` are the values of the constants, by offset.

    Raises:
        InvalidArgument: If a shape depends on values that are not constants.
        GeneralFailure: If the inputs' shapes violate a constraint of the operation, or its result has no elements.
    """
    shapes = _shaped(operation, operands, contents)[0].shapes
    if any(0 in shape for shape in shapes):
        raise GeneralFailure("its result has no elements, which is not supported here")
    return [tuple(0 if size == DATA_DEPENDENT else size for size in shape) for shape in shapes]


def require_plan(operation: Operation, operands: Sequence[Operand], contents: Mapping[int, bytes | memoryview]) -> None:
    """Require what a device requires of an operation's scales and attributes when it prepares a model.

    Raises:
        InvalidArgument: If that depends on the data.
        GeneralFailure: If a constraint is violated.
    """
    shaped, weights = _shaped(operation, operands, contents)
    if any(weight is not None and weight.value is None for weight in weights):
        raise InvalidArgument("its weights are not constants")
    with np.errstate(all="ignore"):
        shaped.bind()


def _shaped(
    operation: Operation, operands: Sequence[Operand], contents: Mapping[int, bytes | memoryview]
) -> tuple[ShapedOp, list[declaration.Tensor | None]]:
    """Return an operation with its outputs' shapes, and its weights."""
    outputs = [operands[index] for index in operation.outputs]
    inputs = [operands[index] for index in operation.inputs]
    match = declaration.match(REGISTRY[operation.type], inputs, outputs)
    if match.variant.plan is None:
        raise InvalidArgument(f"{match.declaration.name} of these types cannot be resized")
    pairs = list(zip(match.parameters, inputs, strict=True))
    places = _places(match.declaration.name, pairs, contents)
    arguments = [_argument(parameter, operand, contents, places) for parameter, operand in pairs]
    weights = [
        a for (parameter, _), a in zip(pairs, arguments, strict=True) if parameter.role is declaration.Role.WEIGHT
    ]
    return infer_shapes(match, arguments, outputs), weights


def _places(
    name: str, pairs: Sequence[tuple[declaration.Parameter, Operand]], contents: Mapping[int, bytes | memoryview]
) -> tuple[str, ...]:
    """Return the attributes whose values do not decide the shapes of an operation's outputs."""
    sizes = [operand for parameter, operand in pairs if parameter.name == "size" and _is_constant(operand)]
    values = (np.frombuffer(contents[size.location.offset], declaration.NUMPY_TYPES[size.type]) for size in sizes)
    if any(-1 in each for each in values):
        return _POSITIONS
    return (*_POSITIONS, _PLACES_WITHIN.get(name.rpartition(".")[2], ""))


def _argument(
    parameter: declaration.Parameter,
    operand: Operand,
    contents: Mapping[int, bytes | memoryview],
    places: Sequence[str],
) -> declaration.Tensor | None:
    """Return an argument of a shape rule: attributes with their values. Raises InvalidArgument if one is computed."""
    if operand.lifetime == LifeTime.NO_VALUE:
        return None
    value, dtype = None, declaration.NUMPY_TYPES[operand.type]
    if _is_constant(operand):
        value = np.frombuffer(contents[operand.location.offset], dtype).reshape(operand.dimensions)
    elif parameter.name in places:
        value = np.zeros(operand.dimensions, dtype)
    elif parameter.role is declaration.Role.ATTRIBUTE:
        raise InvalidArgument(f"the shape of its result depends on its {parameter.name}, which is not a constant")
    return tensor_of(operand, operand.dimensions, value)


def _is_constant(operand: Operand) -> bool:
    return operand.lifetime == LifeTime.CONSTANT_COPY


# ----------------------------------------------------------------------------------------------------------------------
# Types and ranks that only the extension accepts.


def accepts_only_wider(operation: OperationType, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> bool:
    """Return whether the extension's operation with more types and ranks accepts operands that the HAL's does not."""
    if operation == OperationType.CAST and (inputs[0].type, outputs[0].type) == _WRAPPING_CAST:
        return True
    of_hal, wider = REGISTRY[operation], REGISTRY[extended_code(operation, Scheme.WIDER)]
    if not declaration.accepts_types(of_hal, inputs, outputs):
        return declaration.accepts_types(wider, inputs, outputs)
    return wider.shape != of_hal.shape and max(len(operand.dimensions) for operand in inputs) > HAL_RANK


_WRAPPING_CAST = (OperandType.TENSOR_INT32, OperandType.TENSOR_QUANT8_ASYMM)
"""From integers to bytes, TFLite and ONNX keep the low bits; the HAL saturates."""


# ----------------------------------------------------------------------------------------------------------------------
# Indices and sizes of 64 bits for operations that take INT32, and results of INT32 as 64 bits.


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
