"""Passes over a finished ONNX graph: weights, activations and float16 arithmetic that become part of a neighbour."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.extensions import TfliteOperation, operation_code
from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.hal.types import CLAMPS, FusedActivationFunc, LifeTime, Operand, OperandType, Operation
from nnfmq.importers.graph_builder import GraphBuilder

__all__ = ["GraphRewriting", "fold_into_weights", "fuse_hard_swish", "widen_half_precision"]

Array: TypeAlias = npt.NDArray[Any]


class GraphRewriting:
    """The operations of a subgraph by number, None for one that a pass has removed."""

    def __init__(self, builder: GraphBuilder, outputs: Sequence[int]) -> None:
        self.builder = builder
        self.operations: list[Operation | None] = list(builder.operations)
        self._outputs = frozenset(outputs)
        self._readers: dict[int, list[int]] = {}
        self._producers: dict[int, int] = {}
        for number, operation in enumerate(builder.operations):
            self._producers.update(dict.fromkeys(operation.outputs, number))
            for index in operation.inputs:
                self._readers.setdefault(index, []).append(number)

    def remove_unread(self) -> None:
        """Remove the operations whose results nothing reads, those included that only such operations read."""
        for number, operation in reversed(list(enumerate(self.operations))):
            if operation is None or any(o in self._outputs or self._readers.get(o) for o in operation.outputs):
                continue
            for index in operation.inputs:
                self._readers[index].remove(number)
            self.operations[number] = None

    def finish(self) -> None:
        """Give the builder the operations that remain."""
        self.builder.replace_operations([operation for operation in self.operations if operation is not None])

    def operation(self, number: int) -> Operation:
        """Return an operation that was not removed."""
        operation = self.operations[number]
        assert operation is not None, "a pass removes only what nothing else reads"
        return operation

    def producer(self, index: int) -> int | None:
        """Return the operation that writes an operand."""
        return self._producers.get(index)

    def reader_count(self, index: int) -> int:
        """Return how often operations read an operand."""
        return len(self._readers.get(index, ()))

    def only_reader(self, index: int) -> int | None:
        """Return the operation that alone reads an operand, once; None if the operand is an output, too."""
        is_alone = self.reader_count(index) == 1 and index not in self._outputs
        return self._readers[index][0] if is_alone else None

    def is_read_only_by(self, index: int, numbers: Collection[int]) -> bool:
        """Return whether no operations but those of `numbers` read an operand, and it is no output."""
        return index not in self._outputs and all(reader in numbers for reader in self._readers.get(index, ()))

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of an operand."""
        return self.builder[index].dimensions

    def has_activation(self, index: int) -> bool:
        """Return whether the constant scalar `index` is another activation than NONE."""
        return any(self.builder.content(index))

    def is_float_constant(self, index: int) -> bool:
        """Return whether an operand is a constant tensor of float32."""
        operand = self.builder[index]
        return operand.type == OperandType.TENSOR_FLOAT32 and operand.lifetime == LifeTime.CONSTANT_COPY

    def floats(self, index: int) -> Array | None:
        """Return the value of a float32 constant, as float64; None for all other operands."""
        if not self.is_float_constant(index):
            return None
        content = np.frombuffer(self.builder.content(index), np.float32)
        return content.reshape(self.shape(index)).astype(np.float64)


# ----------------------------------------------------------------------------------------------------------------------
# Constants and activations that follow a float32 convolution or matrix product become part of it.
#
# Files often have a normalization as operations of its own: a product is multiplied by a factor for each channel, an
# offset is added, and negative elements become 0. Factors go into the weights, offsets into the bias, and an activation
# becomes the operation's own, as in the optimizations of ONNX Runtime and TFLite's converter.


Shape: TypeAlias = tuple[int, ...]
_AFFINE: Mapping[OperationType, Callable[[Array], tuple[Any, Any]]] = {
    OperationType.ADD: lambda constant: (1.0, constant),
    OperationType.DIV: lambda constant: (1 / constant, 0.0),
    OperationType.MUL: lambda constant: (constant, 0.0),
    OperationType.SUB: lambda constant: (1.0, -constant),
}
"""Factor and offset of each operation on a result and a constant."""
_COMMUTATIVE = (OperationType.ADD, OperationType.MUL)


class _Parameters(Struct, frozen=True):
    """The positions of activation and layout among the inputs, and the axis of the weights' output channels."""

    activation: int
    layout: int | None
    channel_axis: int


_WEIGHTED = {
    OperationType.CONV_2D: _Parameters(9, 10, 0),
    OperationType.DEPTHWISE_CONV_2D: _Parameters(10, 11, 3),
    OperationType.FULLY_CONNECTED: _Parameters(3, None, 0),
    OperationType.GROUPED_CONV_2D: _Parameters(10, 11, 0),
    OperationType.TRANSPOSE_CONV_2D: _Parameters(9, 10, 0),
}
"""The operations that have weights, with explicit paddings."""


