"""Operations on 8-bit tensors as TFLite defines them: arithmetic, functions, choices, images, products.

DIV and REDUCE_PROD of 16-bit tensors are the same, with zero points of 0.

TFLite's DIV shifts by more bits than an int32 has if a quotient is very small, and its sums, products and quotients
wrap around if they are very large. Here, the former are 0 and the latter saturate.

    B1 dimensions are equal or 1     C1 axes are a vector     C2 no divisor is 0
    C3 the multiplier of each factor of a product is below 2^8     Q5 activation code 0 to 3
    Q1, Q2 ranges of real multipliers
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.extensions import WIDE_TYPES, TfliteOperation
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import (
    comparison,
    fixed_point,
    fully_connected,
    gather,
    min_max_select,
    normalization,
    pooling,
    resizing,
)
from nnfmq.operations.convolution import require_channel_dim
from nnfmq.operations.declaration import (
    BOOL,
    F16,
    F32,
    FLOAT32,
    I32,
    PC,
    Q8,
    Q8S,
    V1_2,
    Array,
    Declaration,
    Parameter,
    Plan,
    Run,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
    weight,
)
from nnfmq.operations.fixed_point import (
    INT32_MAX,
    INT32_MIN,
    Ints,
    bit_length,
    exp_on_negative_values,
    high_mul,
    input_radius,
    ints,
    multiply,
    quantize_multiplier_above_one,
    quantize_multiplier_below_one,
    reciprocal_of_one_plus,
    rounding_shift,
    saturating_shift_left,
)
from nnfmq.operations.fully_connected import product_of_rows
from nnfmq.operations.kernel_adapters import lut8, stateless, via_lut8
from nnfmq.operations.normalization import inverse_square_root
from nnfmq.operations.packed_matmul import PackedMatmul, pack_exact_matrix
from nnfmq.operations.quantization import (
    Epilogue,
    all_quantized_values,
    dequantized_values,
    dtype_range,
    quantized_activation_range,
    quantized_range,
    real_scales,
    require_quantization,
)
from nnfmq.operations.reduction import reduced, reduced_axes
from nnfmq.operations.shapes import broadcast_shapes, require, same_shape
from nnfmq.operations.tflite_extension.declaration import as_tflite, function_of_one, own_code, variants_of
from nnfmq.operations.tflite_extension.sixteen_bits import (
    find,
    float_ratio,
    multiply_wide,
    plan_average,
    plan_bilinear,
    rounded,
)

__all__ = [
    "DECLARATIONS",
    "abs_entries",
    "clamp_entries",
    "clamped",
    "leaky_relu_entries",
    "logarithm",
    "multiplied",
    "plan_comparison",
    "plan_div",
    "plan_fully_connected",
    "plan_l2_normalization",
    "plan_log_softmax",
    "plan_mean_or_sum",
    "plan_prod",
    "plan_squared_difference",
    "real_entries",
    "rsqrt_entries",
    "scaled",
    "sqrt_entries",
    "topk",
]


# ----------------------------------------------------------------------------------------------------------------------
# Functions of one 8-bit value as TFLite defines them, each a table of 256 entries.
#
# CLAMP, ABS, LEAKY_RELU and RSQRT are computed in fixed point. LOG, EXP and ELU are computed in float32 and multiplied
# by the reciprocal of the output's scale, SQRT is divided by that scale and rounded toward zero. Where a function is
# not defined, LOG gives the lowest value, SQRT the zero point and RSQRT the highest value.
#
#     Q1 range of the real multiplier of CLAMP, ABS, LEAKY_RELU and RSQRT


_FUNCTION_FRACTION_BITS = 20  # of an inverse square root


def clamped(values: Ints, output: Tensor) -> Array:
    """Return values without a zero point in the output's type, limited to its range."""
    return np.clip(values + output.zero_point, *dtype_range(output)).astype(output.dtype)


def scaled(values: Ints, real: float) -> Ints:
    """Return `real` times values, rounded twice; where TFLite's 32 bits would wrap around, what clamps to 8 bits."""
    return multiplied(values, *fixed_point.quantize_multiplier(real))


def multiplied(values: Ints, multiplier: int, exponent: int) -> Ints:
    """Return the same for a fixed-point number."""
    limit = fixed_point.INT32_MAX >> max(exponent, 0)
    return fixed_point.multiply(np.clip(values, -limit, limit), multiplier, exponent)


