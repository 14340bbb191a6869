"""Constants and activations that follow a float32 convolution or matrix product become part of it.

Files often have a normalization as operations of its own: a product is multiplied by a factor for each channel, an
offset is added, and negative elements become 0. Factors go into the weights, offsets into the bias, and an activation
becomes the operation's own, as in the optimizations of ONNX Runtime and TFLite's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.operation_type import OperationType
from nnfmq.hal.types import FusedActivationFunc, Operation
from nnfmq.importers.graph_rewriting import GraphRewriting

__all__ = ["fold_into_weights"]

Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
_ACTIVATIONS = {
    OperationType.RELU: FusedActivationFunc.RELU,
    OperationType.RELU1: FusedActivationFunc.RELU1,
    OperationType.RELU6: FusedActivationFunc.RELU6,
}
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
            if following.type in _ACTIVATIONS:
                activation = _ACTIVATIONS[following.type]
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
