"""Check that a device can take the operand types of what an importer emits, so that `load` names the operator.

The declarations are imported only for operations that are not among the usual ones. The first two of them, RFFT2D and
COMPLEX_ABS for instance, take 13 ms and 1.2 MiB, and most models have only floats, or 8-bit values in few operations.
"""

from __future__ import annotations

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extension_codes import extension_prefix
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.tflite_codes import PREFIX
from nnfmq.hal.types import OperandType, Operation
from nnfmq.importers.graph_builder import GraphBuilder

__all__ = ["require_types"]

_FLOAT = OperandType.TENSOR_FLOAT32
_BYTES = (OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED)
_OF_BYTES = frozenset(
    OperationType[name]
    for name in (
        *("ADD", "AVERAGE_POOL_2D", "CONCATENATION", "CONV_2D", "DEPTHWISE_CONV_2D", "DEQUANTIZE", "FULLY_CONNECTED"),
        *("HARD_SWISH", "LOGISTIC", "MAX_POOL_2D", "MEAN", "MUL", "PAD", "QUANTIZE", "RELU", "RELU6", "RESHAPE"),
        *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "SOFTMAX", "STRIDED_SLICE", "SUB", "TANH", "TRANSPOSE"),
    )
)
_CALLS = (OperationType.IF, OperationType.WHILE)


def require_types(builder: GraphBuilder, begin: int) -> None:
    """Require that each operation from `begin` on has a kernel for the types of its operands.

    Operations of other people's extensions are not checked: only the driver knows them.

    Raises:
        InvalidArgument: If one has none; the message says which types it takes.
    """
    for operation in builder.operations[begin:]:
        foreign = extension_prefix(operation.type) not in (0, PREFIX)
        if not foreign and operation.type not in _CALLS and not _is_usual(builder, operation):
            _require_match(builder, operation)


def _is_usual(builder: GraphBuilder, operation: Operation) -> bool:
    kinds = {builder[operation.inputs[0]].type, *(builder[index].type for index in operation.outputs)}
    return kinds == {_FLOAT} or (operation.type in _OF_BYTES and kinds <= {_FLOAT, *_BYTES})


def _require_match(builder: GraphBuilder, operation: Operation) -> None:
    from nnfmq.operations import REGISTRY
    from nnfmq.operations.signature import match

    inputs, outputs = ([builder[index] for index in indexes] for indexes in (operation.inputs, operation.outputs))
    try:
        found = match(REGISTRY[operation.type], inputs, outputs)
    except InvalidArgument as error:
        raise InvalidArgument(f"no device can take its types: {operation.type.name}: {error}") from None
    if found.variant.plan is None:
        kinds = ", ".join(operand.type.name for operand in inputs)
        raise InvalidArgument(f"no device computes {operation.type.name} of {kinds}")
