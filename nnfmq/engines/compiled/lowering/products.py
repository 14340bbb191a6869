"""Lowering rules of convolutions, depthwise ones included, and of matrix products.

CONV_2D, GROUPED_CONV_2D, TRANSPOSE_CONV_2D, FULLY_CONNECTED, BATCH_MATMUL. A rule chooses the
micro-kernel, folds zero points into the bias, and chooses the epilogue. It returns None if an accumulator might
overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace as replaced

from nnfmq.base.frozen import dataclass
from nnfmq.engines.compiled.kernels.conv_shape import ConvShape
from nnfmq.engines.compiled.kernels.depthwise import plan_dwconv
from nnfmq.engines.compiled.kernels.depthwise_int8 import DwConvInt8Kernel, plan_dwconv_int8
from nnfmq.engines.compiled.kernels.elementwise import plan_elementwise
from nnfmq.engines.compiled.kernels.float_ops import Cast
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.gemm_plan import estimate_cycles, plan_gemm
from nnfmq.engines.compiled.kernels.interleaving import RowDot
from nnfmq.engines.compiled.kernels.micro_kernels import (
    Dot4,
    DotS16x2,
    Float32,
    HalfWeights,
    MaddU8S8Acc16,
    MicroKernel,
    s8_micro_kernel,
)
from nnfmq.engines.compiled.kernels.packing import PackRhs, PackRhsBytes
from nnfmq.engines.compiled.kernels.requantize import (
    NO_REQUANTIZATION,
    REQUANT_ROWS,
    FixedPointMultiplier,
    Float32Multiplier,
    OutputQuantParams,
    RealMultiplier,
    Requantization,
    float32_constants,
    real_constants,
    requant_constants,
)
from nnfmq.engines.compiled.lowering import Intermediate, KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.lowering.movement import interleave_subconvolutions, permute_axes
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Array, Shape, Tensor
from nnfmq.operations.fixed_point import INT32_MAX, Ints, ints
from nnfmq.operations.quantization import (
    OutputMultipliers,
    dtype_range,
    float_activation_range,
    quantized_activation_range,
    real_scales,
    requantization_scales,
)
from nnfmq.operations.shapes import WindowDimension, windows
from nnfmq.operations.transpose_conv import TransposedConvDimension, transposed_conv_dimensions

__all__ = [
    "Q8",
    "RULES",
    "Epilogue",
    "WeightedOp",
    "Weights",
    "best_acc16_kernel",
    "choose_epilogue",
    "estimate_ns",
    "gemm_of_rows",
    "image_and_windows",
    "int8_offset",
    "is_float",
    "max_abs",
    "rows_shape",
    "weight_range",
    "weight_zero_point_of",
    "with_folded_zero_point",
    "without_zero_point",
]


# ----------------------------------------------------------------------------------------------------------------------
# Operands and epilogues of convolutions and matrix products with constant weights: what their lowering rules share.


Weights: TypeAlias = Callable[[], Array]
"""Returns weights minus their zero point. Called only if needed: a cache may have them packed."""

Q8 = (np.dtype("u1"), np.dtype("i1"))


def image_and_windows(
    input: Tensor, filter: Tensor, conv_params: Mapping[str, int]
) -> tuple[int, int, int, int, WindowDimension, WindowDimension]:
    """Return batch, height, width and channels of the input, and the windows along its rows and columns.

    An image of one column is treated as one of one row, which has the same elements in the same order: kernels compute
    several pixels of a row at a time. Convolutions along time are often such images.
    """
    batch, height, width, channels = input.shape
    rows, columns = windows((height, width), filter.shape[1:3], **conv_params)
    if (width, columns.size, columns.padding_low, columns.count) == (1, 1, 0, 1):
        return batch, 1, height, channels, columns, rows
    return batch, height, width, channels, rows, columns


@dataclass(frozen=True, slots=True)
class WeightedOp:
    """The operands of a convolution or matrix product, and its GEMM `shape`; that is None for a depthwise convolution.

    `derived_weights`, if set, returns the weights in place of the filter's: (output channels, height, width, input
    channels per group), without the zero point. `rounds_once`: accumulators are multiplied by float64 numbers.
    """

    shape: ConvShape | None
    input: Tensor
    filter: Tensor
    bias: Tensor
    output: Tensor
    target: Target
    activation: int
    derived_weights: Weights | None = None
    rounds_once: bool = False

    @property
    def conv_shape(self) -> ConvShape:
        """The shape of a GEMM."""
        assert self.shape is not None, "only depthwise convolutions have none"
        return self.shape

    @property
    def is_signed(self) -> bool:
        """Whether the input is int8."""
        return self.input.dtype.kind == "i"

    def weights(self) -> Array:
        """Return the weights minus their zero point."""
        return without_zero_point(self.filter) if self.derived_weights is None else self.derived_weights()

    def weight_rows(self) -> Array:
        """Return the weights of each output channel as a row."""
        weights = self.weights()
        return weights.reshape(len(weights), -1)


def is_float(*tensors: Tensor) -> bool:
    """Return whether all tensors are float32."""
    return all(tensor.dtype == _FLOAT32 for tensor in tensors)


def without_zero_point(filter: Tensor) -> Array:
    """Return a filter's values: float32, or 8-bit values minus their zero point as int16."""
    if filter.dtype.kind == "f":
        return filter.array
    return filter.array.astype(np.int16) - np.int16(filter.zero_point)


