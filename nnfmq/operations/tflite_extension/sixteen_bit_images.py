"""Pools, RESIZE_BILINEAR and MEAN of 16-bit tensors.

An average is rounded half away from zero. RESIZE_BILINEAR computes positions with 10 bits after the binary point. MEAN
multiplies the sum by a multiplier that includes the division by the count.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import fixed_point, pool_2d, reduce_argmax, resizing
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.pool_2d import pixel_counts, plan_quantized_max, reduce_windows
from nnfmq.operations.quantization import quantized_activation_range
from nnfmq.operations.reduce_argmax import reduced_axes
from nnfmq.operations.shapes import windows
from nnfmq.operations.signature import FLOAT32, INT32, Array, Run, Tensor
from nnfmq.operations.tflite_extension.sixteen_bits import find, saturated, sixteen_bit

_UNIT = 1 << 10  # of a position


def plan_average(
    input: Tensor, *, output: Tensor, filter_width: int, filter_height: int, activation: int, **conv_params: int
) -> Run:
    """Plan AVERAGE_POOL_2D."""
    rows, columns = windows(input.shape[1:3], (filter_height, filter_width), **conv_params)
    counts = pixel_counts(rows, columns, (input.shape[1], input.shape[2]))
    low, high = quantized_activation_range(activation, output)

    def run(image: Array) -> Array:
        sums = reduce_windows(image, rows, columns, np.add, 0, np.int64)
        means = np.sign(sums) * ((np.abs(sums) + counts // 2) // counts)
        clamped: Array = np.clip(means, low, high).astype(output.dtype)
        return clamped

    return run


def plan_bilinear(
    input: Tensor,
    *,
    output: Tensor,
    width: float,
    height: float,
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> Run:
    """Plan RESIZE_BILINEAR."""
    (_, old_rows, old_columns, _), (_, rows, columns, _) = input.shape, output.shape
    vertical = _FixedPointTaps.of(old_rows, rows, align_corners, half_pixel_centers)
    horizontal = _FixedPointTaps.of(old_columns, columns, align_corners, half_pixel_centers)

    def run(image: Array) -> Array:
        pixels = horizontal.apply(vertical.apply(ints(image), 1), 2)
        rounded: Array = (np.sign(pixels) * ((np.abs(pixels) + (1 << 19)) >> 20)).astype(output.dtype)
        return rounded

    return run


class _FixedPointTaps(Struct, frozen=True):
    """Two input positions for each output position, and the weight of the second in 1/1024."""

    lower: Ints
    upper: Ints
    fraction: Ints

    @classmethod
    def of(cls, size: int, new_size: int, align_corners: bool, half_pixel_centers: bool) -> _FixedPointTaps:
        steps, spans = (size - 1, new_size - 1) if align_corners and new_size > 1 else (size, new_size)
        scale = (_UNIT * steps + spans // 2) // spans
        position = np.arange(new_size, dtype=np.int64) * scale
        if half_pixel_centers:
            position += scale // 2 - _UNIT // 2
        lower = np.maximum(position, 0) // _UNIT
        upper = np.minimum(_toward_zero(position + _UNIT - 1), size - 1)
        return cls(np.minimum(lower, size - 1), upper, position - _UNIT * lower)

    def apply(self, image: Ints, axis: int) -> Ints:
        """Return 1024 times the interpolated image along `axis`."""
        shape = [1] * image.ndim
        shape[axis] = len(self.fraction)
        fraction = self.fraction.reshape(shape)
        return image.take(self.lower, axis=axis) * (_UNIT - fraction) + image.take(self.upper, axis=axis) * fraction


def _toward_zero(position: Ints) -> Ints:
    result: Ints = np.sign(position) * (np.abs(position) // _UNIT)
    return result


def plan_mean(input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
    """Plan MEAN."""
    reduced, shape = reduced_axes(axes, len(input.shape)), output.shape
    count = math.prod(input.shape[axis] for axis in reduced)
    real = float(np.float32(input.scale)) / float(np.float32(output.scale))
    multiplier, exponent = fixed_point.quantize_multiplier(real)
    shift = min(count.bit_length() - 1, 32, 31 + exponent)
    divided = (multiplier << shift) // count

    def run(array: Array) -> Array:
        sums = array.sum(axis=reduced, dtype=np.int64)
        return saturated(fixed_point.multiply(sums, divided, exponent - shift)).reshape(shape)

    return run


DECLARATIONS = (
    sixteen_bit(find(pool_2d.DECLARATIONS, Op.AVERAGE_POOL_2D), plan_average),
    sixteen_bit(find(pool_2d.DECLARATIONS, Op.MAX_POOL_2D), plan_quantized_max),
    sixteen_bit(find(resizing.DECLARATIONS, Op.RESIZE_BILINEAR), plan_bilinear, ({"S": INT32}, {"S": FLOAT32})),
    sixteen_bit(find(reduce_argmax.DECLARATIONS, Op.MEAN), plan_mean),
)
