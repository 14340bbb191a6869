"""CONV_2D, DEPTHWISE_CONV_2D and GROUPED_CONV_2D.

A convolution is a matrix product of image patches (im2col, as a view) and the packed filter; if the filter is 1x1, of
the image itself. A depthwise convolution is one multiply-add over whole rows for each filter tap. Both process *bands*
of output rows that fit the L2 cache, which bounds the scratch memory for all shapes. Kernels see NHWC only.

    C1 input and filter have rank 4     C2 channels agree (depth, multiplier, bias)
    C3 per-channel scales are along the output channels
    C5 no dimension other than the batch is 0

DEPTHWISE_CONV_2D  C4 the filter's first dimension is 1, the depth multiplier positive
GROUPED_CONV_2D    C2 input channels = filter depth · groups; bias has one value per channel
                   C3 per-channel scales are along dimension 0
                   C4 the group count is positive and divides the output channels
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Plan, Run, Shape, Tensor
from nnfmq.operations.dynamic_matmul import (
    DynamicMatmul,
    dynamic,
    exact,
    exact_matmul,
    hybrid,
    require_symmetric,
)
from nnfmq.operations.kernel_adapters import fp16_via_fp32
from nnfmq.operations.packed_matmul import (
    PackedMatmul,
    PackMatmul,
    float_epilogue,
    float_matmul,
    pack_exact_matrix,
    quantized_epilogue,
    quantized_matmul,
    sixteen_bit_epilogue,
    sixteen_bit_matmul,
)
from nnfmq.operations.quantization import Epilogue, output_scale_level, row_steps
from nnfmq.operations.shapes import WindowDimension, padded_shape, require, windows

_BAND_BYTES = 1 << 19  # of patches or accumulators: with the results about half of a CPU's L2 cache


def convolution_shape(input: Shape, filter: Shape, bias: Shape, *, activation: int, **conv_params: int) -> Shape:
    """Return (batch, height, width, output channels)."""
    require(len(input) == 4 and len(filter) == 4, "C1", f"input {input} and filter {filter} must have rank 4")
    require_filled(input, filter)
    depth, channels = filter[3], filter[0]
    require(input[3] == depth and bias == (channels,), "C2", f"input {input}, filter {filter}, bias {bias}")
    rows, columns = windows(input[1:3], filter[1:3], **conv_params)
    padded_shape(input, rows, columns)
    return input[0], rows.count, columns.count, channels


def require_filled(input: Shape, filter: Shape) -> None:
    """Require that no dimension other than the batch is 0 (C5)."""
    require(0 not in (*input[1:], *filter), "C5", f"input {input} and filter {filter}, only the batch may be 0")


def plan_convolution(
    pack: PackMatmul,
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    activation: int,
    **conv_params: int,
) -> Run:
    """Plan a convolution in the arithmetic of `pack`."""
    require_channel_dim(filter, 0)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = pack(input, filter, bias, output, activation, columns.count)
    return convolve(matmul, input, rows, columns, filter.shape[0], input.zero_point)


def require_channel_dim(filter: Tensor, required: int) -> None:
    """Require that per-channel scales are along dimension `required` (C3)."""
    found = required if filter.channel_quant is None else filter.channel_quant.channel_dim
    require(found == required, "C3", f"per-channel scales are along dimension {found}, required is {required}")


def convolve(
    matmul: PackedMatmul, input: Tensor, rows: WindowDimension, columns: WindowDimension, channels: int, padding: int
) -> Run:
    """Return a Run that multiplies the patches of an image, padded with `padding`, by a packed filter."""
    shape = (input.shape[0], rows.count, columns.count, channels)
    row_bytes = columns.count * matmul.matrix.shape[0] * matmul.matrix.itemsize
    dtype = matmul.matrix.dtype
    pointwise = rows.effective_kernel_size == columns.effective_kernel_size == 1 and not (
        rows.padding_low or rows.padding_high or columns.padding_low or columns.padding_high
    )

    def run(image: Array) -> Array:
        if pointwise:
            pixels = image[:, :: rows.stride, :: columns.stride]
        else:
            pixels = patches(image, rows, columns, padding, dtype)
        out = np.empty(shape, matmul.dtype)
        for band in bands(shape[0], rows.count, row_bytes):
            matmul.store(pixels[band].reshape(-1, matmul.matrix.shape[0]), out[band])
        return out

    return run


def bands(batch: int, rows: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Split (batch, rows) into contiguous slices of about _BAND_BYTES; one slice if everything fits.

    A generator, called at each execution: a list made at preparation could fill the memory for a model of a few
    hundred bytes.
    """
    if batch * rows * row_bytes <= _BAND_BYTES:
        yield slice(None), slice(None)
        return
    step = max(1, _BAND_BYTES // row_bytes)
    for image in range(batch):
        for start in range(0, rows, step):
            yield slice(image, image + 1), slice(start, min(start + step, rows))


def patches(image: Array, rows: WindowDimension, columns: WindowDimension, padding: int, dtype: np.dtype[Any]) -> Array:
    """Return a view (batch, rows, columns, filter height, filter width, channels) of the padded image."""
    padded = pad_image(image, rows, columns, padding, dtype)
    batch, vertical, horizontal, channel = padded.strides
    shape = (image.shape[0], rows.count, columns.count, rows.size, columns.size, image.shape[3])
    steps = (
        vertical * rows.stride,
        horizontal * columns.stride,
        vertical * rows.dilation,
        horizontal * columns.dilation,
    )
    return as_strided(padded, shape, (batch, *steps, channel), writeable=False)


def pad_image(image: Array, rows: WindowDimension, columns: WindowDimension, value: int, dtype: np.dtype[Any]) -> Array:
    """Return `image` in `dtype` with the windows' padding around it, filled with `value`."""
    if not (rows.padding_low or rows.padding_high or columns.padding_low or columns.padding_high):
        return np.ascontiguousarray(image, dtype)
    _, height, width, _ = image.shape
    padded = np.full(padded_shape(image.shape, rows, columns), value, dtype)
    padded[:, rows.padding_low : rows.padding_low + height, columns.padding_low : columns.padding_low + width] = image
    return padded


def depthwise_shape(
    input: Shape, filter: Shape, bias: Shape, *, depth_multiplier: int, activation: int, **conv_params: int
) -> Shape:
    """Return (batch, height, width, input channels · multiplier)."""
    require(len(input) == 4 and len(filter) == 4, "C1", f"input {input} and filter {filter} must have rank 4")
    require_filled(input, filter)
    require(filter[0] == 1 and depth_multiplier > 0, "C4", f"filter {filter}, depth multiplier {depth_multiplier}")
    agree = input[3] * depth_multiplier == filter[3] and bias == (filter[3],)
    require(agree, "C2", f"input {input}, filter {filter}, bias {bias}, depth multiplier {depth_multiplier}")
    rows, columns = windows(input[1:3], filter[1:3], **conv_params)
    padded_shape((*input[:3], filter[3]), rows, columns)
    return input[0], rows.count, columns.count, filter[3]


def plan_depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    depth_multiplier: int,
    activation: int,
    **conv_params: int,
) -> Run:
    """Plan a depthwise convolution in float32."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    epilogue = float_epilogue(np.tile(bias.array, columns.count), activation)
    taps = filter.array[0].astype(np.float32)
    return accumulate_taps(taps, epilogue, output, input, rows, columns, depth_multiplier, 0)


def plan_quantized_depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    depth_multiplier: int,
    activation: int,
    **conv_params: int,
) -> Run:
    """Plan an exact integer depthwise convolution and its requantization."""
    require_channel_dim(filter, 3)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matrix, sums, bound = pack_exact_matrix(filter.array.reshape(-1, filter.shape[3]), filter.zero_point, input)
    epilogue = quantized_epilogue(sums, bound, input, filter, bias, output, activation, columns.count)
    taps = matrix.reshape(filter.shape[1:])
    return accumulate_taps(taps, epilogue, output, input, rows, columns, depth_multiplier, input.zero_point)


def accumulate_taps(
    taps: Array,
    epilogue: Epilogue,
    output: Tensor,
    input: Tensor,
    rows: WindowDimension,
    columns: WindowDimension,
    depth_multiplier: int,
    padding: int,
) -> Run:
    """Return a Run that adds, for each tap, rows of the image times the tap's weights repeated along the row."""
    channels = taps.shape[2]
    length = columns.count * channels
    shape = (input.shape[0], rows.count, length)
    factors = [(i, j, np.tile(taps[i, j], columns.count)) for i in range(rows.size) for j in range(columns.size)]

    def run(image: Array) -> Array:
        if depth_multiplier > 1:
            image = np.repeat(image, depth_multiplier, axis=3)
        lines = _phased_lines(image, rows, columns, padding, taps.dtype)
        out = np.empty(shape, output.dtype)
        for images, band in bands(shape[0], rows.count, length * taps.itemsize):
            sums = _sum_taps(lines[images], factors, rows, columns, band, channels)
            epilogue(sums.reshape(-1, length), out[images, band].reshape(-1, length))
        return out.reshape(shape[0], rows.count, columns.count, channels)

    return run