class _Product(Struct, frozen=True):
    """Weights and bias with a factor and an offset for each channel. `weight_shape` broadcasts factors to weights."""

    weights: Array
    bias: Array
    weight_shape: Shape
    factor: Array
    offset: Array

    def then(self, factor: Array, offset: Array) -> _Product | None:
        """Return the product of which each result is multiplied by `factor`, then added to `offset`.

        None if weights or bias would not fit float32.
        """
        with np.errstate(all="ignore"):
            found = replace(self, factor=self.factor * factor, offset=self.offset * factor + offset)
            return found if all(np.isfinite(array).all() for array in found.folded()) else None

    def folded(self) -> tuple[Array, Array]:
        """Return new weights and a new bias, as float32."""
        weights, bias = self.weights * self.factor.reshape(self.weight_shape), self.bias * self.factor + self.offset
        return weights.astype(np.float32), bias.astype(np.float32)


def fold_into_weights(graph: GraphRewriting) -> None:
    """Fold constants and activations of a subgraph into the weighted operations before them."""
    folding = _Folding(graph)
    for number, operation in enumerate(graph.operations):
        if operation is not None and operation.type in _WEIGHTED and folding.can_fold(operation):
            folding.fold(number)


class _Folding(Struct, frozen=True):
    """Folds into the operations of a graph, one after the other."""

    graph: GraphRewriting

    def can_fold(self, operation: Operation) -> bool:
        """Return whether weights and bias are float32 constants, and there is no activation yet."""
        parameters, constants = _WEIGHTED[operation.type], operation.inputs[1:3]
        if len(operation.inputs) <= (parameters.layout or parameters.activation):
            return False  # implicit paddings
        has_activation = self.graph.has_activation(operation.inputs[parameters.activation])
        return not has_activation and all(map(self.graph.is_float_constant, constants))

    def fold(self, number: int) -> None:
        """Fold the operations after operation `number`, each of which alone reads the result before it."""
        operation = self.graph.operation(number)
        product: _Product | None = None
        axis = self._channel_axis(operation)
        activation, last = FusedActivationFunc.NONE, number
        while activation == FusedActivationFunc.NONE:
            result = self.graph.operation(last).outputs[0]
            reader = self.graph.only_reader(result)
            if reader is None:
                break
            following = self.graph.operation(reader)
            if following.type == OperationType.RESHAPE:
                after = _axis_after(self.graph.shape(result), axis, self.graph.shape(following.outputs[0]))
                if after is None:
                    break
                axis, last = after, reader
                continue
            if following.type in CLAMPS:
                activation = CLAMPS[following.type]
            else:
                affine = self._affine(following, result, axis)
                then = None if affine is None else (product or self._product(operation)).then(*affine)
                if then is None:
                    break
                product = then
            self.graph.operations[last] = replace(self.graph.operation(last), outputs=following.outputs)
            self.graph.operations[reader] = None
        self._replace(number, product, activation)

    def _product(self, operation: Operation) -> _Product:
        weights, bias = (self.graph.floats(index) for index in operation.inputs[1:3])
        assert weights is not None and bias is not None, "can_fold has seen that they are constants"
        shape = [1] * weights.ndim
        shape[_WEIGHTED[operation.type].channel_axis] = len(bias)
        return _Product(weights, bias, tuple(shape), np.ones(len(bias)), np.zeros(len(bias)))

    def _channel_axis(self, operation: Operation) -> int:
        layout = _WEIGHTED[operation.type].layout
        is_nchw = layout is not None and any(self.graph.builder.content(operation.inputs[layout]))
        return 1 if is_nchw else len(self.graph.shape(operation.outputs[0])) - 1

    def _affine(self, operation: Operation, x: int, axis: int) -> tuple[Array, Array] | None:
        """Return factor and offset of an operation on `x` and a constant with an element for each channel."""
        if operation.type not in _AFFINE:
            return None
        first, second, activation = operation.inputs
        other = second if first == x else first
        constant = self.graph.floats(other)
        is_swapped = other == first and operation.type not in _COMMUTATIVE
        if is_swapped or constant is None or self.graph.has_activation(activation):
            return None
        shape = self.graph.shape(x)
        along = [extent if number == axis else 1 for number, extent in enumerate(shape)]
        if constant.ndim > len(shape) or np.broadcast_shapes(constant.shape, along) != tuple(along):
            return None
        with np.errstate(all="ignore"):
            factor, offset = _AFFINE[operation.type](np.broadcast_to(constant, along).reshape(-1))
        return np.asarray(factor), np.asarray(offset)

    def _replace(self, number: int, product: _Product | None, activation: FusedActivationFunc) -> None:
        """Give an operation its new weights and bias, if there are any, and its activation."""
        operation, builder = self.graph.operation(number), self.graph.builder
        inputs = list(operation.inputs)
        inputs[_WEIGHTED[operation.type].activation] = builder.int32(activation)
        for position, array in enumerate(product.folded() if product else (), 1):
            is_shared = self.graph.reader_count(inputs[position]) > 1
            inputs[position] = builder.with_content(inputs[position], array.tobytes(), is_shared)
        self.graph.operations[number] = replace(operation, inputs=tuple(inputs))


