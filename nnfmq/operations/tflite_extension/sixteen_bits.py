"""Operations on 16-bit tensors but for arithmetic: functions, products, images and movement.

TFLite quantizes such tensors symmetrically: the zero point is 0. `sixteen_bit` makes the declaration of an operation
Q16_X from that of the HAL's X. A 64-bit accumulator is multiplied by 16 bits of the multiplier and rounded once, half
up; a 32-bit one as in `fixed_point`. LookupTable is TFLite's table of 513 values with linear interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.extensions import TENSOR_INT64, TfliteOperation
from nnfmq.hal.types import OperandType, OperationType
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import (
    batch_matmul,
    convolution,
    fixed_point,
    fully_connected,
    gather,
    grouped_conv,
    min_max_select,
    padding,
    permute,
    pooling,
    quantize_cast,
    reduction,
    reshape_concat,
    resizing,
    slicing,
    softmax,
    space_depth_batch,
    transpose_conv,
)
from nnfmq.operations.convolution import accumulate_taps, convolve, require_channel_dim
from nnfmq.operations.declaration import (
    F16,
    F32,
    FLOAT32,
    I32,
    INT32,
    PC,
    Q8,
    Q8S,
    Q16S,
    V1_0,
    V1_2,
    Array,
    Declaration,
    Overload,
    Plan,
    Run,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
    weight,
)
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.grouped_conv import convolve_groups
from nnfmq.operations.kernel_adapters import dequantize_array
from nnfmq.operations.packed_matmul import PackedMatmul
from nnfmq.operations.pooling import pixel_counts, plan_quantized_max, reduce_windows
from nnfmq.operations.quantization import (
    Epilogue,
    OutputMultipliers,
    dtype_range,
    quantized_activation_range,
    real_scales,
)
from nnfmq.operations.reduction import reduced_axes
from nnfmq.operations.shapes import normalize_axis, require, same_shape, windows
from nnfmq.operations.tflite_extension.declaration import (
    SHAPES_OF_ANY_RANK,
    conversions,
    function_of_one,
    own_code,
    variants_of,
)
from nnfmq.operations.transpose_conv import scatter_taps, transposed_conv_dimensions

__all__ = [
    "DECLARATIONS",
    "LookupTable",
    "find",
    "float_ratio",
    "multiply_wide",
    "plan_average",
    "plan_bilinear",
    "plan_cast",
    "plan_convolution",
    "plan_depthwise",
    "plan_dequantize",
    "plan_fully_connected",
    "plan_grouped",
    "plan_logistic",
    "plan_matmul",
    "plan_mean",
    "plan_softmax",
    "plan_softmax_of_8_bits",
    "plan_sqrt",
    "plan_tanh",
    "plan_topk",
    "plan_transposed",
    "reduced_multiplier",
    "rescaling",
    "rounded",
    "saturated",
    "sixteen_bit",
    "via_table",
]

INT16_MIN, INT16_MAX = -(1 << 15), (1 << 15) - 1
_STEPS = 512  # of a LookupTable

Types = dict[str, OperandType]


def find(declarations: Iterable[Declaration], code: OperationType) -> Declaration:
    """Return the declaration of `code`."""
    return next(declaration for declaration in declarations if declaration.code == code)


def sixteen_bit(source: Declaration, plan: Plan | None = None, types: Iterable[Types] = ({},)) -> Declaration:
    """Return the declaration of Q16_X, X being `source`: it has the same parameters and shape rule.

    There is a variant for each of `types`, the types of other variables than T. Without `plan`, it is computed like
    float32: it then only moves elements.
    """
    if plan is None:
        plan = next(variant.plan for variant in source.variants if variant.types["T"] == F32)
    overloads = (Overload(o.parameters, dict.fromkeys(o.arities, V1_2)) for o in source.overloads)
    return replace(
        source,
        code=own_code(TfliteOperation[f"Q16_{source.name}"]),
        since=V1_2,
        overloads=tuple(overloads),
        variants=tuple(Variant({"T": Q16S, **others}, V1_2, plan) for others in types),
        shape=SHAPES_OF_ANY_RANK.get(source.name, source.shape),
        same_quantization=False,
        level=lambda inputs, output: V1_0,
    )


def multiply_wide(x: Ints, multiplier: Ints | int, shift: Ints | int) -> Ints:
    """Return x * multiplier / 2^31 * 2^shift, with 16 bits of the multiplier and one rounding; |x| is below 2^47."""
    total_shift = 15 - ints(shift)
    result: Ints = (x * reduced_multiplier(multiplier) + (np.int64(1) << (total_shift - 1))) >> total_shift
    return result


def reduced_multiplier(multiplier: Ints | int) -> Ints:
    """Return the upper 16 bits of multipliers, rounded and saturated."""
    reduced: Ints = np.minimum((ints(multiplier) + (1 << 15)) >> 16, INT16_MAX)
    return reduced


def rescaling(real: float) -> Callable[[Array], Ints]:
    """Return the function that multiplies by `real`, and rounds twice. Requires Q1 of `real`."""
    multiplier, shift = fixed_point.quantize_multiplier(real)
    return lambda x: fixed_point.multiply(ints(x), multiplier, shift)


def float_ratio(input: Tensor, output: Tensor) -> float:
    """Return the quotient of the scales, rounded to float32 as in most of TFLite's functions of one value."""
    return float(np.float32(input.scale) / np.float32(output.scale))


