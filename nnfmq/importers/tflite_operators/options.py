"""Arguments that many operators have alike: fused activations, padding, strides, axes, positive numbers.

Options are TFLite's codes and numbers; the answers are operands, or Python values that have been checked.
"""

from __future__ import annotations

from collections.abc import Callable

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import FusedActivationFunc, Operand, OperandType, PaddingScheme
from nnfmq.importers.tflite_file import Operator
from nnfmq.importers.tflite_operators.conversion import CODES, Translation

__all__ = [
    "activation",
    "as_they_are",
    "axis_of",
    "dilation",
    "emit_reals",
    "keeping_codes",
    "no_activation",
    "padding",
    "positive",
    "reals",
    "reshaped",
    "size_of",
    "strides",
]

_ACTIVATIONS = {
    0: FusedActivationFunc.NONE,
    1: FusedActivationFunc.RELU,
    2: FusedActivationFunc.RELU1,
    3: FusedActivationFunc.RELU6,
}
_PADDINGS = {0: PaddingScheme.SAME, 1: PaddingScheme.VALID}


def activation(graph: Translation, operator: Operator) -> int:
    """Return the fused activation; none where the operator has no options."""
    code = operator.options.FusedActivationFunction() if operator.options is not None else 0
    if code not in _ACTIVATIONS:
        raise InvalidArgument(f"fused activation {code} is not supported: NONE, RELU, RELU_N1_TO_1 and RELU6 are")
    return graph.builder.int32(_ACTIVATIONS[code])


def no_activation(operator: Operator) -> None:
    """Refuse a fused activation where NNAPI's form has none."""
    if operator.options is not None and operator.options.FusedActivationFunction():
        raise InvalidArgument("a fused activation is not supported here")


def padding(graph: Translation, operator: Operator) -> int:
    """Return the padding scheme."""
    code = operator.options.Padding()
    if code not in _PADDINGS:
        raise InvalidArgument(f"padding {code} is neither SAME (0) nor VALID (1)")
    return graph.builder.int32(_PADDINGS[code])


def positive(graph: Translation, **values: int) -> list[int]:
    """Return scalars that must be positive; the names are for the message."""
    for name, value in values.items():
        if value < 1:
            raise InvalidArgument(f"{name} is {value}: it must be positive")
    return [graph.builder.int32(value) for value in values.values()]


def strides(graph: Translation, operator: Operator) -> list[int]:
    """Return the strides, width before height."""
    options = operator.options
    return positive(graph, stride_w=options.StrideW(), stride_h=options.StrideH())


def dilation(graph: Translation, operator: Operator) -> list[int]:
    """Return the arguments behind the activation: none without dilation, else layout (NHWC) and the two factors."""
    width, height = operator.options.DilationWFactor(), operator.options.DilationHFactor()
    if (width, height) == (1, 1):
        return []
    return [graph.builder.boolean(False), *positive(graph, dilation_w=width, dilation_h=height)]


def axis_of(axis: int, rank: int) -> int:
    """Return `axis` counted from the front."""
    if not -rank <= axis < rank:
        raise InvalidArgument(f"axis {axis} is not in {-rank}..{rank - 1}")
    return axis % rank


def as_they_are(operation_type: OperationType) -> Callable[[Translation, Operator], None]:
    """Return the rule of operations whose NNAPI arguments are TFLite's inputs, as they are."""

    def apply(graph: Translation, operator: Operator) -> None:
        graph.emit(operation_type, operator, *map(graph.value, operator.inputs))

    return apply


def reals(graph: Translation, index: int) -> int:
    """Return the real numbers of a tensor: the tensor itself, unless it is one of codes."""
    tensor = graph.file.tensor(index)
    if tensor.type not in CODES:
        return graph.value(index)
    if tensor.data is not None:
        return graph.widened(tensor)
    real = graph.builder.operand(Operand(OperandType.TENSOR_FLOAT32, tensor.shape))
    graph.builder.operation(OperationType.DEQUANTIZE, [graph.value(index)], real)
    return real


def emit_reals(
    graph: Translation, operator: Operator, operation_type: OperationType, *inputs: int, shape: tuple[int, ...] = ()
) -> None:
    """Add an operation on real numbers that writes the operator's only output, quantized where that has codes."""
    y = graph.file.tensor(operator.outputs[0])
    if y.type not in CODES:
        return graph.emit(operation_type, operator, *inputs, shape=shape)
    real = graph.builder.operand(Operand(OperandType.TENSOR_FLOAT32, y.shape or shape))
    graph.builder.operation(operation_type, inputs, real)
    return graph.emit(OperationType.QUANTIZE, operator, real, shape=shape)


def keeping_codes(
    graph: Translation, operator: Operator, operation_type: OperationType, *rest: int, shape: tuple[int, ...] = ()
) -> None:
    """Add an operation whose output NNAPI wants quantized like its input; where it is not, on real numbers.

    `rest` are the arguments behind the first input, `shape` is as for `emit`.
    """
    x, y = graph.file.tensor(operator.inputs[0]), graph.file.tensor(operator.outputs[0])
    if (x.scale, x.zero_point) == (y.scale, y.zero_point):
        return graph.emit(operation_type, operator, graph.value(x.index), *rest, shape=shape)
    return emit_reals(graph, operator, operation_type, reals(graph, x.index), *rest, shape=shape)


def size_of(graph: Translation, index: int, stated: tuple[int, ...]) -> list[int]:
    """Return a size that the file gives as a constant, or computes: then it is the `stated` one, if any is."""
    is_computed = graph.file.tensor(index).data is None
    return list(stated) if is_computed and stated else graph.ints(index)


def reshaped(graph: Translation, operator: Operator, flat: int, shape: tuple[int, ...]) -> None:
    """Add the RESHAPE that brings `flat` into `shape`, which is that of the operator's only output."""
    graph.emit(OperationType.RESHAPE, operator, flat, graph.builder.int32_vector(shape), shape=shape)