def _axis_after(shape: Shape, axis: int, reshaped: Shape) -> int | None:
    """Return the axis that has the channels after a reshape; None if the channels are not one axis then."""
    before, count = int(np.prod(shape[:axis])), shape[axis]
    found = [n for n, extent in enumerate(reshaped) if extent == count and int(np.prod(reshaped[:n])) == before]
    return found[-1] if found else None


# ----------------------------------------------------------------------------------------------------------------------
# Activations that a file writes as several operations become one: x * RELU6(x + 3) / 6 is HARD_SWISH.
#
# ONNX has HardSwish since opset 14; exporters for older ones write Add, Clip, Mul and Div.


@dataclass(frozen=True, slots=True)
class _HardSwish:
    """The operand x, and the numbers of the operations before the last one."""

    x: int
    operations: tuple[int, ...]


def fuse_hard_swish(graph: GraphRewriting) -> None:
    """Replace the operations of each hard swish of float32 by HARD_SWISH."""
    for number, operation in enumerate(graph.operations):
        found = None if operation is None else _hard_swish(graph, number)
        if operation is not None and found is not None:
            for removed in found.operations:
                graph.operations[removed] = None
            graph.operations[number] = replace(operation, type=Op.HARD_SWISH, inputs=(found.x,))


def _hard_swish(graph: GraphRewriting, number: int) -> _HardSwish | None:
    """Return the hard swish whose last operation, a division by 6, is operation `number`."""
    divided = _operand_beside(graph, number, Op.DIV, 6)
    divided = _operand_beside(graph, number, Op.MUL, 1 / 6) if divided is None else divided
    product = None if divided is None else _writer(graph, divided, Op.MUL)
    if product is None or graph.has_activation(graph.operation(product).inputs[2]):
        return None
    first, second, _ = graph.operation(product).inputs
    for x, gate in ((first, second), (second, first)):
        clamp = _writer(graph, gate, Op.RELU6)
        total = None if clamp is None else _writer(graph, graph.operation(clamp).inputs[0], Op.ADD)
        if clamp is not None and total is not None and _operand_beside(graph, total, Op.ADD, 3) == x:
            return _HardSwish(x, (total, clamp, product))
    return None


def _writer(graph: GraphRewriting, index: int, code: Op) -> int | None:
    """Return the operation that writes an operand, if it is a `code` and its result is read only once."""
    producer = graph.producer(index)
    if producer is None or graph.only_reader(index) is None:
        return None
    operation = graph.operations[producer]
    return producer if operation is not None and operation.type == code else None


def _operand_beside(graph: GraphRewriting, number: int, code: Op, constant: float) -> int | None:
    """Return the other operand of a `code` with a float32 constant that has one element, without activation."""
    operation = graph.operation(number)
    if operation.type != code or graph.has_activation(operation.inputs[2]):
        return None
    for x, other in (operation.inputs[:2], operation.inputs[1::-1]):
        values = graph.floats(other)
        if values is not None and values.size == 1 and values.item() == np.float32(constant):
            return x if graph.shape(x) == graph.shape(operation.outputs[0]) else None
        if code == Op.DIV:
            break  # the divisor is second
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic of float16 that follows other arithmetic is computed in float32: what leaves it is rounded once.
#
# The square of an element above 255 is beyond float16, and the normalization that takes its root is not. ONNX Runtime
# computes chains of float16 operators on CPUs in the same way. An operation alone stays what it is: engines compute
# each one in float32.


_F16, _F32 = OperandType.TENSOR_FLOAT16, OperandType.TENSOR_FLOAT32


def _codes(names: str) -> frozenset[OperationType]:
    """Return the operations of these names, of the HAL and of the extension."""
    found = {OperationType[name] for name in names.split() if name in OperationType.__members__}
    own = (TfliteOperation[name] for name in names.split() if name in TfliteOperation.__members__)
    return frozenset(found.union(map(operation_code, own)))


