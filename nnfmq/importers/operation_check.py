"""Check that a device can compute what an importer emits, so that `load` refuses a file and names the operator.

A driver makes the same checks when a model is prepared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.extension_codes import extension_prefix
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import PREFIX
from nnfmq.hal.types import LifeTime, Operand, Operation, is_scalar
from nnfmq.importers.graph_builder import GraphBuilder
from nnfmq.importers.usual_operations import is_usual

__all__ = ["require_computable"]

_FEW_ELEMENTS = 1 << 14
_USUAL_SCALES = (2.0**-24, 2.0**4)
_CALLS = (OperationType.IF, OperationType.WHILE)


def require_computable(builder: GraphBuilder, begin: int) -> None:
    """Require that a device can compute each operation from `begin` on: its types, shapes and attributes.

    Results of unknown shape get that which follows from the inputs. Shapes that follow from data are not checked, and
    neither are operations of other people's extensions: only the driver knows them.

    Raises:
        InvalidArgument: If an operation violates a rule; the message says which.
    """
    for operation in builder.operations[begin:]:
        is_known = extension_prefix(operation.type) in (0, PREFIX) and operation.type not in _CALLS
        if is_known and not is_usual(builder, operation):
            inputs, outputs = ([builder[index] for index in each] for each in (operation.inputs, operation.outputs))
            _require_match(operation, inputs, outputs)
            if not any(map(_is_unknown, inputs)):
                _find_shapes(builder, operation, outputs)
                _require_plan(builder, operation)


def _require_match(operation: Operation, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    from nnfmq.operations import REGISTRY
    from nnfmq.operations.signature import match

    try:
        found = match(REGISTRY[operation.type], inputs, outputs)
    except InvalidArgument as error:
        raise InvalidArgument(f"no device can take its types: {operation.type.name}: {error}") from None
    if found.variant.plan is None:
        kinds = ", ".join(operand.type.name for operand in inputs)
        raise InvalidArgument(f"no device computes {operation.type.name} of {kinds}")


def _find_shapes(builder: GraphBuilder, operation: Operation, outputs: Sequence[Operand]) -> None:
    try:
        shapes = builder.output_shapes(operation)
    except InvalidArgument:  # they depend on the data
        return
    except GeneralFailure as error:
        raise InvalidArgument(f"no device can compute it: {operation.type.name}: {error}") from None
    for index, operand, shape in zip(operation.outputs, outputs, shapes, strict=True):
        if _is_unknown(operand):
            builder.set_dimensions(index, shape)


def _require_plan(builder: GraphBuilder, operation: Operation) -> None:
    """Require the scales and attributes that a plan requires. With large weights it is made for extreme scales only."""
    operands = [builder[index] for index in (*operation.inputs, *operation.outputs)]
    constants = [operand.dimensions for operand in operands if operand.lifetime == LifeTime.CONSTANT_COPY]
    if sum(map(math.prod, constants)) > _FEW_ELEMENTS and not any(map(_is_extreme, operands)):
        return
    try:
        builder.require_plan(operation)
    except InvalidArgument:  # they depend on the data
        return
    except GeneralFailure as error:
        raise InvalidArgument(f"no device can compute it: {operation.type.name}: {error}") from None


def _is_extreme(operand: Operand) -> bool:
    return operand.scale != 0 and not _USUAL_SCALES[0] < operand.scale < _USUAL_SCALES[1]


def _is_unknown(operand: Operand) -> bool:
    is_tensor = operand.lifetime != LifeTime.NO_VALUE and not is_scalar(operand.type)
    return is_tensor and (not operand.dimensions or 0 in operand.dimensions)