def clamp_entries(quantized: Array, input: Tensor, output: Tensor, *, low: float, high: float) -> Array:
    """Return the table of the real values limited to `low` and `high`, which may be infinite."""
    values = scaled(ints(quantized) - input.zero_point, float_ratio(input, output))
    return np.clip(values + output.zero_point, *quantized_range(low, high, output)).astype(output.dtype)


def leaky_relu_entries(quantized: Array, input: Tensor, output: Tensor, *, alpha: float) -> Array:
    """Return the table of x if it is not negative, else alpha · x; the slope is rounded to float32."""
    values, slope = ints(quantized) - input.zero_point, np.float32(input.scale) * np.float32(alpha)
    below = scaled(values, abs(float(slope / np.float32(output.scale)))) * (-1 if alpha < 0 else 1)
    return clamped(np.where(values >= 0, scaled(values, float_ratio(input, output)), below), output)


def abs_entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """Return the table of absolute values."""
    return clamped(scaled(np.abs(ints(quantized) - input.zero_point), float_ratio(input, output)), output)


def rsqrt_entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """Return the table of 1 / √x."""
    values = ints(quantized) - input.zero_point
    factor = float(np.sqrt(np.float32(input.scale)) * np.float32(output.scale))
    multiplier, shift = fixed_point.quantize_multiplier(1 / factor)
    inverses, right = inverse_square_root(values)
    fractions = fixed_point.multiply(np.ones_like(values), inverses, _FUNCTION_FRACTION_BITS - right)
    roots = fixed_point.multiply(fractions, multiplier, shift - _FUNCTION_FRACTION_BITS)
    return np.where(values > 0, clamped(roots, output), dtype_range(output)[1]).astype(output.dtype)


def sqrt_entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
    """Return the table of square roots, rounded toward zero."""
    roots = np.sqrt(np.maximum(dequantized_values(input), np.float32(0)))
    return clamped(ints(roots / np.float32(output.scale)), output)


def real_entries(function: Callable[[Array], Array]) -> Callable[[Array, Tensor, Tensor], Array]:
    """Return what makes the table of a function of reals, which is computed in float64 and rounded to float32."""

    def entries(quantized: Array, input: Tensor, output: Tensor) -> Array:
        with np.errstate(all="ignore"):
            reals = function(dequantized_values(input).astype(np.float64)).astype(np.float32)
            steps = (reals * (np.float32(1) / np.float32(output.scale))).astype(np.float64)
        rounded = np.copysign(np.floor(np.abs(steps) + 0.5), steps)
        return clamped(ints(np.clip(rounded, -512, 512)), output)

    return entries


def _log(x: Array) -> Array:
    return np.where(x > 0, np.log(x), -np.inf)


def _elu(x: Array) -> Array:
    return np.where(x < 0, np.expm1(x), x)


def _function(operation: TfliteOperation, plan: Plan, *attributes: Parameter) -> Declaration:
    return function_of_one(operation, variants_of((Q8, Q8S), plan), *attributes)


_EIGHT_BIT_FUNCTIONS_DECLARATIONS = (
    _function(TfliteOperation.Q8_CLAMP, via_lut8(clamp_entries), attribute("low", FLOAT32), attribute("high", FLOAT32)),
    _function(TfliteOperation.Q8_ABS, via_lut8(abs_entries)),
    _function(TfliteOperation.Q8_NEG, stateless(np.negative)),
    _function(TfliteOperation.Q8_SQRT, via_lut8(sqrt_entries)),
    _function(TfliteOperation.Q8_RSQRT, via_lut8(rsqrt_entries)),
    _function(TfliteOperation.Q8_LOG, via_lut8(real_entries(_log))),
    _function(TfliteOperation.Q8_EXP, via_lut8(real_entries(np.exp))),
    _function(TfliteOperation.Q8_ELU, via_lut8(real_entries(_elu))),
    _function(TfliteOperation.Q8_LEAKY_RELU, via_lut8(leaky_relu_entries), attribute("alpha", FLOAT32)),
)


# ----------------------------------------------------------------------------------------------------------------------
# SQUARED_DIFFERENCE, DIV, MEAN, REDUCE_SUM and REDUCE_PROD of 8-bit tensors, in fixed point as TFLite defines them.