_ARITHMETIC = CLAMPS.keys() | _codes(
    "ABS ACOS ACOSH ADD ASIN ASINH ATAN ATANH COS COSH DIV ELU ERF EXP FLOOR GELU HARD_SWISH L2_NORMALIZATION "
    "LOCAL_RESPONSE_NORMALIZATION LOG LOGISTIC LOG_SOFTMAX MAXIMUM MEAN MINIMUM MISH MUL NEG POW PRELU REDUCE_MAX "
    "REDUCE_MIN REDUCE_PROD REDUCE_SUM ROUND RSQRT SELECT SIGN SIN SINH SOFTMAX SOFTPLUS SQRT SUB TAN TANH"
)
"""Comparisons are not among them: equal numbers of float16 may differ before they are rounded."""
_MOVEMENT = _codes("CONCATENATION EXPAND_DIMS RESHAPE SLICE SPLIT SQUEEZE STRIDED_SLICE TILE TRANSPOSE")


def widen_half_precision(graph: GraphRewriting) -> None:
    """Compute the float16 arithmetic of a subgraph in float32 where operations follow each other.

    The numbers of operations change: no other pass can follow.
    """
    numbers = _connected(graph)
    if numbers:
        graph.operations = list(_Widening(graph, numbers).run())


def _connected(graph: GraphRewriting) -> frozenset[int]:
    """Return the arithmetic that reads or feeds other arithmetic, and the movements of elements between."""
    kinds = {
        number: operation.type
        for number, operation in enumerate(graph.operations)
        if operation is not None and operation.type in _ARITHMETIC | _MOVEMENT and _is_half(graph, operation)
    }
    sources = {
        number: {producer for index in _halves(graph, number) if (producer := graph.producer(index)) in kinds}
        for number in kinds
    }
    after_arithmetic: set[int] = set()
    before_arithmetic: set[int] = set()
    for number in kinds:  # in the order of execution
        if any(kinds[source] in _ARITHMETIC or source in after_arithmetic for source in sources[number]):
            after_arithmetic.add(number)
    for number in reversed(kinds):
        if kinds[number] in _ARITHMETIC or number in before_arithmetic:
            before_arithmetic |= sources[number]
    is_between = after_arithmetic & before_arithmetic
    ends = {number for number in after_arithmetic ^ before_arithmetic if kinds[number] in _ARITHMETIC}
    return frozenset(is_between | ends)


def _is_half(graph: GraphRewriting, operation: Operation) -> bool:
    return graph.builder[operation.outputs[0]].type == _F16


def _halves(graph: GraphRewriting, number: int) -> list[int]:
    return [index for index in graph.operation(number).inputs if graph.builder[index].type == _F16]


class _Widening:
    """The operations of a subgraph again, those in `numbers` for float32, with conversions around them."""

    def __init__(self, graph: GraphRewriting, numbers: frozenset[int]) -> None:
        self._graph, self._numbers = graph, numbers
        self._wide: dict[int, int] = {}  # operands of float32 with the values of those of float16
        self._operations: list[Operation] = []

    def run(self) -> Sequence[Operation]:
        """Return the operations."""
        for number, operation in enumerate(self._graph.operations):
            if operation is None:
                continue
            if number not in self._numbers:
                self._operations.append(operation)
                continue
            inputs = tuple(map(self._widened, operation.inputs))
            outputs = tuple(map(self._float32_copy, operation.outputs))
            self._operations.append(replace(operation, inputs=inputs, outputs=outputs))
            for narrow, wide in zip(operation.outputs, outputs, strict=True):
                if not self._graph.is_read_only_by(narrow, self._numbers):
                    self._operations.append(Operation(OperationType.CAST, (wide,), (narrow,)))
        return self._operations

    def _widened(self, index: int) -> int:
        """Return the operand of float32 for an input; a constant is converted now, and a result before it is read."""
        builder, operand = self._graph.builder, self._graph.builder[index]
        if operand.type == OperandType.FLOAT16:
            return builder.float_scalar(_F32, float(np.frombuffer(builder.content(index), np.float16)[0]))
        if operand.type != _F16:
            return index
        if index not in self._wide and operand.lifetime == LifeTime.CONSTANT_COPY:
            values = np.frombuffer(builder.content(index), np.float16).astype(np.float32)
            location = builder.stored(values.tobytes())
            self._wide[index] = builder.operand(replace(operand, type=_F32, location=location))
        elif index not in self._wide:
            self._operations.append(Operation(OperationType.CAST, (index,), (self._float32_copy(index),)))
        return self._wide[index]

    def _float32_copy(self, index: int) -> int:
        """Return a new intermediate result with the shape of an operand."""
        self._wide[index] = self._graph.builder.operand(Operand(_F32, self._graph.shape(index)))
        return self._wide[index]