def _phased_lines(
    image: Array, rows: WindowDimension, columns: WindowDimension, padding: int, dtype: np.dtype[Any]
) -> Array:
    """Return the padded image as (batch, row, phase, columns of that phase · channels).

    Column c is at phase c % stride, position c // stride, so that the elements that one tap reads are contiguous.
    """
    padded = pad_image(image, rows, columns, padding, dtype)
    batch, height, width, channels = padded.shape
    phases = min(columns.stride, width)
    if phases == 1:
        return padded.reshape(batch, height, 1, width * channels)
    lines = np.empty((batch, height, phases, -(-width // phases), channels), dtype)
    for phase in range(phases):
        part = padded[:, :, phase::phases]
        lines[:, :, phase, : part.shape[2]] = part
    return lines.reshape(batch, height, phases, -(-width // phases) * channels)  # no -1: the batch may be 0


def _sum_taps(
    lines: Array,
    factors: list[tuple[int, int, Array]],
    rows: WindowDimension,
    columns: WindowDimension,
    band: slice,
    channels: int,
) -> Array:
    start, stop, _ = band.indices(rows.count)
    phases, length = lines.shape[2], columns.count * channels
    sums: Array | None = None
    for i, j, factor in factors:
        top = start * rows.stride + i * rows.dilation
        column, phase = divmod(j * columns.dilation, phases)
        picked = lines[:, top : top + (stop - start - 1) * rows.stride + 1 : rows.stride, phase]
        picked = picked[..., column * channels : column * channels + length]
        if sums is None:
            sums, matmul = picked * factor, np.empty(picked.shape, lines.dtype)
        else:
            np.multiply(picked, factor, out=matmul)
            np.add(sums, matmul, out=sums)
    assert sums is not None
    return sums


def plan_sixteen_bit_depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    depth_multiplier: int,
    activation: int,
    **conv_params: int,
) -> Run:
    """Plan DEPTHWISE_CONV_2D of 16 bits."""
    require_channel_dim(filter, 3)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = filter.array[0].astype(np.float64)
    matrix = taps.reshape(-1, filter.shape[3])
    epilogue = sixteen_bit_epilogue(matrix, input, filter, bias, output, activation, columns.count)
    return accumulate_taps(taps, epilogue, output, input, rows, columns, depth_multiplier, 0)


def variants(since: int, in_float: Plan, in_integers: Plan) -> tuple[op.Variant, ...]:
    """Return the combinations of input, filter and bias types that all convolutions accept."""
    return (
        op.Variant({"T": op.F32, "F": op.F32, "B": op.F32}, since, in_float),
        op.Variant({"T": op.Q8, "F": op.Q8, "B": op.I32}, since, in_integers),
        op.Variant({"T": op.Q8, "F": op.PC, "B": op.I32}, op.V1_2, in_integers),
        op.Variant({"T": op.F16, "F": op.F16, "B": op.F16}, op.V1_2, fp16_via_fp32(in_float)),
        op.Variant({"T": op.Q8S, "F": op.Q8S, "B": op.I32}, op.V1_3, in_integers),
        op.Variant({"T": op.Q8S, "F": op.PC, "B": op.I32}, op.V1_3, in_integers),
    )


OPERANDS = (op.data("input"), op.weight("filter", "F"), op.weight("bias", "B"))
IMPLICIT = (op.attribute("padding_scheme"), op.attribute("stride_width"), op.attribute("stride_height"))
EXPLICIT = tuple(
    map(
        op.attribute,
        ("padding_left", "padding_right", "padding_top", "padding_bottom", "stride_width", "stride_height"),
    )
)
LAYOUT = (op.attribute("nchw", op.BOOL),)
_DILATION = (op.attribute("dilation_width"), op.attribute("dilation_height"))


def _overloads(*own: op.Parameter) -> tuple[Any, ...]:
    """Return overloads with implicit and explicit padding; layout, then also dilation may be omitted."""
    lists = ((*OPERANDS, *padding, *own, *LAYOUT, *_DILATION) for padding in (IMPLICIT, EXPLICIT))
    return tuple(op.overload(*p, level=op.V1_2, also={len(p) - 3: op.V1_0, len(p) - 2: op.V1_2}) for p in lists)


def sixteen_bit_variants(plan: Plan) -> tuple[op.Variant, ...]:
    """Return the variants for 16-bit tensors with weights of 8 bits."""
    pairs = itertools.product((op.Q8S, op.PC), (op.I32, op.I64))
    return tuple(op.Variant({"T": op.Q16S, "F": weights, "B": bias}, op.V1_2, plan) for weights, bias in pairs)


# ----------------------------------------------------------------------------------------------------------------------
# GROUPED_CONV_2D: a convolution whose channels are split into independent groups.
#
# One batched matrix product over all groups: the patches of a band as (group, position, K) times the filter as
# (group, K, channels).


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
    pack: PackMatmul,
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    groups: int,
    activation: int,
    **conv_params: int,
) -> Run:
    """Plan a grouped convolution in the arithmetic of `pack`."""
    require_channel_dim(filter, 0)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = pack(input, filter, bias, output, activation, columns.count)
    return convolve_groups(matmul, groups, output, rows, columns, input.zero_point)


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


# ----------------------------------------------------------------------------------------------------------------------
# DYNAMIC_CONV_2D and HYBRID_CONV_2D: weights of 8 bits, and images that are quantized at run time. Those of the second
# operation have scales of their own. Padding is 0. EXACT_CONV_2D has an image of bytes, and returns the sums.


def _dynamic_shape(input: Shape, filter: Shape, bias: Shape, *, rounds_bias: bool, **attributes: int) -> Shape:
    return convolution_shape(input, filter, bias, **attributes)


def _plan_dynamic(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    activation: int,
    rounds_bias: bool,
    **conv_params: int,
) -> Run:
    require_channel_dim(filter, 0)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    product = DynamicMatmul.of(filter, bias, activation, columns.count, bool(rounds_bias))
    return partial(product.run, convolve(product.matmul, input, rows, columns, filter.shape[0], 0))


def _hybrid_shape(input: Shape, filter: Shape, bias: Shape, *, asymmetric: bool, **attributes: int) -> Shape:
    return convolution_shape(input, filter, bias, **attributes)


def _plan_hybrid(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    activation: int,
    asymmetric: bool,
    **conv_params: int,
) -> Run:
    require_channel_dim(filter, 0)
    require_symmetric(filter)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)

    quantize = partial(_quantized_images, asymmetric=bool(asymmetric))
    product = DynamicMatmul.of(filter, bias, activation, columns.count, quantize=quantize)
    return partial(product.run, convolve(product.matmul, input, rows, columns, filter.shape[0], 0))


def _quantized_images(images: Array, asymmetric: bool) -> tuple[Array, Array]:
    """Return the steps of images that have scales of their own, and the scales."""
    steps, scales = row_steps(images.reshape(len(images), math.prod(images.shape[1:])), asymmetric)
    return steps.reshape(images.shape), scales.reshape(-1, 1, 1, 1)


def _plan_hybrid_depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    depth_multiplier: int,
    activation: int,
    asymmetric: bool,
    **conv_params: int,
) -> Run:
    require_channel_dim(filter, 3)
    require_symmetric(filter)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    quantize = partial(_quantized_images, asymmetric=bool(asymmetric))
    product = DynamicMatmul.of(filter, bias, activation, 1, quantize=quantize, is_depthwise=True)
    taps, store = product.matmul.matrix.reshape(filter.shape[1:]), product.matmul.epilogue
    sums = accumulate_taps(taps, store, output, input, rows, columns, depth_multiplier, 0)
    return partial(product.run, sums)


def _hybrid_depthwise_shape(input: Shape, filter: Shape, bias: Shape, *, asymmetric: bool, **attributes: int) -> Shape:
    return depthwise_shape(input, filter, bias, **attributes)


def _plan_exact(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: int
) -> Run:
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = exact_matmul(input, filter, bias, activation, columns.count)
    return convolve(matmul, input, rows, columns, filter.shape[0], input.zero_point)


_EXACT = op.overload(*(*OPERANDS, *EXPLICIT, op.attribute("activation"), *LAYOUT, *_DILATION), level=op.V1_2)

_DYNAMIC = op.overload(
    *(*OPERANDS, *EXPLICIT, op.attribute("activation"), *LAYOUT, *_DILATION, op.attribute("rounds_bias", op.BOOL)),
    level=op.V1_2,
)

_ACTIVATION, _ASYMMETRIC = op.attribute("activation"), op.attribute("asymmetric", op.BOOL)
_HYBRID = op.overload(*(*OPERANDS, *IMPLICIT, _ACTIVATION, *LAYOUT, *_DILATION, _ASYMMETRIC), level=op.V1_2)
_HYBRID_DEPTHWISE = op.overload(
    *(*OPERANDS, *IMPLICIT, op.attribute("depth_multiplier"), _ACTIVATION, *LAYOUT, *_DILATION, _ASYMMETRIC),
    level=op.V1_2,
)

# -- declarations ------------------------------------------------------------------------------------------------------

_GROUPED = (op.attribute("groups"), op.attribute("activation"), *LAYOUT)

DECLARATIONS = (
    op.Declaration(
        OperationType.CONV_2D,
        since=op.V1_0,
        overloads=_overloads(op.attribute("activation")),
        variants=variants(op.V1_0, *(partial(plan_convolution, pack) for pack in (float_matmul, quantized_matmul))),
        shape=convolution_shape,
        images=("input",),
        zero_sized=True,
        level=output_scale_level,
        extended=(
            op.sixteen_bits(*sixteen_bit_variants(partial(plan_convolution, sixteen_bit_matmul))),
            dynamic(_plan_dynamic, overloads=(_DYNAMIC,), shape=_dynamic_shape),
            exact(_plan_exact, overloads=(_EXACT,)),
            hybrid(_plan_hybrid, overloads=(_HYBRID,), shape=_hybrid_shape),
        ),
    ),
    op.Declaration(
        OperationType.DEPTHWISE_CONV_2D,
        since=op.V1_0,
        overloads=_overloads(op.attribute("depth_multiplier"), op.attribute("activation")),
        variants=variants(op.V1_0, plan_depthwise, plan_quantized_depthwise),
        shape=depthwise_shape,
        images=("input",),
        zero_sized=True,
        level=output_scale_level,
        extended=(
            op.sixteen_bits(*sixteen_bit_variants(plan_sixteen_bit_depthwise)),
            hybrid(_plan_hybrid_depthwise, overloads=(_HYBRID_DEPTHWISE,), shape=_hybrid_depthwise_shape),
        ),
    ),
    op.Declaration(
        OperationType.GROUPED_CONV_2D,
        since=op.V1_2,
        overloads=tuple(op.overload(*OPERANDS, *padding, *_GROUPED, level=op.V1_2) for padding in (IMPLICIT, EXPLICIT)),
        variants=variants(op.V1_2, *(partial(plan_grouped, pack) for pack in (float_matmul, quantized_matmul))),
        shape=grouped_shape,
        images=("input",),
        extended=(op.sixteen_bits(*sixteen_bit_variants(partial(plan_grouped, sixteen_bit_matmul))),),
    ),
)