def saturated(x: Ints) -> Array:
    """Return x as int16, clamped to its range."""
    return np.clip(x, INT16_MIN, INT16_MAX).astype(np.int16)


def rounded(x: Array) -> Array:
    """Return floats rounded to integers, halves away from zero."""
    result: Array = np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)
    return result


class LookupTable(Struct, frozen=True):
    """A function of an int16 value as 513 int16 values, between which it is linear."""

    values: Ints

    @classmethod
    def of(cls, function: Callable[[Array], Array], input: Tensor, output: Tensor) -> LookupTable:
        """Tabulate a function of real numbers, in float32 as TFLite does."""
        return cls.sampled(function, input.scale, 0, output.scale, np.float32)

    @classmethod
    def sampled(
        cls, function: Callable[[Array], Array], scale: float, zero_point: int, output_scale: float, dtype: Any
    ) -> LookupTable:
        """Tabulate a function of real numbers with the input's scale and zero point, computed in `dtype`.

        The values are shifted by half of the error in the middle of each step.
        """
        low, high = (dtype(scale) * dtype(limit - zero_point) for limit in (INT16_MIN, INT16_MAX))
        factor = dtype(1 << 16) / (dtype(output_scale) * dtype(INT16_MAX) - dtype(output_scale) * dtype(INT16_MIN))
        step = (high - low) / dtype(_STEPS)
        starts = low + np.arange(_STEPS + 1).astype(dtype) * step
        with np.errstate(all="ignore"):
            exact = function(starts) * factor
            middles = rounded(function(starts[:-1] + step / dtype(2)) * factor)
            last = rounded(function(np.array([high], dtype)) * factor)
            samples = rounded(exact[:-1])
            interpolated = rounded((exact[1:] + samples) / dtype(2))
            corrected = samples - rounded((interpolated - middles) / dtype(2))
        entries = np.clip(np.concatenate([corrected, last]), INT16_MIN, INT16_MAX)
        return cls(ints(np.nan_to_num(entries, nan=0)))

    def __call__(self, x: Array) -> Ints:
        """Return the values for int16 values."""
        wide = ints(x)
        index = 256 + (wide >> 7)
        base = self.values[index]
        slope = ints((self.values[index + 1] - base).astype(np.int16))
        result: Ints = base + ((slope * (wide & 0x7F) + 64) >> 7)
        return result


# ----------------------------------------------------------------------------------------------------------------------
# Functions of one 16-bit value, SOFTMAX, and conversions of 16-bit tensors.
#
# LOGISTIC and TANH read the input in Q3.12 and interpolate a table of 1 / (1 + e^-x) in steps of 1/24, of 16 bits. The
# other functions are a LookupTable. SOFTMAX tabulates e^x from -10 to 0 and 1 / (1 + x) from 0 to 1; its results
# represent 0 to 1 as 0 to 32767.
#
#     C1 the functions of a LookupTable have a positive scale     Q1 range of the real multiplier of SOFTMAX


