"""Products: CONV_2D, DEPTHWISE_CONV_2D and FULLY_CONNECTED."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nnfmq.engines.compiled.kernels.arithmetic import Codes, FloatCodes, Floats
from nnfmq.engines.compiled.kernels.depthwise import Depthwise, plan_depthwise
from nnfmq.engines.compiled.kernels.product import Product, ProductShape, plan_product
from nnfmq.engines.compiled.kernels.requantize import Requantization
from nnfmq.engines.compiled.lowering.lowered import Lowered, Rule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.quantization import EXACT_FLOAT32, Multipliers, code_range, float_range, product_multipliers
from nnfmq.operations.shapes import Window, windows
from nnfmq.operations.signature import Array, Tensor

__all__ = ["RULES"]

_FLOAT, _CODES = np.dtype("<f4"), (np.dtype("u1"), np.dtype("i1"))
_ONE = Window(1, 1, 1, 0, 0, 1)


def _is_float(*tensors: Tensor) -> bool:
    return all(tensor.dtype == _FLOAT for tensor in tensors)


def convolution(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int, **geometry: int
) -> Lowered | None:
    """CONV_2D."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **geometry)
    batch, height, width, channels = input.shape
    shape = ProductShape(batch, height, width, channels, rows, columns, filter.shape[0])
    return _product(shape, input, filter, bias, output, target, activation)


def fully_connected(
    input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int
) -> Lowered | None:
    """FULLY_CONNECTED: each row of the input is a position of one pixel."""
    units, length = weights.shape
    count = math.prod(input.shape) // length
    along = Window(1, 1, 1, 0, 0, count)
    shape = ProductShape(1, 1, count, length, _ONE, along, units)
    return _product(shape, input, weights, bias, output, target, activation)


def _product(
    shape: ProductShape, input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, target: Target, activation: int
) -> Lowered | None:
    if 0 in input.shape:
        return None
    if _is_float(input, filter, output):
        low, high = float_range(activation)
        product = plan_product(shape, Floats(low, high), target)
        return _float_product(product, filter.array, bias.array)
    if input.dtype not in _CODES or output.dtype not in _CODES:
        return None
    weights = _centred(filter)
    return _quantized_product(shape, weights, input, filter, bias, output, target, activation)


def _float_product(product: Product, weights: Array, bias: Array) -> Lowered:
    filled = np.zeros(product.panels * product.tile[1] * product.lanes, np.float32)
    filled[: len(bias)] = bias
    return Lowered(product, (product.pack(weights), filled.tobytes()), product.shape.multiplications // 16)


def _quantized_product(
    shape: ProductShape,
    weights: Array,
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    output: Tensor,
    target: Target,
    activation: int,
) -> Lowered | None:
    draft = plan_product(shape, Codes(False, 0, _NO_FINISH), target)
    channels = draft.panels * draft.tile[1] * draft.lanes
    bounds = _bounds(weights.reshape(len(weights), -1), input)
    finish = _finish(input, filter, bias, output, activation, bounds, channels)
    if finish is None:
        return None
    requantization, numbers = finish
    product = plan_product(shape, Codes(input.dtype.kind == "i", input.zero_point, requantization), target)
    return Lowered(product, (product.pack(weights), numbers), shape.multiplications // 32)


_NO_FINISH = Requantization(0, 0, 0, 0, False, False)


def _centred(filter: Tensor) -> Array:
    return filter.array.astype(np.int16) - np.int16(filter.zero_point)


def _bounds(weights: Array, input: Tensor) -> Ints:
    """Return, for each channel (first axis), how large a sum of products can become."""
    info = np.iinfo(input.dtype)
    largest = max(info.max - input.zero_point, input.zero_point - info.min)
    bounds: Ints = np.abs(weights.astype(np.int32)).sum(axis=1, dtype=np.int64) * largest
    return bounds


def _finish(
    input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, bounds: Ints, channels: int
) -> tuple[Requantization, bytes] | None:
    multipliers = Multipliers.of(product_multipliers(input, filter, bias, output))
    count = len(bounds)
    if len(multipliers.mantissas) == 1:
        multipliers = Multipliers(np.repeat(multipliers.mantissas, count), np.repeat(multipliers.shifts, count))
    low, high = code_range(activation, output)
    biases = ints(bias.array)
    found = Requantization.of(multipliers, biases, bounds, channels, output.zero_point, low, high)
    return None if found is None else (found, found.constants(multipliers, biases))


def depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    depth_multiplier: int,
    activation: int,
    **geometry: int,
) -> Lowered | None:
    """DEPTHWISE_CONV_2D."""
    if 0 in input.shape:
        return None
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **geometry)
    batch, height, width, _ = input.shape

    def planned(arithmetic: Floats | FloatCodes) -> Depthwise:
        channels = filter.shape[3]
        return plan_depthwise(batch, height, width, channels, rows, columns, arithmetic, target, depth_multiplier)

    if _is_float(input, filter, output):
        kernel = planned(Floats(*float_range(activation)))
        filled = np.zeros(kernel.panels * kernel.tile[1] * kernel.lanes, np.float32)
        filled[: len(bias.array)] = bias.array
        return Lowered(kernel, (kernel.pack(filter.array[0]), filled.tobytes()), _taps(kernel) // 12)
    if input.dtype not in _CODES or output.dtype not in _CODES:
        return None
    weights = _centred(filter)[0]
    bounds = _bounds(weights.reshape(-1, weights.shape[-1]).T, input)
    channels = math.ceil(filter.shape[3] / target.lanes) * target.lanes
    finish = _finish(input, filter, bias, output, activation, bounds, channels)
    if finish is None or int(bounds.max(initial=0)) >= EXACT_FLOAT32:
        return None
    arithmetic = FloatCodes(input.dtype.kind == "i", input.zero_point, finish[0])
    kernel = planned(arithmetic)
    return Lowered(kernel, (kernel.pack(weights), finish[1]), _taps(kernel) // 8)


def _taps(kernel: Depthwise) -> int:
    positions = kernel.batch * kernel.rows.count * kernel.columns.count
    return positions * kernel.channels * kernel.rows.size * kernel.columns.size


RULES: Mapping[OperationType, Rule] = {
    OperationType.CONV_2D: convolution,
    OperationType.DEPTHWISE_CONV_2D: depthwise,
    OperationType.FULLY_CONNECTED: fully_connected,
}