def max_abs(tensor: Tensor) -> int:
    """Return the largest |value - zero point| of a tensor's type."""
    info = np.iinfo(tensor.dtype)
    return max(info.max - tensor.zero_point, tensor.zero_point - info.min)


def weight_range(filter: Tensor) -> tuple[int, int]:
    """Return minimum and maximum weight minus the zero point, of the filter and of the 0 that fills panels."""
    return min(int(filter.array.min()) - filter.zero_point, 0), max(int(filter.array.max()) - filter.zero_point, 0)


def int8_offset(low: int, high: int) -> int:
    """Return the smallest constant to subtract from values from `low` to `high` so that int8 holds them."""
    return max(high - 127, 0) + min(low + 128, 0)


def weight_zero_point_of(op: WeightedOp) -> int:
    """Return the constant to subtract from weights so that int8 holds them, and the 0 that fills panels.

    0 without dot4: the range of the weights decides which of the other micro-kernels multiplies them.
    """
    return int8_offset(*weight_range(op.filter)) if op.target.has_dot4 else 0


# -- epilogues ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The conversion of accumulators to output values: rows of constants and a bias for each packed channel."""

    requantization: Requantization
    rows: Array
    bias: Ints
    quant: OutputQuantParams

    def constant(self, target: Target) -> bytes:
        """Return the constant that the kernel loads."""
        return self.requantization.constants(self.rows, self.bias, self.quant, target.lanes)


def choose_epilogue(
    op: WeightedOp, channel_map: Array, k: int, weight_rows: Weights, can_prescale: bool = True
) -> Epilogue | None:
    """Return the epilogue for the packed channels `channel_map`, or None if an accumulator may overflow int32.

    |acc| is bounded by K * max|w| * max|x|; if that is too large, by sum|w| * max|x| per channel, which needs the
    weights. `can_prescale`: weights may be packed doubled.
    """
    bias = ints(op.bias.array)[channel_map % len(op.bias.array)]
    output_min, output_max = quantized_activation_range(op.activation, op.output)
    quant = OutputQuantParams(op.output.zero_point, output_min, output_max, op.input.zero_point)
    multiplication = _real_multiplication if op.rounds_once else _fixed_point_multiplication
    any_weights = ints(np.full(len(channel_map), k * max_abs(op.filter) * max_abs(op.input)))
    found = multiplication(op, channel_map, bias, any_weights, quant, can_prescale)
    if found is None:
        sums = np.abs(weight_rows().astype(np.int32)).sum(axis=1, dtype=np.int64)
        found = multiplication(op, channel_map, bias, sums[channel_map] * max_abs(op.input), quant, can_prescale)
    if found is None:
        return None
    multiplier, rows = found
    return Epilogue(Requantization(multiplier), rows, bias, quant)