_STEPS_PER_UNIT = 24  # of the table of the logistic function
_INTEGER_BITS = 3
_LOWEST_EXPONENT = 10.0  # e^-10 counts as 0


@cache
def _logistic_table() -> Ints:
    """Return 1 / (1 + e^-x) for x = 0, 1/24, 2/24 ... as 16 bits after the binary point.

    The values are shifted by half of the error of linear interpolation in the middle of the next step; the last is 1.
    """
    now, middle, after = (65536 / (1 + np.exp(-(np.arange(256) + offset) / _STEPS_PER_UNIT)) for offset in (0, 0.5, 1))
    table = ints(np.rint(now - ((now + after) / 2 - middle) / 2))
    table[-1] = 65535
    return table


def _to_table_steps(scale: float) -> tuple[int, int]:
    """Return multiplier and right shift from quantized values to 1/512 of the table's steps."""
    exponent = math.log2(scale)
    left_shift = 15 - _INTEGER_BITS + round(exponent)
    if abs(exponent - round(exponent)) < 1e-3 and left_shift in (0, 1):
        return 3 << left_shift, 0
    multiplier, shift = scale * 4096 * 3, 0
    while multiplier <= 32767 / 2 and shift <= 30:
        shift, multiplier = shift + 1, multiplier * 2
    return int(multiplier), shift


def plan_logistic(input: Tensor, *, output: Tensor) -> Run:
    """Plan LOGISTIC; the result represents 0 to 1 as 0 to 32767."""
    multiplier, shift = _to_table_steps(input.scale)
    table = _logistic_table()

    def run(x: Array) -> Array:
        steps = _shifted(ints(x) * multiplier, shift)
        sums = _interpolated(table, np.abs(steps), 9, INT16_MAX << 10)
        mirrored = np.where(steps >= 0, sums + (1 << 9), (1 << 25) - sums + (1 << 9) - 1)
        return (mirrored >> 10).astype(np.int16)

    return run


def plan_tanh(input: Tensor, *, output: Tensor) -> Run:
    """Plan TANH; the result represents -1 to 1 as -32767 to 32767."""
    multiplier, shift = _to_table_steps(input.scale)
    table = _logistic_table()

    def run(x: Array) -> Array:
        steps = _shifted(ints(x) * multiplier, shift)
        sums = _interpolated(table, np.abs(steps), 8, 0xFFFF << 8)
        middle, half = 1 << 23, 1 << 7
        mirrored = np.where(steps >= 0, sums - middle + half, middle - sums + half - 1)
        return (mirrored >> 8).astype(np.int16)

    return run


def _shifted(x: Ints, shift: int) -> Ints:
    return (x + (1 << shift >> 1)) >> shift


def _interpolated(table: Ints, steps: Ints, bits: int, beyond: int) -> Ints:
    """Return 2^bits times the table at `steps` / 2^bits; `beyond` its end."""
    index = np.minimum(steps >> bits, 254)
    low, high = table[index], table[index + 1]
    return np.where(steps >> bits >= 255, beyond, (low << bits) + (steps & (1 << bits) - 1) * (high - low))


def plan_softmax(input: Tensor, *, output: Tensor, beta: float, axis: int = -1) -> Run:
    """Plan SOFTMAX along `axis`."""
    position = normalize_axis(axis, len(input.shape))
    step = _LOWEST_EXPONENT / 65535
    multiplier = fixed_point.quantize_multiplier(float(np.float32(input.scale) * np.float32(beta)) / step)
    powers, inverses = _softmax_tables()

    def run(x: Array) -> Array:
        rows = ints(np.moveaxis(x, position, -1))
        scaled = fixed_point.multiply(rows - rows.max(axis=-1, keepdims=True), *multiplier)
        exponentials = powers(saturated(scaled + INT16_MAX))
        sums = exponentials.sum(axis=-1, keepdims=True)
        bits = fixed_point.bit_length(sums)
        normalized = ((sums << (31 - bits)) + (1 << 13)) >> 14
        reciprocals = inverses(saturated(normalized - (1 << 15) - (1 << 16)))
        right_shift = bits - 1
        results = (exponentials * reciprocals + (np.int64(1) << (right_shift - 1))) >> right_shift
        return np.moveaxis(np.clip(results, 0, INT16_MAX).astype(np.int16), -1, position)

    return run


