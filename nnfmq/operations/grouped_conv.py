"""GROUPED_CONV_2D: a convolution whose channels are split into independent groups.

One batched matrix product over all groups: the patches of a band as (group, position, K) times the filter as
(group, K, channels). Windows, bands, packing and requantization are those of CONV_2D.

    C1 input and filter have rank 4     C2 input channels = filter depth · groups; bias has one value per channel
    C3 per-channel scales are along dimension 0
    C4 the group count is positive and divides the output channels
"""

from __future__ import annotations

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.convolution import (
    EXPLICIT,
    IMPLICIT,
    LAYOUT,
    OPERANDS,
    bands,
    patches,
    require_channel_dim,
    sixteen_bit_matmul,
    sixteen_bit_variants,
    variants,
)
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.packed_matmul import PackedMatmul, float_matmul, quantized_matmul
from nnfmq.operations.shapes import WindowDimension, padded_shape, require, windows


def grouped_shape(
    input: Shape, filter: Shape, bias: Shape, *, groups: int, activation: int, **conv_params: int
) -> Shape:
    """Return (batch, height, width, output channels)."""
    require(len(input) == 4 and len(filter) == 4, "C1", f"input {input} and filter {filter} must have rank 4")
    channels = filter[0]
    require(groups > 0 and channels % groups == 0, "C4", f"{groups} groups of {channels} output channels")
    agree = input[3] == filter[3] * groups and bias == (channels,)
    require(agree, "C2", f"input {input}, filter {filter}, bias {bias}, {groups} groups")
    rows, columns = windows(input[1:3], filter[1:3], **conv_params)
    padded_shape(input, rows, columns)
    return input[0], rows.count, columns.count, channels


def plan_grouped(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, groups: int, activation: int, **conv_params: int
) -> Run:
    """Return a function that computes a grouped convolution in float32; the weights are packed now."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matrix = filter.array.reshape(filter.shape[0], -1).T
    matmul = float_matmul(matrix, bias.array, output, activation, columns.count)
    return convolve_groups(matmul, groups, output, rows, columns, 0)


def plan_quantized_grouped(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, groups: int, activation: int, **conv_params: int
) -> Run:
    """Return a function that computes a grouped convolution in exact integers and requantizes the result."""
    require_channel_dim(filter, 0)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = quantized_matmul(input, filter, bias, output, activation, columns.count)
    return convolve_groups(matmul, groups, output, rows, columns, input.zero_point)


def plan_sixteen_bit_grouped(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, groups: int, activation: int, **conv_params: int
) -> Run:
    """Plan a grouped convolution of 16 bits."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = sixteen_bit_matmul(input, filter, bias, output, activation, columns.count)
    return convolve_groups(matmul, groups, output, rows, columns, 0)


def convolve_groups(
    matmul: PackedMatmul, groups: int, output: Tensor, rows: WindowDimension, columns: WindowDimension, padding: int
) -> Run:
    """Return a Run that multiplies the patches of each group of channels by that group's part of a packed filter."""
    shape, packed = output.shape, matmul.matrix
    length, channels = packed.shape
    matrices = np.ascontiguousarray(packed.reshape(length, groups, channels // groups).transpose(1, 0, 2))
    row_bytes = columns.count * length * groups * packed.itemsize

    def run(image: Array) -> Array:
        pixels = patches(image, rows, columns, padding, packed.dtype)
        out = np.empty(shape, matmul.dtype)
        for band in bands(shape[0], rows.count, row_bytes):
            sums = np.matmul(_by_group(pixels[band], groups), matrices).transpose(1, 0, 2)
            matmul.epilogue(sums.reshape(-1, matmul.row * channels), out[band].reshape(-1, matmul.row * channels))
        return out

    return run


def _by_group(pixels: Array, groups: int) -> Array:
    """Return patches (batch, rows, columns, filter height, filter width, channels) as (group, position, length)."""
    split = pixels.reshape(*pixels.shape[:5], groups, pixels.shape[5] // groups)
    positions = pixels.shape[0] * pixels.shape[1] * pixels.shape[2]
    length = pixels.shape[3] * pixels.shape[4] * split.shape[6]
    return split.transpose(5, 0, 1, 2, 3, 4, 6).reshape(groups, positions, length)


_OWN = (op.attribute("groups"), op.attribute("activation"), *LAYOUT)

DECLARATIONS = (
    op.Declaration(
        OperationType.GROUPED_CONV_2D,
        since=op.V1_2,
        overloads=tuple(op.overload(*OPERANDS, *padding, *_OWN, level=op.V1_2) for padding in (IMPLICIT, EXPLICIT)),
        variants=variants(op.V1_2, plan_grouped, plan_quantized_grouped),
        shape=grouped_shape,
        images=("input",),
        extended=(op.sixteen_bits(*sixteen_bit_variants(plan_sixteen_bit_grouped)),),
    ),
)
