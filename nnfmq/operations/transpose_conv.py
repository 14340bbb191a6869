"""TRANSPOSE_CONV_2D: each input pixel adds its multiple of the filter to the output.

One matrix product for each filter tap is added to every stride-th output pixel; taps outside the output are dropped.
Fewer taps contribute to border pixels, so the input's zero point is subtracted from the data, unlike in CONV_2D. The
output shape of the overload with implicit padding only determines the padding, as in TFLite; padding after the input
may be negative.

    C1 input and filter have rank 4     C2 input channels = filter depth; bias has one value per output channel
    C3 per-channel scales run along dimension 0
    C4 the given output shape has four dimensions, its height and width positive
    C5 the output has positive dimensions     W1 padding scheme     W2 strides and sizes are positive
    W3 padding before the input is not negative     W6 accumulators fit 32 bits
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.types import OperationType, PaddingScheme
from nnfmq.operations import declaration as op
from nnfmq.operations.convolution import EXPLICIT, LAYOUT, OPERANDS, require_channel_dim, sixteen_bit_variants, variants
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.packed_matmul import bound_accumulator, float_epilogue, quantized_epilogue, sixteen_bit_epilogue
from nnfmq.operations.quantization import Epilogue, dtype_range
from nnfmq.operations.shapes import require


class TransposedConvDimension(Struct, frozen=True):
    """One axis of a transposed convolution: tap t of input i is added to output i · stride - padding_low + t.

    `size` is that of the kernel, `count` that of the output.
    """

    input_size: int
    size: int
    stride: int
    padding_low: int
    count: int

    def valid_range(self, tap: int) -> tuple[slice, slice]:
        """Return the inputs for which `tap` is inside the output, and the outputs to which it is added."""
        offset = tap - self.padding_low
        first = max(0, -(offset // self.stride))
        stop = min(self.input_size, (self.count - 1 - offset) // self.stride + 1)
        if stop <= first:
            return slice(0), slice(0)
        start = first * self.stride + offset
        return slice(first, stop), slice(start, start + (stop - first - 1) * self.stride + 1, self.stride)


def _transposed_conv_dimension(
    input_size: int, size: int, stride: int, padding: tuple[int, int]
) -> TransposedConvDimension:
    message = f"stride {stride}, filter size {size}, input size {input_size}; all must be positive"
    require(stride > 0 and size > 0 and input_size > 0, "W2", message)
    low, high = padding
    require(low >= 0, "W3", f"leading padding {low} is negative")
    count = (input_size - 1) * stride + size - low - high
    require(count > 0, "C5", f"input size {input_size} with padding ({low}, {high}) gives output size {count}")
    return TransposedConvDimension(input_size, size, stride, low, count)


def _implied_padding(wanted: int, size: int, stride: int, scheme: int) -> tuple[int, int]:
    known = scheme in (PaddingScheme.SAME, PaddingScheme.VALID)
    require(known, "W1", f"padding scheme {scheme}, allowed are 1 (SAME) and 2 (VALID)")
    require(stride > 0, "W2", f"stride {stride}, it must be positive")
    if scheme == PaddingScheme.VALID:
        return 0, 0
    excess = (-(-wanted // stride) - 1) * stride + size - wanted
    low = max(excess, 0) // 2
    return low, excess - low


def transposed_conv_dimensions(
    dimensions: Shape,
    sizes: Shape,
    *,
    stride_width: int,
    stride_height: int,
    output_shape: Array | None = None,
    padding_scheme: int = 0,
    padding_left: int = 0,
    padding_right: int = 0,
    padding_top: int = 0,
    padding_bottom: int = 0,
) -> tuple[TransposedConvDimension, TransposedConvDimension]:
    """Return the dimensions along height and width, from implicit or explicit padding."""
    vertical, horizontal = (padding_top, padding_bottom), (padding_left, padding_right)
    if output_shape is not None:
        fits = output_shape.shape == (4,) and int(output_shape[1:3].min()) > 0
        message = f"output shape {output_shape.tolist()}, four dimensions with positive height and width are required"
        require(fits, "C4", message)
        vertical = _implied_padding(int(output_shape[1]), sizes[0], stride_height, padding_scheme)
        horizontal = _implied_padding(int(output_shape[2]), sizes[1], stride_width, padding_scheme)
    return (
        _transposed_conv_dimension(dimensions[0], sizes[0], stride_height, vertical),
        _transposed_conv_dimension(dimensions[1], sizes[1], stride_width, horizontal),
    )


def transposed_shape(input: Shape, filter: Shape, bias: Shape, *, activation: int, **conv_params: Any) -> Shape:
    """Return (batch, height, width, output channels)."""
    require(len(input) == 4 and len(filter) == 4, "C1", f"input {input} and filter {filter} must have rank 4")
    agree = input[3] == filter[3] > 0 and bias == (filter[0],) and filter[0] > 0
    require(agree, "C2", f"channels of input {input}, filter {filter} and bias {bias} do not agree")
    rows, columns = transposed_conv_dimensions(input[1:3], filter[1:3], **conv_params)
    shape = (input[0], rows.count, columns.count, filter[0])
    require(8 * math.prod(shape) < 1 << 32, "W6", f"accumulators of shape {shape} need 2^32 bytes or more")
    return shape


def plan_transposed(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: Any
) -> Run:
    """Plan a transposed convolution in float32."""
    rows, columns = transposed_conv_dimensions(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = np.ascontiguousarray(filter.array.transpose(1, 2, 3, 0), dtype=np.float32)
    return scatter_taps(taps, float_epilogue(bias.array, activation), output, rows, columns, 0)


def plan_quantized_transposed(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: Any
) -> Run:
    """Plan an exact integer transposed convolution and its requantization."""
    require_channel_dim(filter, 0)
    rows, columns = transposed_conv_dimensions(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = filter.array.astype(np.int64).transpose(1, 2, 3, 0) - filter.zero_point
    matrix = taps.reshape(-1, taps.shape[3])
    bound, dtype = bound_accumulator(matrix, max(abs(limit - input.zero_point) for limit in dtype_range(input)))
    sums, symmetric_input = matrix.sum(axis=0), replace(input, zero_point=0)
    epilogue = quantized_epilogue(sums, bound, symmetric_input, filter, bias, output, activation, 1)
    return scatter_taps(np.ascontiguousarray(taps, dtype=dtype), epilogue, output, rows, columns, input.zero_point)


def plan_sixteen_bit_transposed(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: Any
) -> Run:
    """Plan a transposed convolution of 16 bits."""
    require_channel_dim(filter, 0)
    rows, columns = transposed_conv_dimensions(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = filter.array.astype(np.float64).transpose(1, 2, 3, 0)
    epilogue = sixteen_bit_epilogue(taps.reshape(-1, taps.shape[3]), input, filter, bias, output, activation, 1)
    return scatter_taps(np.ascontiguousarray(taps), epilogue, output, rows, columns, 0)


def scatter_taps(
    taps: Array,
    epilogue: Epilogue,
    output: Tensor,
    rows: TransposedConvDimension,
    columns: TransposedConvDimension,
    zero_point: int,
) -> Run:
    """Return a Run that adds a matrix product for each of `taps` (height, width, input channels, output channels)."""
    channels = taps.shape[3]

    def run(image: Array) -> Array:
        pixels = np.subtract(image, zero_point, dtype=taps.dtype)
        sums = np.zeros(output.shape, taps.dtype)
        for i, j in np.ndindex(taps.shape[:2]):
            (top, down), (left, across) = rows.valid_range(i), columns.valid_range(j)
            sums[:, down, across] += np.matmul(pixels[:, top, left], taps[i, j])
        out = np.empty(output.shape, output.dtype)
        epilogue(sums.reshape(-1, channels), out.reshape(-1, channels))
        return out

    return run


_STRIDES = (op.attribute("stride_width"), op.attribute("stride_height"))
_SHAPED = (op.attribute("output_shape", op.I32), op.attribute("padding_scheme"), *_STRIDES)

DECLARATIONS = (
    op.Declaration(
        OperationType.TRANSPOSE_CONV_2D,
        since=op.V1_2,
        overloads=tuple(
            op.overload(*OPERANDS, *padding, op.attribute("activation"), *LAYOUT, level=op.V1_2)
            for padding in (_SHAPED, EXPLICIT)
        ),
        variants=variants(op.V1_2, plan_transposed, plan_quantized_transposed),
        shape=transposed_shape,
        images=("input", "output_shape"),
        zero_sized=True,
        extended=(op.sixteen_bits(*sixteen_bit_variants(plan_sixteen_bit_transposed)),),
    ),
)