_Multiplication: TypeAlias = tuple[FixedPointMultiplier | Float32Multiplier | RealMultiplier, Array]
"""A multiplication of accumulators, and the rows of constants of the packed channels that it loads."""


def _real_multiplication(
    op: WeightedOp, channel_map: Array, bias: Ints, max_abs_acc: Ints, quant: OutputQuantParams, can_prescale: bool
) -> _Multiplication | None:
    found = RealMultiplier.of(bias, max_abs_acc)
    if found is None:
        return None
    factors = np.array(real_scales(op.input, op.filter, op.output))
    return found, real_constants(factors[channel_map % len(factors)])


def _fixed_point_multiplication(
    op: WeightedOp, channel_map: Array, bias: Ints, max_abs_acc: Ints, quant: OutputQuantParams, can_prescale: bool
) -> _Multiplication | None:
    """Return the fastest two-rounding multiplication, or None if one in int32 may overflow.

    The model may have one scale for all channels.
    """
    multipliers = OutputMultipliers.of(requantization_scales(op.input, op.filter, op.bias, op.output))
    multipliers = multipliers.of_channels(channel_map % len(multipliers.multipliers))
    fixed_point = FixedPointMultiplier.of(multipliers, bias, max_abs_acc, can_prescale)
    if fixed_point is None:
        return None
    results = (quant.output_min - quant.output_zero_point, quant.output_max - quant.output_zero_point)
    float32 = Float32Multiplier.of(multipliers, np.abs(bias) + max_abs_acc, results, op.target)
    if float32 is not None:
        return float32, float32_constants(multipliers, REQUANT_ROWS)
    return fixed_point, requant_constants(multipliers)


def with_folded_zero_point(op: WeightedOp, epilogue: Epilogue, weight_sums: Ints, lhs_is_signed: bool) -> bytes:
    """Return the constant of an epilogue whose accumulators contain input zero point * sum of the weights.

    The zero point is that of inputs as int8 if `lhs_is_signed`, else as uint8.
    """
    zero_point = op.input.zero_point + 128 * (op.is_signed - lhs_is_signed)
    quant = replace(epilogue.quant, input_zero_point=zero_point)
    return replace(epilogue, bias=epilogue.bias - zero_point * weight_sums, quant=quant).constant(op.target)


# ----------------------------------------------------------------------------------------------------------------------
# Lowering rules of convolutions and matrix products.


_FLOAT32, _FLOAT16 = np.dtype("<f4"), np.dtype("<f2")
_POINTWISE = WindowDimension(1, 1, 1, 0, 0, 1)
_MAX_U8, _MAX_S8 = 255, 128
_MAX_HALF_ROWS = 4  # that are multiplied by weights of float16: conversions take two thirds of a product's time
_MIN_HALF_WEIGHTS = 1 << 17  # fewer stay in the second-level cache, from which float32 is as fast
_WEIGHT_BYTES_PER_NS = 32  # of one thread, from the second-level or the shared cache
_ACC16_WIDTHS, _ACC16_WIDTHS_GEMV = (
    (2, 4),
    (2, 4, 8),
)  # in vectors; 8 would not fit the first-level cache with more rows
_MAX_PRODUCT_S8 = 1 << 16  # of two int8 values minus their zero points


def rows_shape(count: int, k: int, units: int) -> ConvShape:
    """Return the shape of a product of `count` rows of `k` elements with `units` rows of weights."""
    return ConvShape(1, 1, count, k, _POINTWISE, _along(count), units)


def gemm_of_rows(count: int, weights: Array, biases: Array, target: Target) -> KernelLaunch:
    """Return the launch that multiplies `count` rows of float32 by `weights` (units, k) and adds `biases`."""
    shape = rows_shape(count, weights.shape[1], len(weights))
    return _float_launch(plan_gemm(shape, Float32(-np.inf, np.inf), target), lambda: weights, biases)


