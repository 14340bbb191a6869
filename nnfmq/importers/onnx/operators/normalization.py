"""Normalization and softmax. The HAL normalizes with one scale for all channels, so these are arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import TENSOR_FLOAT64
from nnfmq.hal.operation_type import OperationType as Op
from nnfmq.importers.onnx.operators.elementwise import in_float32
from nnfmq.importers.onnx.operators.movement import axis_of, transposed
from nnfmq.importers.onnx.operators.reduction import divisor
from nnfmq.importers.onnx.values import Node, Value

__all__ = ["CONVERTERS"]

_LAST_AXIS_OPSET = 13
_MIN_NORMAL = 2.0**-126
_TINY = 1e-9  # what MeanVarianceNormalization adds to the standard deviation


def _softmax(operation: Op, node: Node) -> None:
    """Convert a softmax over one axis; before opset 13 over that axis and all after it."""
    shape, x = node.value(0).shape, node.operand(0)
    is_new = node.opset >= _LAST_AXIS_OPSET
    axis = axis_of(node.attribute("axis", -1 if is_new else 1), len(shape)) if shape else 0
    before, after = math.prod(shape[:axis]), math.prod(shape[axis:])
    flat = (before, after)
    if is_new and shape:
        flat = (before * math.prod(shape[axis + 1 :]), shape[axis])
        order = [*(other for other in range(len(shape)) if other != axis), axis]
        x = transposed(node, x, order)
    ordered, x = node.shape(x), node.reshaped(x, flat)
    found = node.reshaped(_softmax_of_rows(operation, node, x), ordered)
    if is_new and shape:
        found = transposed(node, found, [int(at) for at in np.argsort(order)])
    node.result(found, shape)


def _softmax_of_rows(operation: Op, node: Node, x: int) -> int:
    kind, none = node.builder[x].type, node.builder.int32(0)
    if kind != TENSOR_FLOAT64:
        return node.emit(operation, [x, node.scalar(kind, 1.0), node.builder.int32(1)])
    axes, keeps = node.builder.int32_vector([1]), node.builder.boolean(True)
    below = node.emit(Op.SUB, [x, node.emit(Op.REDUCE_MAX, [x, axes, keeps]), none])
    powers = node.emit(Op.EXP, [below])
    total = node.emit(Op.REDUCE_SUM, [powers, axes, keeps])
    if operation == Op.SOFTMAX:
        return node.emit(Op.DIV, [powers, total, none])
    return node.emit(Op.SUB, [below, node.emit(Op.LOG, [total]), none])


def _batch_normalization(node: Node) -> None:
    if node.attribute("training_mode", 0) or any(node.output_names[1:]):  # read or not
        raise InvalidArgument("training is not supported")
    epsilon, shape = node.attribute("epsilon", 1e-5), node.value(0).shape
    of_channel = shape[1:2] if node.attribute("spatial", 1) else shape[1:]  # an attribute of opset 7 and 8
    shapes = [node.value(position).shape for position in range(1, 5)]
    if any(each != of_channel for each in shapes):
        raise InvalidArgument(f"parameters of the shapes {shapes}: {of_channel} is required")
    along = of_channel + (1,) * (len(shape) - 1 - len(of_channel))
    if any(node.value(position).array is None for position in range(1, 5)):
        return _computed_batch_normalization(node, epsilon, along)
    parameters = [node.constant(position, "parameters").astype(np.float64) for position in range(1, 5)]
    scale, bias, mean, variance = parameters
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + epsilon)
        offset = bias - mean * factor
    dtype = node.value(0).dtype
    terms = [node.operand(Value.of(term.astype(dtype).reshape(along))) for term in (factor, offset)]
    scaled = node.emit(Op.MUL, [node.operand(0), terms[0], node.builder.int32(0)])
    return node.result(node.emit(Op.ADD, [scaled, terms[1], node.builder.int32(0)]), shape)


def _computed_batch_normalization(node: Node, epsilon: float, along: tuple[int, ...]) -> None:
    """Convert with parameters that the model computes."""
    shape, none = node.value(0).shape, node.builder.int32(0)
    scale, bias, mean, variance = (node.reshaped(node.operand(position), along) for position in range(1, 5))
    shifted = node.emit(Op.ADD, [variance, node.filled(node.builder[variance].type, epsilon), none])
    factor = node.emit(Op.MUL, [node.emit(Op.RSQRT, [shifted]), scale, none])
    found = node.emit(Op.MUL, [node.emit(Op.SUB, [node.operand(0), mean, none]), factor, none])
    node.result(node.emit(Op.ADD, [found, bias, none]), shape)


def _lp_normalization(node: Node) -> None:
    """Convert to the quotient of the elements and their norm along an axis."""
    shape, none, p = node.value(0).shape, node.builder.int32(0), node.attribute("p", 2)
    if p not in (1, 2):
        raise InvalidArgument(f"p is {p}: it must be 1 or 2")
    axis = axis_of(node.attribute("axis", -1), len(shape))
    x = node.emit(Op.DIV, [node.operand(0), divisor(node, node.operand(0), [axis]), none])
    sizes = node.emit(Op.ABS, [x]) if p == 1 else node.emit(Op.MUL, [x, x, none])
    total = node.emit(Op.REDUCE_SUM, [sizes, node.builder.int32_vector([axis]), node.builder.boolean(True)])
    norm = total if p == 1 else node.emit(Op.SQRT, [total])
    norm = node.emit(Op.MAXIMUM, [norm, node.filled(node.builder[x].type, _MIN_NORMAL)])  # zeros stay zeros
    node.result(node.emit(Op.DIV, [x, norm, none]), shape)


def _normalized(node: Node, x: int, axes: list[int], epsilon: float) -> tuple[int, int, int]:
    """Return an operand with mean 0 and variance 1 along axes; also the means, and 1 / standard deviation."""
    none, kept, vector = node.builder.int32(0), node.builder.int32(1), node.builder.int32_vector(axes)
    mean = node.emit(Op.MEAN, [x, vector, kept])
    centered = node.emit(Op.SUB, [x, mean, none])
    variance = node.emit(Op.MEAN, [node.emit(Op.MUL, [centered, centered, none]), vector, kept])
    shifted = node.emit(Op.ADD, [variance, node.filled(node.builder[x].type, epsilon), none])
    inverse = node.emit(Op.RSQRT, [shifted])
    return node.emit(Op.MUL, [centered, inverse, none]), mean, inverse


def _instance_normalization(node: Node) -> None:
    shape, none = node.value(0).shape, node.builder.int32(0)
    if len(shape) < 3:
        raise InvalidArgument(f"the input has rank {len(shape)}; it needs 3 or more")
    if any(node.value(position).shape != shape[1:2] for position in (1, 2)):
        raise InvalidArgument(f"scale or bias has not the shape {shape[1:2]}")
    flat = node.reshaped(node.operand(0), (shape[0], shape[1], math.prod(shape[2:])))
    found, _, _ = _normalized(node, flat, [2], node.attribute("epsilon", 1e-5))
    scale, bias = (node.reshaped(node.operand(position), (shape[1], 1)) for position in (1, 2))
    found = node.emit(Op.ADD, [node.emit(Op.MUL, [found, scale, none]), bias, none])
    node.result(found, shape)


def _mean_variance_normalization(node: Node) -> None:
    """Convert to (x - mean) / (standard deviation + 1e-9); by default over all axes but that of channels."""
    shape, none, kept = node.value(0).shape, node.builder.int32(0), node.builder.int32(1)
    axes = node.builder.int32_vector([axis_of(axis, len(shape)) for axis in node.attribute("axes", (0, 2, 3))])
    centered = node.emit(Op.SUB, [node.operand(0), node.emit(Op.MEAN, [node.operand(0), axes, kept]), none])
    variance = node.emit(Op.MEAN, [node.emit(Op.MUL, [centered, centered, none]), axes, kept])
    tiny = node.filled(node.builder[centered].type, _TINY)
    deviation = node.emit(Op.ADD, [node.emit(Op.SQRT, [variance]), tiny, none])
    node.result(node.emit(Op.DIV, [centered, deviation, none]), shape)


def _layer_normalization(node: Node) -> None:
    if node.attribute("stash_type", 1) != 1:
        raise InvalidArgument(f"stash_type {node.attribute('stash_type', 1)} is not supported: it must be 1, float32")
    in_float32(_standardized, kept=(1, 2))(node)


def _standardized(node: Node) -> None:
    shape, none = node.value(0).shape, node.builder.int32(0)
    axis = axis_of(node.attribute("axis", -1), len(shape))
    flat = node.reshaped(node.operand(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))
    found, mean, inverse = _normalized(node, flat, [1], node.attribute("epsilon", 1e-5))
    found = node.reshaped(found, shape)
    found = node.emit(Op.MUL, [found, node.operand(1), none])
    if node.given(2):
        found = node.emit(Op.ADD, [found, node.operand(2), none])
    node.result(found, shape)
    reduced = shape[:axis] + (1,) * (len(shape) - axis)
    for position, operand in ((1, mean), (2, inverse)):
        if node.used(position):
            node.result(operand, reduced, position=position)


def _lrn(node: Node) -> None:
    x, size = node.operand(0), node.attribute("size", 0)
    if size < 1 or size % 2 == 0:
        raise InvalidArgument(f"a size of {size} is not supported: it must be odd")
    kind = node.builder[x].type
    numbers = (
        node.attribute("bias", 1.0), node.attribute("alpha", 0.0001) / size, node.attribute("beta", 0.75)
    )  # fmt: skip
    arguments = [node.builder.int32(size // 2), *(node.scalar(kind, number) for number in numbers)]
    found = node.emit(Op.LOCAL_RESPONSE_NORMALIZATION, [x, *arguments, node.builder.int32(1)])
    node.result(found, node.value(0).shape)


CONVERTERS: dict[str, Callable[[Node], None]] = {
    "BatchNormalization": in_float32(_batch_normalization),
    "InstanceNormalization": in_float32(_instance_normalization),
    "LRN": in_float32(_lrn),
    "LayerNormalization": _layer_normalization,
    "LpNormalization": in_float32(_lp_normalization),
    "LogSoftmax": partial(_softmax, Op.LOG_SOFTMAX),
    "MeanVarianceNormalization": in_float32(_mean_variance_normalization),
    "Softmax": partial(_softmax, Op.SOFTMAX),
}
