"""AVERAGE_POOL_2D, L2_POOL_2D and MAX_POOL_2D: windows clipped to the image.

Sum and maximum are separable, so a window of h·w taps takes h + w passes. An average divides by the count of pixels
inside the image. Input and output have the same scale and zero point. int8 averages are equal to uint8 averages - 128.

    C1 the input has rank 4     C2 no dimension other than the batch is 0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.convolution import EXPLICIT, IMPLICIT, LAYOUT, pad_image
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import float_variants
from nnfmq.operations.quantization import dtype_range, float_activation_range, quantized_activation_range
from nnfmq.operations.shapes import WindowDimension, padded_shape, require, windows


def pool_shape(input: Shape, *, filter_width: int, filter_height: int, activation: int, **conv_params: int) -> Shape:
    """Return (batch, height, width, channels)."""
    require(len(input) == 4, "C1", f"input {input} must have rank 4")
    require(0 not in input[1:], "C2", f"input {input}, only the batch may be 0")
    rows, columns = windows(input[1:3], (filter_height, filter_width), **conv_params)
    padded_shape(input, rows, columns)
    return input[0], rows.count, columns.count, input[3]


def _pool_windows(
    input: Tensor, filter_width: int, filter_height: int, **conv_params: int
) -> tuple[WindowDimension, WindowDimension]:
    return windows(input.shape[1:3], (filter_height, filter_width), **conv_params)


def reduce_windows(
    image: Array, rows: WindowDimension, columns: WindowDimension, ufunc: np.ufunc, padding: Any, dtype: Any
) -> Array:
    """Reduce each window with `ufunc`, whose identity is `padding`."""
    padded = pad_image(image, rows, columns, padding, np.dtype(dtype))
    across = _reduce_axis(padded, columns, ufunc, 2)
    return _reduce_axis(across, rows, ufunc, 1)


def _reduce_axis(values: Array, window: WindowDimension, ufunc: np.ufunc, axis: int) -> Array:
    moved = np.moveaxis(values, axis, 0)
    if window.count == 1:
        return np.moveaxis(ufunc.reduce(moved[: window.size], axis=0, keepdims=True, dtype=values.dtype), 0, axis)
    span = (window.count - 1) * window.stride + 1
    result = moved[0 : span : window.stride].copy()
    for tap in range(1, window.size):
        ufunc(result, moved[tap : tap + span : window.stride], out=result)
    return np.moveaxis(result, 0, axis)


def pixel_counts(rows: WindowDimension, columns: WindowDimension, dimensions: tuple[int, int]) -> Array:
    """Return (1, height, width, 1): the count of pixels of each window that are inside the image."""
    vertical, horizontal = _inside(rows, dimensions[0]), _inside(columns, dimensions[1])
    return (vertical[:, None] * horizontal)[None, :, :, None]


def _inside(window: WindowDimension, dimension: int) -> Array:
    start = np.arange(window.count, dtype=np.int64) * window.stride - window.padding_low
    return np.minimum(start + window.size, dimension) - np.maximum(start, 0)


def plan_average(input: Tensor, *, output: Tensor, activation: int, **conv_params: int) -> Run:
    """Plan an average in float32."""
    rows, columns = _pool_windows(input, **conv_params)
    counts = pixel_counts(rows, columns, (input.shape[1], input.shape[2])).astype(np.float32)
    low, high = float_activation_range(activation)

    def run(image: Array) -> Array:
        sums = reduce_windows(image, rows, columns, np.add, 0, np.float32)
        return np.clip(sums / counts, np.float32(low), np.float32(high))

    return run


def plan_quantized_average(input: Tensor, *, output: Tensor, activation: int, **conv_params: int) -> Run:
    """Plan an average of quantized values minus the dtype's minimum: int32 sums, rounded half up."""
    rows, columns = _pool_windows(input, **conv_params)
    counts = pixel_counts(rows, columns, (input.shape[1], input.shape[2])).astype(np.int32)
    low, high = quantized_activation_range(activation, output)
    minimum = dtype_range(input)[0]
    rounding = counts // 2 - minimum * counts

    def run(image: Array) -> Array:
        sums = reduce_windows(image, rows, columns, np.add, 0, np.int32)
        means = (sums + rounding) // counts + minimum
        quantized: Array = np.clip(means, low, high).astype(output.dtype)
        return quantized

    return run


