"""CONV_3D and CONV_3D_TRANSPOSE: convolutions over depth, height and width of NDHWC volumes.

C1 ranks and channels of volume, filter and bias agree
C2 the output's extents are those of a convolution back to the input
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.quantization import float_activation_range
from nnfmq.operations.shapes import WindowDimension, require, require_size, window_dimension
from nnfmq.operations.tflite_extension import declare

_AXES = ("depth", "height", "width")
_ATTRIBUTES = (
    op.attribute("padding_scheme"),
    *(op.attribute(f"stride_{axis}") for axis in _AXES),
    *(op.attribute(f"dilation_{axis}") for axis in _AXES),
    op.attribute("activation"),
)


def _windows(volume: Shape, filter: Shape, numbers: dict[str, int]) -> list[WindowDimension]:
    scheme = numbers["padding_scheme"]
    return [
        window_dimension(extent, size, numbers[f"stride_{axis}"], numbers[f"dilation_{axis}"], scheme)
        for axis, extent, size in zip(_AXES, volume[1:4], filter[:3], strict=True)
    ]


def conv_3d_shape(input: Shape, filter: Shape, bias: Shape, **numbers: int) -> Shape:
    """Return the shape of the convolved volume; the filter is DHWIO."""
    fits = len(input) == len(filter) == 5 and input[4] == filter[3] and bias == filter[4:]
    require(fits, "C1", f"input {input}, filter {filter}, bias {bias}")
    float_activation_range(numbers["activation"])
    return (input[0], *(window.count for window in _windows(input, filter, numbers)), filter[4])


def _taps(windows: list[WindowDimension], counts: Shape) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each tap of the filter, and the elements of the padded volume that it meets."""
    for tap in itertools.product(*(range(window.size) for window in windows)):
        starts = [index * window.dilation for index, window in zip(tap, windows, strict=True)]
        triples = zip(starts, counts, windows, strict=True)
        yield tap, tuple(slice(start, start + count * w.stride, w.stride) for start, count, w in triples)


def plan_conv_3d(input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, **numbers: int) -> Run:
    """Plan a matrix product for each tap of the filter."""
    windows = _windows(input.shape, filter.shape, numbers)
    borders = ((0, 0), *((w.padding_low, w.padding_high + w.stride) for w in windows), (0, 0))
    low, high = float_activation_range(numbers["activation"])

    def run(volume: Array, weights: Array, addend: Array) -> Array:
        padded = np.pad(volume, borders)
        result = np.broadcast_to(addend, output.shape).copy()
        for tap, box in _taps(windows, output.shape[1:4]):
            result += padded[(slice(None), *box)] @ weights[tap]
        return np.clip(result, low, high, out=result)

    return run


def _transposed(shape: Shape, filter: Shape, input: Shape, numbers: dict[str, int]) -> list[WindowDimension]:
    windows = _windows(shape, filter, numbers)
    counts = tuple(window.count for window in windows)
    require(counts == input[1:4], "C2", f"a convolution of {shape} gives {counts}, the input has {input[1:4]}")
    return windows


def conv_3d_transpose_shape(filter: Shape, input: Shape, bias: Shape, *, shape: Array, **numbers: int) -> Shape:
    """Return `shape`; the filter is DHWOI."""
    result = tuple(int(extent) for extent in shape.reshape(-1))
    fits = len(input) == len(filter) == len(result) == 5 and input[4] == filter[4] and bias == filter[3:4]
    fits = fits and result[0] == input[0] and result[4] == filter[3] and min(result) > 0
    require(fits, "C1", f"input {input}, filter {filter}, bias {bias}, output {result}")
    require_size(result, 4)
    float_activation_range(numbers["activation"])
    _transposed(result, filter, input, numbers)
    return result


def plan_conv_3d_transpose(
    filter: Tensor, input: Tensor, bias: Tensor, *, output: Tensor, shape: Array, **numbers: int
) -> Run:
    """Plan a matrix product for each tap of the filter, added to the volume at the tap's positions."""
    windows = _transposed(output.shape, filter.shape, input.shape, numbers)
    extents = zip(output.shape[1:4], windows, strict=True)
    wide = (output.shape[0], *(e + w.padding_low + w.padding_high + w.stride for e, w in extents), output.shape[4])
    require_size(wide, 4)
    inner = tuple(slice(w.padding_low, w.padding_low + e) for e, w in zip(output.shape[1:4], windows, strict=True))
    low, high = float_activation_range(numbers["activation"])

    def run(weights: Array, volume: Array, addend: Array) -> Array:
        result = np.zeros(wide, np.float32)
        for tap, box in _taps(windows, input.shape[1:4]):
            result[(slice(None), *box)] += volume @ weights[tap].T
        found: Array = np.clip(result[(slice(None), *inner)] + addend, low, high)
        return found

    return run


DECLARATIONS = (
    declare(
        TfliteOperation.CONV_3D,
        op.data("input"),
        op.data("filter"),
        op.data("bias"),
        *_ATTRIBUTES,
        variants=op.of_types(plan_conv_3d, op.F32),
        shape=conv_3d_shape,
    ),
    declare(
        TfliteOperation.CONV_3D_TRANSPOSE,
        op.attribute("shape", op.I32),
        op.data("filter"),
        op.data("input"),
        op.data("bias"),
        *_ATTRIBUTES,
        variants=op.of_types(plan_conv_3d_transpose, op.F32),
        shape=conv_3d_transpose_shape,
    ),
)