@cache
def _softmax_tables() -> tuple[LookupTable, LookupTable]:
    """Return e^x from -10 to 0 and 1 / (1 + x) from 0 to 1; the results represent 1 as 32768."""
    unit = 2 / 65535
    powers = LookupTable.sampled(np.exp, _LOWEST_EXPONENT / 65535, INT16_MAX, unit, np.float64)
    inverses = LookupTable.sampled(lambda x: 1 / (1 + x), 1 / 65535, INT16_MIN, unit, np.float64)
    return powers, inverses


def plan_softmax_of_8_bits(input: Tensor, *, output: Tensor, beta: float) -> Run:
    """Plan SOFTMAX along the last axis from 8 to 16 bits; 0 to 1 is represented as -32768 to 32767."""
    exponentials, summands = softmax.exponential_tables(input.scale, beta)

    def run(x: Array) -> Array:
        rows = ints(x)
        below = rows.max(axis=-1, keepdims=True) - rows
        scale, bits = softmax.reciprocal_of_sums(summands.take(below).sum(axis=-1, keepdims=True))
        shares = fixed_point.rounding_shift(fixed_point.high_mul(exponentials.take(below), scale), bits + 15)
        return saturated(shares + INT16_MIN)

    return run


def via_table(function: Callable[[Array], Array], extreme: int | None = None) -> Plan:
    """Return the plan of a function of reals as a LookupTable.

    `extreme` is the stored value for reals that are not positive, if the function is not defined for them.
    """

    def plan(input: Tensor, *, output: Tensor) -> Run:
        def total(x: Array) -> Array:
            if extreme is None:
                return function(x)
            limit = np.float32(extreme) * np.float32(output.scale)
            return np.where(x > 0, function(x), limit)

        table = LookupTable.of(total, input, output)
        return lambda x: table(x).astype(np.int16)

    return plan


def _exp(x: Array) -> Array:
    return _rounded_once(np.exp, x)


def _log(x: Array) -> Array:
    return _rounded_once(np.log, x)


def _rounded_once(function: Callable[[Array], Array], x: Array) -> Array:
    """Return a function in float64, rounded to float32: NumPy's own in float32 are less exact."""
    with np.errstate(all="ignore"):
        return function(x.astype(np.float64)).astype(np.float32)


def _rsqrt(x: Array) -> Array:
    result: Array = np.float32(1) / np.sqrt(x)
    return result


def plan_sqrt(input: Tensor, *, output: Tensor) -> Run:
    """Plan the square root, rounded toward zero as in TFLite; that of a negative value is 0."""

    def run(x: Array) -> Array:
        roots = np.sqrt(np.maximum(dequantize_array(x, input), np.float32(0)))
        return saturated(ints(roots / np.float32(output.scale)))

    return run


def plan_dequantize(input: Tensor, *, output: Tensor) -> Run:
    """Plan the real values."""
    return lambda x: dequantize_array(x, input).astype(output.dtype)


def plan_cast(input: Tensor, *, output: Tensor) -> Run:
    """Plan the stored values in another type: those of INT32 wrap around, those of floats saturate, and NaN is high."""

    def run(x: Array) -> Array:
        if x.dtype.kind == "f" and output.dtype.kind != "f":
            low, high = dtype_range(output)
            x = np.clip(np.where(np.isnan(x), np.float32(high), x), low, high)
        return x.astype(output.dtype)

    return run


def _function(operation: TfliteOperation, plan: Plan) -> Declaration:
    return function_of_one(operation, variants_of((Q16S,), plan))


def _conversion(operation: TfliteOperation, plan: Plan, *pairs: tuple[OperandType, OperandType]) -> Declaration:
    return function_of_one(operation, conversions(plan, pairs))