def plan_average_away_from_zero(
    input: Tensor, *, output: Tensor, filter_width: int, filter_height: int, activation: int, **conv_params: int
) -> Run:
    """Plan the average of INT8 and of 16 bits as TFLite defines it, rounded half away from zero."""
    rows, columns = windows(input.shape[1:3], (filter_height, filter_width), **conv_params)
    counts = pixel_counts(rows, columns, (input.shape[1], input.shape[2]))
    low, high = quantized_activation_range(activation, output)

    def run(image: Array) -> Array:
        sums = reduce_windows(image, rows, columns, np.add, 0, np.int64)
        means = np.sign(sums) * ((np.abs(sums) + counts // 2) // counts)
        clamped: Array = np.clip(means, low, high).astype(output.dtype)
        return clamped

    return run


def plan_l2(input: Tensor, *, output: Tensor, activation: int, **conv_params: int) -> Run:
    """Plan the square root of the mean of squares in float32."""
    rows, columns = _pool_windows(input, **conv_params)
    counts = pixel_counts(rows, columns, (input.shape[1], input.shape[2])).astype(np.float32)
    low, high = float_activation_range(activation)

    def run(image: Array) -> Array:
        sums = reduce_windows(np.square(image), rows, columns, np.add, 0, np.float32)
        return np.clip(np.sqrt(sums / counts), np.float32(low), np.float32(high))

    return run


def plan_max(input: Tensor, *, output: Tensor, activation: int, **conv_params: int) -> Run:
    """Plan a maximum of floats; padding is -infinity."""
    rows, columns = _pool_windows(input, **conv_params)
    low, high = float_activation_range(activation)

    def run(image: Array) -> Array:
        maximum = reduce_windows(image, rows, columns, np.maximum, -np.inf, np.float32)
        return np.clip(maximum, np.float32(low), np.float32(high))

    return run


def plan_quantized_max(input: Tensor, *, output: Tensor, activation: int, **conv_params: int) -> Run:
    """Plan a maximum of quantized values."""
    rows, columns = _pool_windows(input, **conv_params)
    low, high = quantized_activation_range(activation, output)
    minimum = np.iinfo(input.dtype).min

    def run(image: Array) -> Array:
        maximum = reduce_windows(image, rows, columns, np.maximum, minimum, input.dtype)
        return np.clip(maximum, low, high).astype(output.dtype, copy=False)

    return run


def _pool(code: OperationType, in_float: Plan, in_integers: Plan | None, *extended: op.Extended) -> op.Declaration:
    own = (op.attribute("filter_width"), op.attribute("filter_height"), op.attribute("activation"))
    lists = ((op.data("input"), *padding, *own, *LAYOUT) for padding in (IMPLICIT, EXPLICIT))
    quantized = () if in_integers is None else op.types_since(op.V1_0, in_integers, op.Q8, op.Q8S)
    return op.Declaration(
        code,
        since=op.V1_0,
        overloads=tuple(op.overload(*p, level=op.V1_2, also={len(p) - 1: op.V1_0}) for p in lists),
        variants=(*float_variants(in_float, level=op.V1_0), *quantized),
        shape=pool_shape,
        images=("input",),
        zero_sized=True,
        same_quantization=True,
        extended=extended,
    )


DECLARATIONS = (
    _pool(
        OperationType.AVERAGE_POOL_2D,
        plan_average,
        plan_quantized_average,
        op.tflite(*op.of_types(plan_average_away_from_zero, op.Q8S)),
        op.sixteen_bits(*op.of_types(plan_average_away_from_zero, op.Q16S)),
    ),
    _pool(OperationType.L2_POOL_2D, plan_l2, None),
    _pool(
        OperationType.MAX_POOL_2D,
        plan_max,
        plan_quantized_max,
        op.sixteen_bits(*op.of_types(plan_quantized_max, op.Q16S)),
    ),
)