def _along(count: int) -> WindowDimension:
    """Return pointwise windows over `count` pixels."""
    return WindowDimension(1, 1, 1, 0, 0, count)


# -- rules -------------------------------------------------------------------------------------------------------------


def convolution(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int, **conv_params: int
) -> KernelLaunch | None:
    """CONV_2D."""
    return grouped(input, filter, bias, output=output, target=target, groups=1, activation=activation, **conv_params)


def grouped(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    groups: int,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    """GROUPED_CONV_2D."""
    if 0 in input.shape:
        return None
    batch, height, width, channels, rows, columns = image_and_windows(input, filter, conv_params)
    shape = ConvShape(batch, height, width, channels, rows, columns, filter.shape[0], groups)
    return _lower_gemm(WeightedOp(shape, input, filter, bias, output, target, activation))


def fully_connected(
    input: Tensor,
    weights: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    activation: int,
    rounds_once: bool = False,
) -> KernelLaunch | None:
    """FULLY_CONNECTED: each row of the input is a pixel. `rounds_once`: as TFLite defines it."""
    if 0 in input.shape:
        return None
    units, k = weights.shape
    shape = rows_shape(math.prod(input.shape) // k, k, units)
    return _lower_gemm(WeightedOp(shape, input, weights, bias, output, target, activation, rounds_once=rounds_once))


def transposed(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, target: Target, activation: int, **conv_params: Any
) -> KernelSequence | None:
    """TRANSPOSE_CONV_2D: stride² subconvolutions as channels of one convolution, then interleaved (depth to space).

    Output pixel m · stride + phase - padding sums taps phase + t · stride over input pixels m - t: with filters split
    by phase and reversed, every phase is a channel of a convolution of stride 1.
    """
    if 0 in input.shape:
        return None
    vertical, horizontal = transposed_conv_dimensions(input.shape[1:3], filter.shape[1:3], **conv_params)
    output_channels, phases = filter.shape[0], vertical.stride * horizontal.stride
    rows, columns = _subconvolution_window(vertical), _subconvolution_window(horizontal)

    def split_filter() -> Array:
        weights = without_zero_point(filter)
        filled = np.zeros(
            (output_channels, rows.size * vertical.stride, columns.size * horizontal.stride, weights.shape[3]),
            weights.dtype,
        )
        filled[:, : weights.shape[1], : weights.shape[2]] = weights
        by_phase = filled.reshape(output_channels, rows.size, vertical.stride, columns.size, horizontal.stride, -1)
        reversed_taps = by_phase[:, ::-1, :, ::-1].transpose(2, 4, 0, 1, 3, 5)
        return reversed_taps.reshape(phases * output_channels, rows.size, columns.size, -1)

    batch, height, width, channels = input.shape
    shape = ConvShape(batch, height, width, channels, rows, columns, phases * output_channels)
    gemm = _lower_gemm(WeightedOp(shape, input, filter, bias, output, target, activation, split_filter))
    if gemm is None:
        return None
    made = (batch, rows.count, columns.count, vertical.stride, horizontal.stride, output_channels)
    interleave = interleave_subconvolutions(made, (vertical.padding_low, horizontal.padding_low), output, target)
    if interleave is None:
        return None
    return KernelSequence((Intermediate(gemm, (0,), output.dtype, made),), interleave, (1,))


def _subconvolution_window(dimension: TransposedConvDimension) -> WindowDimension:
    """Return the windows of the subconvolutions along one axis."""
    size = math.ceil(dimension.size / dimension.stride)
    count = (dimension.count - 1 + dimension.padding_low) // dimension.stride + 1
    return WindowDimension(size, 1, 1, size - 1, count - dimension.input_size, count)


def batch_matmul(
    left: Tensor, right: Tensor, *, output: Tensor, target: Target, adjoint_left: bool, adjoint_right: bool
) -> KernelSequence | None:
    """BATCH_MATMUL of float32 or int8: transposes if adjoint, packing of the RHS, then a GEMM with a batched RHS."""
    if left.dtype not in (_FLOAT32, np.int8) or 0 in (*left.shape, *right.shape):
        return None
    batch, (rows, columns) = math.prod(output.shape[:-2]), output.shape[-2:]
    k = left.shape[-2 if adjoint_left else -1]
    shape = ConvShape(batch, 1, rows, k, _POINTWISE, _along(rows), columns, has_batched_rhs=True)
    found = _matmul_kernel(shape, left, right, output, target)
    if found is None:
        return None
    kernel, epilogue = found
    pack = _rhs_packing(kernel, left, right)
    intermediates: list[Intermediate] = []
    sources = [0, 1]  # numbers of the operation's inputs, or of the intermediates after them
    for number, (tensor, is_adjoint) in enumerate(((left, adjoint_left), (right, adjoint_right))):
        if is_adjoint:
            intermediates.append(_transpose(tensor, number, target))
            sources[number] = 1 + len(intermediates)
    packing = KernelLaunch(pack, (), batch * k * columns // 8)
    intermediates.append(Intermediate(packing, (sources[1],), np.dtype("u1"), (pack.bytes,)))
    product = KernelLaunch(kernel, (epilogue, kernel.params()), shape.macs // 16)
    return KernelSequence(tuple(intermediates), product, (sources[0], 1 + len(intermediates)))


def _matmul_kernel(
    shape: ConvShape, left: Tensor, right: Tensor, output: Tensor, target: Target
) -> tuple[GemmKernel, bytes] | None:
    """Return the GEMM of a BATCH_MATMUL and its epilogue's constant, or None if an accumulator may overflow.

    Of int8, that with dot4 or mmla if the target has them, else with dot2. The terms of dot4's sums add up to less than
    255 * (128 + 128 + 255) for each element, twice what a product of dot2 may be: they fit wherever the epilogue does.
    """
    if left.dtype == _FLOAT32:
        kernel = plan_gemm(shape, Float32(-np.inf, np.inf), target)
        return kernel, bytes(4 * len(kernel.packed_channel_map))  # no bias
    without_tiles = replaced(target, has_tiles=False)

    def micro_kernel(requantization: Requantization) -> MicroKernel:
        if not target.has_dot4:
            return DotS16x2(True, requantization)
        return s8_micro_kernel(without_tiles, shape, True, right.zero_point != 0, requantization)

    kernel = plan_gemm(shape, micro_kernel(NO_REQUANTIZATION), target)
    found = _matmul_epilogue(left, right, output, shape.k, len(kernel.packed_channel_map), not target.has_dot4)
    if found is None:
        return None
    return replace(kernel, micro_kernel=micro_kernel(found.requantization)), found.constant(target)


def _rhs_packing(kernel: GemmKernel, left: Tensor, right: Tensor) -> PackRhs | PackRhsBytes:
    """Return the kernel that packs the RHS of a BATCH_MATMUL."""
    s, mk = kernel.shape, kernel.micro_kernel
    if not isinstance(mk, Dot4):
        is_float = left.dtype == _FLOAT32
        return PackRhs(s.batch, s.k, s.output_channels, kernel.nr, is_float, right.zero_point, mk.weight_prescale)
    lhs_zero_point = left.zero_point + 128 * (not mk.lhs_is_signed)
    return PackRhsBytes(s.batch, s.k, s.output_channels, kernel.nr, mk.kr, right.zero_point, lhs_zero_point)


def _transpose(tensor: Tensor, number: int, target: Target) -> Intermediate:
    """Return the transposition of the matrices that are input `number`."""
    axes = len(tensor.shape)
    permutation = (*range(axes - 2), axes - 1, axes - 2)
    shape = tuple(tensor.shape[axis] for axis in permutation)
    return Intermediate(permute_axes(tensor.shape, permutation, tensor.dtype, target), (number,), tensor.dtype, shape)


# -- micro-kernels and weights -----------------------------------------------------------------------------------------


def estimate_ns(shape: ConvShape, macs_per_ns: int, weight_bytes: int) -> int:
    """Return an estimate of a GEMM's time on one thread: of its arithmetic, or of reading its weights from a cache."""
    return max(shape.macs // macs_per_ns, shape.k * shape.output_channels * weight_bytes // _WEIGHT_BYTES_PER_NS)


def _lower_gemm(op: WeightedOp) -> KernelLaunch | None:
    """Return the launch of a float32 GEMM, or of the fastest quantized one that cannot overflow."""
    if is_float(op.input, op.filter, op.output):
        micro_kernel = (HalfWeights if _are_half(op) else Float32)(*float_activation_range(op.activation))
        return _float_launch(plan_gemm(op.conv_shape, micro_kernel, op.target), op.weights, op.bias.array)
    if op.input.dtype not in Q8 or op.output.dtype not in Q8:
        return None
    return _s8_launch(op) or _s16_launch(op)


def _are_half(op: WeightedOp) -> bool:
    """Return whether float16 can hold all weights, of which each is read once: from far memory, rather than computed.

    A file with weights of float16 has such ones. Infinities and NaN stay float32.
    """
    shape = op.conv_shape
    if not op.target.has_half or shape.m > _MAX_HALF_ROWS or shape.k * shape.output_channels < _MIN_HALF_WEIGHTS:
        return False
    weights = op.weights().reshape(-1)
    parts = (weights[first : first + _MIN_HALF_WEIGHTS] for first in range(0, len(weights), _MIN_HALF_WEIGHTS))
    with np.errstate(over="ignore"):
        return all(np.array_equal(part, part.astype(_FLOAT16)) and np.isfinite(part).all() for part in parts)


def _float_launch(kernel: GemmKernel, weights: Weights, bias: Array) -> KernelLaunch:
    biases = np.asarray(bias, np.float32)[kernel.packed_channel_map % len(bias)]
    constants = (lambda: kernel.pack(weights()), biases.tobytes(), kernel.params())
    return KernelLaunch(kernel, constants, estimate_ns(kernel.shape, 16, kernel.micro_kernel.weight_bytes))


def _s16_launch(op: WeightedOp) -> KernelLaunch | None:
    """Return a GEMM with dot2, or None if an accumulator may overflow."""
    kernel = plan_gemm(op.conv_shape, DotS16x2(op.is_signed, NO_REQUANTIZATION), op.target)
    epilogue = choose_epilogue(op, kernel.packed_channel_map, op.conv_shape.k, op.weight_rows)
    if epilogue is None:
        return None
    kernel = replace(kernel, micro_kernel=DotS16x2(op.is_signed, epilogue.requantization))
    prescale = np.int16(kernel.micro_kernel.weight_prescale)
    constants = (lambda: kernel.pack(op.weights() * prescale), epilogue.constant(op.target), kernel.params())
    return KernelLaunch(kernel, constants, estimate_ns(op.conv_shape, 32, 2))


def _s8_launch(op: WeightedOp) -> KernelLaunch | None:
    """Return a GEMM with dot4 or acc16, or None if the target has neither, dot2 is faster or int32 may overflow.

    sum((x - zp) * w) = sum(x * w) - zp * sum(w): the second term goes into the bias.
    """
    shape, target = op.conv_shape, op.target
    weight_zero_point = weight_zero_point_of(op)
    # Accumulators with the row-sum correction, and the bias with the input zero point's term, fit in any order.
    max_abs_acc = _MAX_U8 * shape.k * (_MAX_S8 + abs(weight_zero_point) + max_abs(op.filter))
    fits = max_abs_acc + int(np.abs(ints(op.bias.array)).max(initial=0)) <= INT32_MAX
    if not fits or (weight_zero_point and shape.groups > 1):
        return None

    # The few filters of uint8 that need no correction share the kernels of the others. A row sum takes 1/n of a row.
    corrects = bool(weight_zero_point) or (op.filter.dtype == np.uint8 and target.has_dot4 and shape.groups == 1)
    micro_kernel = partial(s8_micro_kernel, target, shape, op.is_signed, corrects)
    candidate = plan_gemm(shape, micro_kernel(NO_REQUANTIZATION), target) if target.has_dot4 else best_acc16_kernel(op)
    if candidate is None:
        return None
    epilogue = choose_epilogue(op, candidate.packed_channel_map, shape.k, op.weight_rows, can_prescale=False)
    if epilogue is None:
        return None
    requantizing = micro_kernel(epilogue.requantization)
    kernel = replace(candidate, micro_kernel=requantizing)
    epilogue = replace(epilogue, quant=replace(epilogue.quant, weight_zero_point=weight_zero_point))

    def corrected_epilogue() -> bytes:
        weight_sums = op.weight_rows().sum(axis=1, dtype=np.int64)[kernel.packed_channel_map]
        return with_folded_zero_point(op, epilogue, weight_sums, requantizing.lhs_is_signed)

    constants = (lambda: kernel.pack(op.weights() - np.int16(weight_zero_point)), corrected_epilogue, kernel.params())
    return KernelLaunch(kernel, constants, estimate_ns(shape, 128, 1))


def best_acc16_kernel(op: WeightedOp) -> GemmKernel | None:
    """Return the fastest acc16 GEMM, or None if the target has none or dot2 is faster.

    The wider a panel, the more groups are listed several times because of one of its channels.
    """
    shape, target = op.conv_shape, op.target
    if target.pmaddubsw is None:
        return None
    weights = op.weights()
    dot2_kernel = plan_gemm(shape, DotS16x2(op.is_signed, NO_REQUANTIZATION), target)
    micro_kernel = MaddU8S8Acc16(op.is_signed, NO_REQUANTIZATION)
    widths = _ACC16_WIDTHS_GEMV if shape.m == 1 else _ACC16_WIDTHS
    candidates = [plan_gemm(shape, micro_kernel, target, [width]) for width in widths]
    cycles, best = min(
        ((estimate_cycles(candidate, weights), candidate) for candidate in candidates), key=lambda timed: timed[0]
    )
    return best if cycles < estimate_cycles(dot2_kernel, weights) else None


def _matmul_epilogue(
    left: Tensor, right: Tensor, output: Tensor, k: int, channels: int, can_prescale: bool
) -> Epilogue | None:
    """Return the epilogue of a quantized BATCH_MATMUL, or None if an accumulator may overflow int32."""
    real = float(np.float32(left.scale) * np.float32(right.scale)) / float(np.float32(output.scale))
    multipliers = OutputMultipliers.of([real]).of_channels(np.zeros(channels, np.intp))
    no_bias, max_abs_acc = ints(np.zeros(channels)), ints(np.full(channels, k * _MAX_PRODUCT_S8))
    found = FixedPointMultiplier.of(multipliers, no_bias, max_abs_acc, can_prescale)
    if found is None:
        return None
    quant = OutputQuantParams(output.zero_point, *dtype_range(output), left.zero_point, -right.zero_point)
    return Epilogue(Requantization(found), requant_constants(multipliers), no_bias, quant)


# -- float16 -----------------------------------------------------------------------------------------------------------


def _or_float16(rule: Callable[..., KernelLaunch | None]) -> LoweringRule:
    """Return a rule for a product, also of float16: in float32, with results that are rounded once."""

    def lower(
        input: Tensor, *weights: Tensor, output: Tensor, target: Target, **attributes: Any
    ) -> KernelLaunch | KernelSequence | None:
        if output.dtype != _FLOAT16:
            return rule(input, *weights, output=output, target=target, **attributes)
        if not target.has_half:
            return None
        wide, *others, result = (_in_float32(tensor) for tensor in (input, *weights, output))
        product = rule(wide, *others, output=result, target=target, **attributes)
        if product is None:
            return None
        intermediates = (
            Intermediate(_cast("f2", "f4", input, target), (0,), _FLOAT32, input.shape),
            Intermediate(product, (1,), _FLOAT32, output.shape),
        )
        return KernelSequence(intermediates, _cast("f4", "f2", output, target), (2,))

    return lower


def _in_float32(tensor: Tensor) -> Tensor:
    value = None if tensor.value is None else tensor.array.astype(_FLOAT32)
    return replaced(tensor, dtype=_FLOAT32, value=value)


def _cast(input_type: str, output_type: str, tensor: Tensor, target: Target) -> KernelLaunch:
    """Return the launch that converts an array of the tensor's shape."""
    kernel = plan_elementwise(Cast(input_type, output_type), tensor.shape, [tensor.shape], target)
    return KernelLaunch(kernel, (), math.prod(tensor.shape) // 4)


_CONV_MATMUL_RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.BATCH_MATMUL: batch_matmul,
    OperationType.CONV_2D: _or_float16(convolution),
    OperationType.FULLY_CONNECTED: _or_float16(fully_connected),
    OperationType.GROUPED_CONV_2D: _or_float16(grouped),
    OperationType.TRANSPOSE_CONV_2D: transposed,
}


# ----------------------------------------------------------------------------------------------------------------------
# Lowering rule of DEPTHWISE_CONV_2D: float32, or 8 bits summed in integers. None if an accumulator might overflow.


def depthwise(
    input: Tensor,
    filter: Tensor,
    bias: Tensor,
    *,
    output: Tensor,
    target: Target,
    depth_multiplier: int,
    activation: int,
    **conv_params: int,
) -> KernelLaunch | None:
    """DEPTHWISE_CONV_2D."""
    if 0 in input.shape:
        return None
    batch, height, width, channels, rows, columns = image_and_windows(input, filter, conv_params)
    image, taps_shape = (batch, height, width, channels), (rows.size, columns.size, filter.shape[3])
    if is_float(input, filter, output):
        micro_kernel = Float32(*float_activation_range(activation))
        kernel = plan_dwconv(image, depth_multiplier, rows, columns, micro_kernel, target)
        biases = np.asarray(bias.array, np.float32)[kernel.packed_channel_map]
        constants = (lambda: kernel.pack(filter.array.reshape(taps_shape)), biases.tobytes(), kernel.params())
        return KernelLaunch(kernel, constants, kernel.macs // 12)
    if input.dtype not in Q8 or output.dtype not in Q8:
        return None
    dot = RowDot.of(target, weight_range(filter), input.dtype.kind == "i", NO_REQUANTIZATION)
    planned = plan_dwconv_int8(image, depth_multiplier, rows, columns, dot, target)
    op = WeightedOp(None, input, filter, bias, output, target, activation)
    return _depthwise_launch(op, planned, taps_shape)


def _depthwise_launch(op: WeightedOp, planned: DwConvInt8Kernel, taps_shape: Shape) -> KernelLaunch | None:
    """Return the launch of a quantized depthwise convolution, or None if an accumulator may overflow."""
    channel_map, taps = planned.packed_channel_map, math.prod(taps_shape[:2])

    def weights() -> Array:
        return op.weights().reshape(taps, -1)

    epilogue = choose_epilogue(op, channel_map, taps, lambda: weights().T, planned.dot.can_prescale)
    if epilogue is None:
        return None

    def folded_epilogue() -> bytes:
        weight_sums = weights().sum(axis=0, dtype=np.int64)[channel_map]
        return with_folded_zero_point(op, epilogue, weight_sums, planned.dot.lhs_is_signed(op.target))

    kernel = replace(planned, dot=replace(planned.dot, requantization=epilogue.requantization))
    prescale = np.int16(epilogue.requantization.multiplier.weight_prescale)
    constants = (
        lambda: kernel.pack(weights().reshape(taps_shape) * prescale),
        folded_epilogue,
        kernel.params(),
    )
    return KernelLaunch(kernel, constants, kernel.macs // 32)


_DEPTHWISE_RULES: Mapping[OperationType, LoweringRule] = {OperationType.DEPTHWISE_CONV_2D: _or_float16(depthwise)}

RULES: Mapping[OperationType, LoweringRule] = {**_CONV_MATMUL_RULES, **_DEPTHWISE_RULES}