_EXTRA_BITS = 7  # of the common scale of a difference
_WIDEST_SHIFT = 62
_MAX_FACTOR = 1 << 8
_PAIRS = 1 << 16


def plan_squared_difference(first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan (first - second)²; TFLite multiplies the common scale by itself in float64."""
    common = 2.0 * max(first.scale, second.scale)
    one, other = (fixed_point.quantize_multiplier_below_one(tensor.scale / common) for tensor in (first, second))
    real = common * common / float(np.float32(1 << 2 * _EXTRA_BITS) * np.float32(output.scale))
    total = fixed_point.quantize_multiplier_below_one(real)

    def run(a: Array, b: Array) -> Array:
        minuend = fixed_point.multiply((ints(a) - first.zero_point) << _EXTRA_BITS, *one)
        subtrahend = fixed_point.multiply((ints(b) - second.zero_point) << _EXTRA_BITS, *other)
        return clamped(fixed_point.multiply(np.square(minuend - subtrahend), *total), output)

    return _by_pairs(run, first, second, output)


def plan_div(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan first / second, as a product with the reciprocal of the divisor."""
    real = np.float32(first.scale) / (np.float32(second.scale) * np.float32(output.scale))
    multiplier, shift = fixed_point.quantize_multiplier(float(real))
    low, high = quantized_activation_range(activation, output)

    def divide(a: Array, b: Array) -> Array:
        divisors = ints(b) - second.zero_point
        divisors = np.where(divisors == 0, 1, divisors)  # of a table; no other reaches this
        dividends = (ints(a) - first.zero_point) * np.sign(divisors)
        quotients = _scaled_quotients(dividends, np.abs(divisors), multiplier, shift)
        return np.clip(quotients + output.zero_point, low, high).astype(output.dtype)

    inner = _by_pairs(divide, first, second, output)

    def run(a: Array, b: Array) -> Array:
        require(not (b == second.zero_point).any(), "C2", "a divisor is 0")
        return cast(Array, inner(a, b))

    return run


def _by_pairs(function: Run, first: Tensor, second: Tensor, output: Tensor) -> Run:
    """Return a function of two 8-bit values as a table of all pairs, if there are more elements than pairs."""
    if math.prod(output.shape) <= _PAIRS or first.dtype.itemsize > 1:
        return function
    values, others = (all_quantized_values(tensor) for tensor in (first, second))
    table = function(values[:, np.newaxis], others).ravel()
    return lambda a, b: table.take(a.view(np.uint8).astype(np.uint16) << 8 | b.view(np.uint8))


def _scaled_quotients(dividends: Ints, divisors: Ints, multiplier: int, shift: int) -> Ints:
    """Return dividends / divisors · multiplier / 2^31 · 2^shift, limited to 32 bits; the divisors are positive."""
    bits = fixed_point.bit_length(divisors)
    inverses = fixed_point.reciprocal_of_one_plus((divisors << (32 - bits)) - (1 << 31))
    free = 31 - fixed_point.bit_length(np.where(dividends < 0, ~dividends, dividends))
    quotients = fixed_point.high_mul(dividends << free, inverses)
    right = bits - 1 + free - shift
    scaled = fixed_point.high_mul(quotients, multiplier)
    shifted = fixed_point.rounding_shift(scaled, np.clip(right, 0, _WIDEST_SHIFT))
    return _limited(shifted << np.clip(-right, 0, 31))


def plan_mean_or_sum(is_mean: bool, input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
    """Plan the mean or sum."""
    gone, shape = reduced_axes(axes, len(input.shape)), output.shape
    count = math.prod(input.shape[axis] for axis in gone)
    divisor = max(count, 1) if is_mean else 1
    multiplier, exponent = fixed_point.quantize_multiplier_of_mean(input.scale / output.scale, divisor)

    def run(array: Array) -> Array:
        sums = array.sum(axis=gone, dtype=np.int64) - input.zero_point * count
        return clamped(multiplied(sums, multiplier, exponent), output).reshape(shape)

    return run


def plan_prod(input: Tensor, *, output: Tensor, axes: Array, keep_dimensions: int) -> Run:
    """Plan the product, of which each factor is multiplied by the root of the whole scale."""
    gone, shape = reduced_axes(axes, len(input.shape)), output.shape
    count = math.prod(input.shape[axis] for axis in gone)
    real = input.scale / output.scale ** (1 / max(count, 1))
    require(real < _MAX_FACTOR, "C3", f"the multiplier is {real}, it must be below {_MAX_FACTOR}")
    scaling = fixed_point.quantize_multiplier(real)

    def run(array: Array) -> Array:
        kept = [axis for axis in range(array.ndim) if axis not in gone]
        factors = ints(array.transpose(*gone, *kept).reshape(count, -1)) - input.zero_point
        product = factors[0]
        for factor in factors[1:]:
            product = _limited(multiply_wide(product * factor, *scaling))
        return clamped(_limited(multiply_wide(product, *scaling)), output).reshape(shape)

    return run


def _limited(values: Ints) -> Ints:
    result: Ints = np.clip(values, INT32_MIN, INT32_MAX)
    return result


def _binary(operation: TfliteOperation, plan: Plan, *attributes: Parameter) -> Declaration:
    return Declaration(
        own_code(operation),
        since=V1_2,
        overloads=(overload(data("first"), data("second"), *attributes, level=V1_2),),
        variants=variants_of((Q8, Q8S), plan),
        shape=broadcast_shapes,
        zero_sized=True,
    )


def _reduction(operation: TfliteOperation, plan: Plan) -> Declaration:
    return Declaration(
        own_code(operation),
        since=V1_2,
        overloads=(overload(data("input"), attribute("axes", I32), attribute("keep_dimensions", BOOL), level=V1_2),),
        variants=variants_of((Q8, Q8S), plan),
        shape=reduced,
    )


_EIGHT_BIT_ARITHMETIC_DECLARATIONS = (
    _binary(TfliteOperation.Q8_SQUARED_DIFFERENCE, plan_squared_difference),
    _binary(TfliteOperation.Q8_DIV, plan_div, attribute("activation")),
    _reduction(TfliteOperation.Q8_MEAN, partial(plan_mean_or_sum, True)),
    _reduction(TfliteOperation.Q8_REDUCE_SUM, partial(plan_mean_or_sum, False)),
    _reduction(TfliteOperation.Q8_REDUCE_PROD, plan_prod),
)


# ----------------------------------------------------------------------------------------------------------------------
# MAXIMUM, MINIMUM, SELECT, TOPK_V2 and comparisons of 8-bit tensors as TFLite defines them.
#
# MAXIMUM, MINIMUM and SELECT take stored values, whatever their scales. TOPK_V2, of all types, puts the first of equal
# values first. Comparisons are between real values with 8 bits after the binary point, so that unequal ones may be
# equal.
#
#     B1 dimensions are equal or 1     C1 the operands of SELECT have one shape     C4 k is in [1, last dimension]
#     Q2 the scales of comparisons are below 1


_FRACTION_BITS = 8  # of compared values


def plan_comparison(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan the comparison of real values in fixed point, with a table for each operand."""
    values, others = _fixed_point_values(first), _fixed_point_values(second)
    return lambda a, b: comparison.compare(ufunc, lut8(values, a), lut8(others, b))


def _fixed_point_values(tensor: Tensor) -> Ints:
    """Return the real value of each stored one, indexed by its bits."""
    centered = ints(all_quantized_values(tensor)) - tensor.zero_point
    return fixed_point.multiply(centered << _FRACTION_BITS, *fixed_point.quantize_multiplier_below_one(tensor.scale))


def topk(array: Array, *, k: int) -> tuple[Array, Array]:
    """Return the `k` largest values of each row, descending, and their indices. Of equal values, the first is first."""
    values, from_end = gather.topk(array[..., ::-1], k)
    return values, (array.shape[-1] - 1 - from_end).astype(np.int32)


_BYTES = (Q8, Q8S)
_CHOICES = {
    Op.MAXIMUM: stateless(np.maximum),
    Op.MINIMUM: stateless(np.minimum),
    Op.SELECT: stateless(min_max_select.select),
}

_EIGHT_BIT_CHOICES_DECLARATIONS = (
    *(
        as_tflite(TfliteOperation[f"Q8_{code.name}"], find(min_max_select.DECLARATIONS, code), plan, _BYTES)
        for code, plan in _CHOICES.items()
    ),
    as_tflite(
        TfliteOperation.TOPK_V2,
        find(gather.DECLARATIONS, Op.TOPK_V2),
        stateless(topk),
        (F32, F16, I32, *_BYTES, *WIDE_TYPES),
    ),
    *(
        as_tflite(
            TfliteOperation[f"Q8_{code.name}"],
            find(comparison.DECLARATIONS, code),
            partial(plan_comparison, ufunc),
            _BYTES,
        )
        for code, ufunc in comparison.COMPARISONS.items()
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# AVERAGE_POOL_2D, RESIZE_BILINEAR and L2_NORMALIZATION of INT8 as TFLite defines them. For UINT8 the HAL does so.
#
# The first two are computed as those of 16 bits. L2_NORMALIZATION multiplies by the inverse norm with 7 more bits.


def plan_l2_normalization(input: Tensor, *, output: Tensor, axis: int = -1) -> Run:
    """Plan the normalization."""
    require_quantization(output, 1 / 128, 0)

    def run(stored: Array) -> Array:
        centered = ints(stored) - input.zero_point
        multiplier, right = inverse_square_root(np.sum(np.square(centered), axis=axis, keepdims=True))
        return clamped(fixed_point.multiply(centered, multiplier, _EXTRA_BITS - right), output)

    return run


_EIGHT_BIT_IMAGES_DECLARATIONS = (
    as_tflite(
        TfliteOperation.Q8_L2_NORMALIZATION,
        find(normalization.DECLARATIONS, Op.L2_NORMALIZATION),
        plan_l2_normalization,
        (Q8S,),
    ),
    as_tflite(TfliteOperation.Q8_AVERAGE_POOL_2D, find(pooling.DECLARATIONS, Op.AVERAGE_POOL_2D), plan_average, (Q8S,)),
    as_tflite(
        TfliteOperation.Q8_RESIZE_BILINEAR, find(resizing.DECLARATIONS, Op.RESIZE_BILINEAR), plan_bilinear, (Q8S,)
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# LOG_SOFTMAX of 8-bit tensors along the last axis, in fixed point as TFLite defines it.
#
# The output's scale is 1/16 and its zero point the highest value: it represents -255/16 to 0. Differences from a row's
# maximum have 5 integer bits, sums of their exponentials 12. The logarithm of such a sum is k ln 2 + ln r, with r near
# 2^-1/4, for which it is a rational function.
#
#     Q3 range of the real multiplier     Q6 the output's scale and zero point


_DIFFERENCE_BITS, _SUM_BITS, _RESULT_BITS = 5, 12, 4  # integer bits
_LOGARITHM_BITS = _DIFFERENCE_BITS + 1
_LN_2, _ROOT_OF_HALF, _FOURTH_ROOT_OF_HALF = 1488522236, 1518500250, 1805811301  # without integer bits, as all below
_NUMERATOR = 117049297  # 11/240 · 2^1/4
_DENOMINATOR = (1057819769, 638450708, 127690142)  # 2^3/4 - 2^1/4, 2^1/4 / 4, 2^1/4 / 20
_QUARTER = 1 << (29 - _LOGARITHM_BITS)


def logarithm(sums: Ints) -> Ints:
    """Return ln x with 5 integer bits, for x of at least 1 with 12 integer bits."""
    zeros = 32 - bit_length(sums)
    halved = saturating_shift_left(high_mul(sums << (zeros - 1), _ROOT_OF_HALF), 1)
    zeros_of_half = 31 - bit_length(high_mul(sums, _ROOT_OF_HALF))
    whole = np.minimum(sums << zeros_of_half, INT32_MAX)
    position = 31 - _LOGARITHM_BITS
    exponents = np.maximum(
        ((_SUM_BITS - zeros) << position) + _QUARTER, ((_SUM_BITS - zeros_of_half) << position) - _QUARTER
    )
    fraction = _near_fourth_root(np.minimum(halved, whole))
    return saturating_shift_left(high_mul(exponents, _LN_2) + fraction, 1)


def _near_fourth_root(r: Ints) -> Ints:
    """Return ln r + (ln 2) / 4 with 6 integer bits, as a quotient of polynomials."""
    middle, twice = (r + _FOURTH_ROOT_OF_HALF + 1) >> 1, (r - _FOURTH_ROOT_OF_HALF) * 2
    square = high_mul(twice, twice)
    numerator = high_mul(twice, r) + high_mul(high_mul(twice, square), _NUMERATOR)
    constant, linear, quadratic = _DENOMINATOR
    inner = constant + twice + high_mul(ints(quadratic), square)
    denominator = high_mul(middle, inner) + high_mul(ints(linear), twice)
    return high_mul(rounding_shift(numerator, _LOGARITHM_BITS), reciprocal_of_one_plus(denominator))


def plan_log_softmax(input: Tensor, *, output: Tensor) -> Run:
    """Plan the logarithm of the softmax of each row."""
    lowest, highest = dtype_range(output)
    require_quantization(output, 1 / 16, highest)
    real = min(input.scale * (1 << (31 - _DIFFERENCE_BITS)), INT32_MAX)
    multiplier, shift = quantize_multiplier_above_one(real)
    reverse = quantize_multiplier_below_one((1 << (31 - shift)) / multiplier)
    least = -input_radius(_DIFFERENCE_BITS, shift)
    result_shift = 31 - _DIFFERENCE_BITS - _RESULT_BITS

    def run(x: Array) -> Array:
        differences = ints(x) - x.max(axis=-1, keepdims=True).astype(np.int64)
        reals = multiply(np.maximum(differences, least), multiplier, shift)
        powers = rounding_shift(exp_on_negative_values(reals, _DIFFERENCE_BITS), _SUM_BITS)
        sums = np.where(differences >= least, powers, 0).sum(axis=-1, keepdims=True)
        logarithms = logarithm(np.minimum(sums, INT32_MAX))
        bound = np.maximum(least - 1, multiply(logarithms + INT32_MIN, *reverse))
        codes = np.clip(rounding_shift(reals - logarithms, result_shift) + highest, lowest, highest)
        return np.where(differences > bound, codes, lowest).astype(output.dtype)

    return run


_EIGHT_BIT_LOG_SOFTMAX_DECLARATIONS = (
    Declaration(
        own_code(TfliteOperation.Q8_LOG_SOFTMAX),
        since=V1_2,
        overloads=(overload(data("input"), level=V1_2),),
        variants=variants_of((Q8, Q8S), plan_log_softmax),
        shape=same_shape,
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# FULLY_CONNECTED of 8-bit tensors as TFLite defines it: sums times a float64 number, rounded once.
#
# The number is input scale x weights' scale / output scale; halves are rounded away from zero.
#
#     C1 to C3 are those of the HAL's operation


def plan_fully_connected(input: Tensor, weights: Tensor, bias: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan the exact integer product and its scaling, by one number or one for each unit."""
    require_channel_dim(weights, 0)
    matrix, sums, _ = pack_exact_matrix(weights.array.T, weights.zero_point, input)
    addend = (ints(bias.array) - input.zero_point * sums).astype(np.float64)
    epilogue = _epilogue(addend, np.array(real_scales(input, weights, output)), output, activation)
    return product_of_rows(PackedMatmul(matrix, epilogue, output.dtype, 1), weights.shape[1])


def _epilogue(addend: Array, factors: Array, output: Tensor, activation: int) -> Epilogue:
    low, high = quantized_activation_range(activation, output)

    def epilogue(sums: Array, out: Array) -> None:
        scaled = np.add(sums, addend, dtype=np.float64)
        np.multiply(scaled, factors, out=scaled)
        np.copyto(out, np.clip(rounded(scaled) + output.zero_point, low, high), casting="unsafe")

    return epilogue


_SOURCE = find(fully_connected.DECLARATIONS, Op.FULLY_CONNECTED)

_EIGHT_BIT_PRODUCTS_DECLARATIONS = (
    replace(
        as_tflite(TfliteOperation.Q8_FULLY_CONNECTED, _SOURCE, plan_fully_connected, ()),
        overloads=(
            overload(data("input"), weight("weights", "F"), weight("bias", "B"), attribute("activation"), level=V1_2),
        ),
        variants=tuple(
            Variant({"T": kind, "F": weights, "B": I32}, V1_2, plan_fully_connected)
            for kind, weights in ((Q8, Q8), (Q8S, Q8S), (Q8S, PC))
        ),
    ),
)

DECLARATIONS = (
    *_EIGHT_BIT_ARITHMETIC_DECLARATIONS,
    *_EIGHT_BIT_CHOICES_DECLARATIONS,
    *_EIGHT_BIT_FUNCTIONS_DECLARATIONS,
    *_EIGHT_BIT_IMAGES_DECLARATIONS,
    *_EIGHT_BIT_LOG_SOFTMAX_DECLARATIONS,
    *_EIGHT_BIT_PRODUCTS_DECLARATIONS,
)