_SIXTEEN_BIT_FUNCTIONS_DECLARATIONS = (
    _function(TfliteOperation.Q16_LOGISTIC, plan_logistic),
    _function(TfliteOperation.Q16_TANH, plan_tanh),
    sixteen_bit(find(softmax.DECLARATIONS, Op.SOFTMAX), plan_softmax, ({"S": FLOAT32},)),
    Declaration(
        own_code(TfliteOperation.SOFTMAX_TO_Q16),
        since=V1_2,
        overloads=(overload(data("input"), attribute("beta", FLOAT32), level=V1_2),),
        variants=conversions(plan_softmax_of_8_bits, ((Q8S, Q16S), (Q8, Q16S))),
        shape=same_shape,
        outputs=("O",),
    ),
    _function(TfliteOperation.Q16_EXP, via_table(_exp)),
    _function(TfliteOperation.Q16_LOG, via_table(_log, INT16_MIN)),
    _function(TfliteOperation.Q16_RSQRT, via_table(_rsqrt, INT16_MAX)),
    _function(TfliteOperation.Q16_SQRT, plan_sqrt),
    _conversion(TfliteOperation.Q16_QUANTIZE, quantize_cast.plan_quantize, (F32, Q16S), (F16, Q16S)),
    _conversion(TfliteOperation.Q16_DEQUANTIZE, plan_dequantize, (Q16S, F32), (Q16S, F16)),
    _conversion(TfliteOperation.Q16_CAST, plan_cast, (Q16S, F32), (Q16S, F16), (Q16S, I32), (F32, Q16S), (I32, Q16S)),
)


# ----------------------------------------------------------------------------------------------------------------------
# Pools, RESIZE_BILINEAR and MEAN of 16-bit tensors.
#
# An average is rounded half away from zero. RESIZE_BILINEAR computes positions with 10 bits after the binary point.
# MEAN multiplies the sum by a multiplier that includes the division by the count.


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


_SIXTEEN_BIT_IMAGES_DECLARATIONS = (
    sixteen_bit(find(pooling.DECLARATIONS, Op.AVERAGE_POOL_2D), plan_average),
    sixteen_bit(find(pooling.DECLARATIONS, Op.MAX_POOL_2D), plan_quantized_max),
    sixteen_bit(find(resizing.DECLARATIONS, Op.RESIZE_BILINEAR), plan_bilinear, ({"S": INT32}, {"S": FLOAT32})),
    sixteen_bit(find(reduction.DECLARATIONS, Op.MEAN), plan_mean),
)


# ----------------------------------------------------------------------------------------------------------------------
# Operations that move or choose elements of 16-bit tensors. TFLite moves the stored values, whatever their scales.
#
# TOPK_V2 puts the first of equal values first.


def plan_topk(input: Tensor, *, output: tuple[Tensor, Tensor], k: int) -> Run:
    """Plan the `k` largest of each row and their indices."""

    def run(array: Array) -> tuple[Array, Array]:
        order = np.argsort(-array.astype(np.int32), axis=-1, kind="stable")[..., :k]
        return np.take_along_axis(array, order, axis=-1), order.astype(np.int32)

    return run


_SOURCES = (
    (reshape_concat, Op.RESHAPE, Op.SQUEEZE, Op.EXPAND_DIMS, Op.CONCATENATION, Op.PACK),
    (slicing, Op.SLICE, Op.STRIDED_SLICE, Op.SPLIT),
    (permute, Op.TRANSPOSE, Op.REVERSE, Op.TILE),
    (padding, Op.PAD, Op.MIRROR_PAD),
    (space_depth_batch, Op.SPACE_TO_BATCH_ND, Op.BATCH_TO_SPACE_ND),
    (gather, Op.GATHER, Op.EMBEDDING_LOOKUP),
    (min_max_select, Op.MAXIMUM, Op.MINIMUM, Op.SELECT),
    (reduction, Op.REDUCE_MAX, Op.REDUCE_MIN),
)

_SIXTEEN_BIT_MOVEMENT_DECLARATIONS = (
    *(sixteen_bit(find(module.DECLARATIONS, code)) for module, *codes in _SOURCES for code in codes),
    sixteen_bit(find(padding.DECLARATIONS, Op.PAD_V2), types=({"V": INT32},)),
    sixteen_bit(find(resizing.DECLARATIONS, Op.RESIZE_NEAREST_NEIGHBOR), types=({"S": INT32}, {"S": FLOAT32})),
    sixteen_bit(find(gather.DECLARATIONS, Op.TOPK_V2), plan_topk),
)


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions and matrix products of 16-bit tensors with 8-bit weights, and BATCH_MATMUL of 16-bit tensors.
#
# Sums of products are exact in float64. With a bias of INT32 they wrap at 32 bits and are requantized as those of 8-bit
# tensors; else they are requantized from 64 bits, by 16 bits of the multiplier. As in TFLite, the scales are multiplied
# in float64; FULLY_CONNECTED multiplies the sums by them in float64, and rounds once.
#
#     C1 to C6 are those of the HAL's operations     C7 weights and bias: the zero point is 0


