"""ADD, SUB, MUL, DIV and POW: broadcast arithmetic, except POW with a fused activation.

Quantized ADD and SUB rescale both inputs to a common scale with 20 extra bits (a 256-entry table each), add, and
requantize the sum; SUB negates the second multiplier. MUL requantizes the product of the inputs minus zero point. INT32
wraps around and has no activation; its DIV rounds down, and division by 0 gives 0. There is no quantized DIV.

    C1 INT32 has activation NONE
"""

from __future__ import annotations

import math
from functools import partial
from typing import TypeAlias, cast

import numpy as np

from nnfmq.hal.types import OperandType, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Tensor
from nnfmq.operations.fixed_point import Ints, ints, saturated, to_int16
from nnfmq.operations.kernel_adapters import by_pairs, float_variants, stateless
from nnfmq.operations.quantization import (
    OutputMultipliers,
    all_quantized_values,
    float_activation_range,
    quantized_activation_range,
    requantizer,
)
from nnfmq.operations.shapes import broadcast_shapes, broadcast_shapes_up_to_rank_4, require

Multiplier: TypeAlias = tuple[int, int]  # output multiplier and shift


def plan_float(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan a float ufunc and its activation."""
    low, high = float_activation_range(activation)

    def run(a: Array, b: Array) -> Array:
        result: Array = ufunc(a, b)
        return result if activation == 0 else np.clip(result, np.float32(low), np.float32(high))

    return run


def plan_int32(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan wrapping INT32 arithmetic."""
    require(activation == 0, "C1", f"activation {activation} with INT32, only 0 (NONE) is allowed")
    return ufunc


def plan_quantized_sum(sign: int, first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan first + sign · second of quantized values."""
    low, high = quantized_activation_range(activation, output)
    (one, other), (multiplier, shift) = sum_multipliers(first, second, output)
    addends, others = rescaled_values(first, one, 1), rescaled_values(second, other, sign)

    def run(a: Array, b: Array) -> Array:
        sums = np.add(addends.take(a.view(np.uint8)), others.take(b.view(np.uint8)))
        variants = fixed_point.multiply(sums, multiplier, shift)
        variants += output.zero_point
        return np.clip(variants, low, high, out=variants).astype(output.dtype)

    return run


def sum_multipliers(first: Tensor, second: Tensor, output: Tensor) -> tuple[tuple[Multiplier, Multiplier], Multiplier]:
    """Return the multipliers of both operands, to a common scale / 2^20, and that of their sum."""
    common = 2.0 * max(first.scale, second.scale)
    one, other = (fixed_point.quantize_multiplier_below_one(tensor.scale / common) for tensor in (first, second))
    return (one, other), fixed_point.quantize_multiplier_below_one(common / ((1 << 20) * output.scale))


def rescaled_values(tensor: Tensor, multiplier: Multiplier, sign: int) -> Ints:
    """Return all 256 values in the scale of the sum, ordered by the bits of the quantized values."""
    output_multiplier, shift = multiplier
    values = (ints(all_quantized_values(tensor)) - tensor.zero_point) << 20
    return fixed_point.multiply(values, sign * output_multiplier, shift)


def plan_quantized_mul(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan MUL of quantized values."""
    real = float(np.float32(first.scale) * np.float32(second.scale)) / output.scale
    fixed_point.quantize_multiplier_below_one(real)
    epilogue = requantizer(OutputMultipliers.of([real]), ints([0]), 1 << 16, output, activation)

    def run(a: Array, b: Array) -> Array:
        products = np.subtract(a, first.zero_point, dtype=np.int32) * np.subtract(b, second.zero_point, dtype=np.int32)
        out = np.empty(products.shape, output.dtype)
        epilogue(products, out)
        return out

    return run


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic of 16 bits, and DIV of 8 bits, as TFLite defines it.
#
# ADD and SUB of 16 bits rescale both inputs to a common scale with 15 extra bits and requantize the sum. If all scales
# are powers of two and the file says so, one input is shifted to the scale of the output and the sum saturates.
# TFLite's DIV shifts by more bits than an int32 has if a quotient is very small, and its quotients wrap around if they
# are very large. Here, very small ones are 0, and very large ones saturate. DIV of 16 bits is that of 8 bits, with zero
# points of 0.
#
#     C1 one input has the output's scale and the other none larger, if scales are powers of two     C2 no divisor is 0
#     Q1, Q2 ranges of real multipliers     Q5 activation code 0 to 3


_EXTRA_BITS = 15  # of the common scale of a sum


def plan_sixteen_bit_sum(
    sign: int, first: Tensor, second: Tensor, *, output: Tensor, activation: int, powers_of_two: bool = False
) -> Run:
    """Plan first + sign · second. `powers_of_two`: the scales may be, so that shifts suffice."""
    exponents = [_exponent(tensor.scale) for tensor in (first, second, output)]
    low, high = quantized_activation_range(activation, output)
    if powers_of_two and None not in exponents:
        return _shifted_sum(sign, [e for e in exponents if e is not None], low, high)
    common = 2.0 * max(first.scale, second.scale)
    one, other = (fixed_point.quantize_multiplier_below_one(tensor.scale / common) for tensor in (first, second))
    total = fixed_point.quantize_multiplier_below_one(common / ((1 << _EXTRA_BITS) * output.scale))

    def run(a: Array, b: Array) -> Array:
        addend = fixed_point.multiply(ints(a) << _EXTRA_BITS, *one)
        summand = fixed_point.multiply(ints(b) << _EXTRA_BITS, sign * other[0], other[1])
        return np.clip(fixed_point.multiply(addend + summand, *total), low, high).astype(np.int16)

    return run


def _exponent(scale: float) -> int | None:
    """Return log2 of a scale if that is nearly an integer, as TFLite's CheckedLog2."""
    exact = math.log2(scale)
    return round(exact) if abs(exact - round(exact)) < 1e-3 else None


def _shifted_sum(sign: int, exponents: list[int], low: int, high: int) -> Run:
    shifts = [exponents[2] - exponent for exponent in exponents[:2]]
    scales = f"the inputs' scales are 2^{exponents[0]} and 2^{exponents[1]}, the output's 2^{exponents[2]}"
    require(min(shifts) == 0, "C1", scales)

    def run(a: Array, b: Array) -> Array:
        addend, summand = (fixed_point.rounding_shift(ints(x), shift) for x, shift in zip((a, b), shifts, strict=True))
        return np.clip(to_int16(addend + sign * summand), low, high)

    return run


def plan_sixteen_bit_mul(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan MUL of 16 bits; TFLite multiplies the scales in float32."""
    real = np.float32(first.scale) * np.float32(second.scale) / np.float32(output.scale)
    multiplier, shift = fixed_point.quantize_multiplier(float(real))
    low, high = quantized_activation_range(activation, output)

    def run(a: Array, b: Array) -> Array:
        return np.clip(fixed_point.multiply(ints(a) * ints(b), multiplier, shift), low, high).astype(np.int16)

    return run


_WIDEST_SHIFT = 62


def plan_tflite_div(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
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

    inner = by_pairs(divide, first, second, output)

    def run(a: Array, b: Array) -> Array:
        require(not (b == second.zero_point).any(), "C2", "a divisor is 0")
        return cast(Array, inner(a, b))

    return run


def _scaled_quotients(dividends: Ints, divisors: Ints, multiplier: int, shift: int) -> Ints:
    """Return dividends / divisors · multiplier / 2^31 · 2^shift, limited to 32 bits; the divisors are positive."""
    bits = fixed_point.bit_length(divisors)
    inverses = fixed_point.reciprocal_of_one_plus((divisors << (32 - bits)) - (1 << 31))
    free = 31 - fixed_point.bit_length(np.where(dividends < 0, ~dividends, dividends))
    quotients = fixed_point.high_mul(dividends << free, inverses)
    right = bits - 1 + free - shift
    scaled = fixed_point.high_mul(quotients, multiplier)
    shifted = fixed_point.rounding_shift(scaled, np.clip(right, 0, _WIDEST_SHIFT))
    return saturated(shifted << np.clip(-right, 0, 31))


# ----------------------------------------------------------------------------------------------------------------------
# Elements of 64 bits and UINT32: integers wrap around, and there are no fused activations.


def integer_power(base: Array, exponent: Array) -> Array:
    """Return base ** exponent of integers, wrapped around; a negative exponent gives 0, or 1 and -1 of these bases."""
    base, exponent = np.broadcast_arrays(base, exponent)
    result: Array = np.power(base, np.maximum(exponent, 0))
    negative = exponent < 0
    if negative.any():
        odd = np.where(exponent % 2 == 0, 1, base)
        result = np.where(negative, np.where(np.abs(base) == 1, odd, 0), result).astype(base.dtype)
    return result


def _arithmetic(
    code: OperationType,
    since: int,
    ufunc: np.ufunc,
    in_int32: np.ufunc,
    variants: tuple[op.Variant, ...],
    *extended: op.Extended,
) -> op.Declaration:
    return op.Declaration(
        code,
        since=since,
        overloads=(op.overload(op.data("first"), op.data("second"), op.attribute("activation"), level=since),),
        variants=(
            *float_variants(partial(plan_float, ufunc), level=since),
            op.Variant({"T": op.I32}, op.V1_3, partial(plan_int32, in_int32)),
            *variants,
        ),
        shape=broadcast_shapes_up_to_rank_4,
        zero_sized=True,
        extended=extended,
    )


def _wider(ufunc: np.ufunc, *types: OperandType) -> op.Extended:
    return op.wider(*op.of_types(partial(plan_int32, ufunc), *types), shape=broadcast_shapes)


def _sum(code: OperationType, since: int, ufunc: np.ufunc, sign: int, quantized_since: int) -> op.Declaration:
    variants = op.types_since(quantized_since, partial(plan_quantized_sum, sign), op.Q8, op.Q8S)
    arguments = (
        op.data("first"),
        op.data("second"),
        op.attribute("activation"),
        op.attribute("powers_of_two", op.BOOL),
    )
    sixteen_bits = op.sixteen_bits(
        *op.of_types(partial(plan_sixteen_bit_sum, sign), op.Q16S),
        overloads=(op.overload(*arguments, level=op.V1_2, also={3: op.V1_2}),),
        shape=broadcast_shapes,
    )
    return _arithmetic(code, since, ufunc, ufunc, variants, _wider(ufunc, *op.WIDE), sixteen_bits)


DECLARATIONS = (
    _sum(OperationType.ADD, op.V1_0, np.add, 1, op.V1_0),
    _sum(OperationType.SUB, op.V1_1, np.subtract, -1, op.V1_2),
    _arithmetic(
        OperationType.MUL,
        op.V1_0,
        np.multiply,
        np.multiply,
        op.types_since(op.V1_0, plan_quantized_mul, op.Q8, op.Q8S),
        _wider(np.multiply, *op.WIDE),
        op.sixteen_bits(*op.of_types(plan_sixteen_bit_mul, op.Q16S), shape=broadcast_shapes),
    ),
    _arithmetic(
        OperationType.DIV,
        op.V1_1,
        np.divide,
        np.floor_divide,
        (),
        _wider(np.divide, op.F64),
        op.tflite(*op.of_types(plan_tflite_div, op.Q8, op.Q8S), shape=broadcast_shapes),
        op.sixteen_bits(*op.of_types(plan_tflite_div, op.Q16S), shape=broadcast_shapes),
    ),
    op.Declaration(
        OperationType.POW,
        since=op.V1_2,
        overloads=(op.overload(op.data("base"), op.data("exponent"), level=op.V1_2),),
        variants=float_variants(stateless(np.power)),
        shape=broadcast_shapes,
        extended=(
            op.wider(
                *op.of_types(stateless(integer_power), op.I32, *op.WIDE_INTEGERS),
                *op.of_types(stateless(np.power), op.F64),
            ),
        ),
    ),
)