_EXACT_SUM = 1 << 37  # times a reduced multiplier, and half of the divisor added, it is exact in float64
_LARGEST = 1 << 15  # magnitude of an input


def plan_convolution(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: int
) -> Run:
    """Plan CONV_2D."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = _packed(input, filter, bias, output, activation, columns.count)
    return convolve(matmul, input, rows, columns, filter.shape[0], 0)


def plan_grouped(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, groups: int, activation: int, **conv_params: int
) -> Run:
    """Plan a convolution in groups."""
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    matmul = _packed(input, filter, bias, output, activation, columns.count)
    return convolve_groups(matmul, groups, output, rows, columns, 0)


def _packed(input: Tensor, filter: Tensor, bias: Tensor, output: Tensor, activation: int, row: int) -> PackedMatmul:
    require_channel_dim(filter, 0)
    matrix = filter.array.reshape(filter.shape[0], -1).T.astype(np.float64)
    epilogue = _epilogue(matrix, input, filter, bias, output, activation, row)
    return PackedMatmul(np.ascontiguousarray(matrix), epilogue, output.dtype, row)


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
    """Plan DEPTHWISE_CONV_2D."""
    require_channel_dim(filter, 3)
    rows, columns = windows(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = filter.array[0].astype(np.float64)
    matrix = taps.reshape(-1, filter.shape[3])
    epilogue = _epilogue(matrix, input, filter, bias, output, activation, columns.count)
    return accumulate_taps(taps, epilogue, output, input, rows, columns, depth_multiplier, 0)


def plan_transposed(
    input: Tensor, filter: Tensor, bias: Tensor, *, output: Tensor, activation: int, **conv_params: Any
) -> Run:
    """Plan TRANSPOSE_CONV_2D."""
    require_channel_dim(filter, 0)
    rows, columns = transposed_conv_dimensions(input.shape[1:3], filter.shape[1:3], **conv_params)
    taps = filter.array.astype(np.float64).transpose(1, 2, 3, 0)
    epilogue = _epilogue(taps.reshape(-1, taps.shape[3]), input, filter, bias, output, activation, 1)
    return scatter_taps(np.ascontiguousarray(taps), epilogue, output, rows, columns, 0)


def plan_fully_connected(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan FULLY_CONNECTED, with one scale or one for each unit."""
    require_channel_dim(weights, 0)
    require(weights.zero_point == 0, "C7", f"the weights have the zero point {weights.zero_point}")
    matrix, addend = weights.array.T.astype(np.float64), bias.array.astype(np.float64)
    factors = np.array(real_scales(input, weights, output))
    low, high = quantized_activation_range(activation, output)

    def run(array: Array) -> Array:
        sums = np.matmul(array.reshape(-1, weights.shape[1]).astype(np.float64), matrix) + addend
        return np.clip(rounded(sums * factors), low, high).astype(np.int16)

    return run


def plan_matmul(left: Tensor, right: Tensor, *, output: Tensor, adjoint_left: bool, adjoint_right: bool) -> Run:
    """Plan BATCH_MATMUL."""
    real = float(np.float32(left.scale) * np.float32(right.scale) / np.float32(output.scale))
    multiplier = fixed_point.quantize_multiplier(real)

    def run(a: Array, b: Array) -> Array:
        rows, columns = a.astype(np.float64), b.astype(np.float64)
        rows = np.swapaxes(rows, -1, -2) if adjoint_left else rows
        columns = np.swapaxes(columns, -1, -2) if adjoint_right else columns
        return saturated(multiply_wide(ints(np.matmul(rows, columns)), *multiplier))

    return run


def _epilogue(
    matrix: Array, input: Tensor, weights: Tensor, bias: Tensor, output: Tensor, activation: int, row: int
) -> Epilogue:
    """Return an epilogue that adds the bias to sums of products with `matrix` (K, channels) and requantizes them."""
    require(weights.zero_point == bias.zero_point == 0, "C7", f"weights have the zero point {weights.zero_point}")
    multipliers = OutputMultipliers.of(real_scales(input, weights, output)).rows(row)
    low, high = quantized_activation_range(activation, output)
    addend = np.tile(ints(bias.array), row)
    if bias.dtype == np.int32:
        return _narrow_epilogue(multipliers, addend, low, high)
    largest = int(np.abs(matrix).sum(axis=0).max(initial=0)) * _LARGEST + int(np.abs(addend).max(initial=0))
    if largest < _EXACT_SUM:
        return _affine_epilogue(multipliers, addend, low, high)
    return _wide_epilogue(multipliers, addend, low, high)


def _narrow_epilogue(multipliers: OutputMultipliers, bias: Ints, low: int, high: int) -> Epilogue:
    def epilogue(sums: Array, out: Array) -> None:
        wrapped = ints((ints(sums) + bias).astype(np.int32))
        scaled = fixed_point.multiply(wrapped, multipliers.multipliers, multipliers.shifts)
        np.copyto(out, np.clip(scaled, low, high), casting="unsafe")

    return epilogue


def _wide_epilogue(multipliers: OutputMultipliers, bias: Ints, low: int, high: int) -> Epilogue:
    def epilogue(sums: Array, out: Array) -> None:
        scaled = multiply_wide(ints(sums) + bias, multipliers.multipliers, multipliers.shifts)
        np.copyto(out, np.clip(scaled, low, high), casting="unsafe")

    return epilogue


def _affine_epilogue(multipliers: OutputMultipliers, bias: Ints, low: int, high: int) -> Epilogue:
    """Return the same in float64, which is exact: a sum times a reduced multiplier has at most 52 bits."""
    reduced, shift = reduced_multiplier(multipliers.multipliers), (15 - multipliers.shifts).astype(np.int32)
    factors = np.ldexp(reduced.astype(np.float64), -shift)
    offsets = np.ldexp((bias * reduced).astype(np.float64), -shift) + 0.5

    def epilogue(sums: Array, out: Array) -> None:
        scaled = np.multiply(sums, factors)
        np.add(scaled, offsets, out=scaled)
        np.clip(np.floor(scaled, out=scaled), low, high, out=scaled)
        np.copyto(out, scaled, casting="unsafe")

    return epilogue


_WEIGHTS = tuple({"F": weights, "B": bias} for weights in (Q8S, PC) for bias in (I32, TENSOR_INT64))

_SIXTEEN_BIT_PRODUCTS_DECLARATIONS = (
    sixteen_bit(find(convolution.DECLARATIONS, Op.CONV_2D), plan_convolution, _WEIGHTS),
    sixteen_bit(find(convolution.DECLARATIONS, Op.DEPTHWISE_CONV_2D), plan_depthwise, _WEIGHTS),
    sixteen_bit(find(grouped_conv.DECLARATIONS, Op.GROUPED_CONV_2D), plan_grouped, _WEIGHTS),
    sixteen_bit(find(transpose_conv.DECLARATIONS, Op.TRANSPOSE_CONV_2D), plan_transposed, _WEIGHTS),
    replace(
        sixteen_bit(find(fully_connected.DECLARATIONS, Op.FULLY_CONNECTED), plan_fully_connected, _WEIGHTS),
        overloads=(
            overload(data("input"), weight("weights", "F"), weight("bias", "B"), attribute("activation"), level=V1_2),
        ),
    ),
    sixteen_bit(find(batch_matmul.DECLARATIONS, Op.BATCH_MATMUL), plan_matmul),
)

DECLARATIONS = (
    *_SIXTEEN_BIT_FUNCTIONS_DECLARATIONS,
    *_SIXTEEN_BIT_IMAGES_DECLARATIONS,
    *_SIXTEEN_BIT_MOVEMENT_DECLARATIONS,
    *_SIXTEEN_BIT_PRODUCTS_DECLARATIONS,
)
