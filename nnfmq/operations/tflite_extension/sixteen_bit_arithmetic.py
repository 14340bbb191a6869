"""Arithmetic on 16-bit tensors, element by element: sums, products, comparisons, RELU and its relatives, REQUANTIZE.

ADD and SUB rescale both inputs to a common scale with 15 extra bits and requantize the sum. If all scales are powers of
two and the file says so, one input is shifted to the scale of the output and the sum saturates.

    B1 dimensions are equal or 1     Q1, Q2 ranges of real multipliers     Q5 activation code 0 to 3
    C1 one input has the output's scale and the other none larger, if scales are powers of two
    C2 the scales of REQUANTIZE are positive
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.extensions import TfliteOperation
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import activation as activations
from nnfmq.operations import binary_arithmetic, comparison, fixed_point, reduction
from nnfmq.operations.declaration import (
    BOOL,
    FLOAT32,
    I32,
    Q8,
    Q8S,
    Q16S,
    V1_2,
    Array,
    Declaration,
    Parameter,
    Plan,
    Run,
    Tensor,
    attribute,
    data,
    overload,
)
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.quantization import quantized_activation_range, quantized_range
from nnfmq.operations.shapes import broadcast_shapes, require
from nnfmq.operations.tflite_extension.declaration import conversions, function_of_one, variants_of
from nnfmq.operations.tflite_extension.eight_bits import plan_div, plan_prod
from nnfmq.operations.tflite_extension.sixteen_bits import find, float_ratio, rescaling, saturated, sixteen_bit

_EXTRA_BITS = 15  # of the common scale of a sum


def plan_sum(
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
        return np.clip(saturated(addend + sign * summand), low, high)

    return run


def plan_mul(first: Tensor, second: Tensor, *, output: Tensor, activation: int) -> Run:
    """Plan MUL; TFLite multiplies the scales in float32."""
    real = np.float32(first.scale) * np.float32(second.scale) / np.float32(output.scale)
    multiplier, shift = fixed_point.quantize_multiplier(float(real))
    low, high = quantized_activation_range(activation, output)

    def run(a: Array, b: Array) -> Array:
        return np.clip(fixed_point.multiply(ints(a) * ints(b), multiplier, shift), low, high).astype(np.int16)

    return run


def plan_comparison(ufunc: np.ufunc, first: Tensor, second: Tensor, *, output: Tensor) -> Run:
    """Plan the comparison of real values, which float64 has exactly; of stored ones if the scales are equal."""
    if first.scale == second.scale:
        return lambda a, b: ufunc(a, b).view(np.uint8)
    scale, other = np.float64(first.scale), np.float64(second.scale)
    return lambda a, b: ufunc(a * scale, b * other).view(np.uint8)


def plan_prelu(input: Tensor, alpha: Tensor, *, output: Tensor) -> Run:
    """Plan x if it is not negative, else alpha · x."""
    slope = float(np.float32(input.scale) * np.float32(alpha.scale) / np.float32(output.scale))
    multiplier, shift = fixed_point.quantize_multiplier(slope)
    rescale = rescaling(float_ratio(input, output))

    def run(x: Array, alphas: Array) -> Array:
        scaled = fixed_point.multiply(ints(x) * (ints(alphas) - alpha.zero_point), multiplier, shift)
        return saturated(np.where(x >= 0, rescale(x), scaled))

    return run


def plan_leaky_relu(input: Tensor, *, output: Tensor, alpha: float) -> Run:
    """Plan x if it is not negative, else alpha · x, with a constant alpha."""
    slope = np.float32(input.scale) * np.float32(alpha) / np.float32(output.scale)
    multiplier, shift = fixed_point.quantize_multiplier(float(abs(slope)))
    sign = -1 if alpha < 0 else 1
    rescale = rescaling(float_ratio(input, output))

    def run(x: Array) -> Array:
        scaled = sign * fixed_point.multiply(ints(x), multiplier, shift)
        return saturated(np.where(x >= 0, rescale(x), scaled))

    return run


def plan_clamp(high: float, input: Tensor, *, output: Tensor) -> Run:
    """Plan the input in the output's scale, from 0 to `high`."""
    lowest, highest = quantized_range(0.0, high, output)
    rescale = rescaling(float_ratio(input, output))
    return lambda x: np.clip(rescale(x), lowest, highest).astype(np.int16)


def plan_abs(input: Tensor, *, output: Tensor) -> Run:
    """Plan the absolute value."""
    if input.scale == output.scale:
        return lambda x: saturated(np.abs(ints(x)))
    rescale = rescaling(float_ratio(input, output))
    return lambda x: saturated(rescale(np.abs(ints(x))))


def plan_neg(input: Tensor, *, output: Tensor) -> Run:
    """Plan the negative of stored values; that of the lowest one is itself, as in TFLite."""
    return np.negative


def plan_requantize(
    input: Tensor,
    *,
    output: Tensor,
    input_scale: float,
    input_zero_point: int,
    output_scale: float,
    output_zero_point: int,
) -> Run:
    """Plan quantized values in another scale, zero point or type.

    The scales and zero points are attributes, because operands of INT32 and INT16 do not have all of them.
    """
    require(min(input_scale, output_scale) > 0, "C2", f"the scales are {input_scale} and {output_scale}")
    info, rescale = np.iinfo(output.dtype), rescaling(input_scale / output_scale)

    def run(x: Array) -> Array:
        scaled = rescale(ints(x) - input_zero_point)
        return np.clip(scaled + output_zero_point, info.min, info.max).astype(output.dtype)

    return run


def _sum(code: Op, sign: int) -> Declaration:
    declaration = sixteen_bit(find(binary_arithmetic.DECLARATIONS, code), partial(plan_sum, sign))
    arguments = (data("first"), data("second"), attribute("activation"), attribute("powers_of_two", BOOL))
    own = overload(*arguments, level=V1_2, also={3: V1_2})
    return replace(declaration, overloads=(own,), shape=broadcast_shapes)


def _unary(operation: TfliteOperation, plan: Plan, *attributes: Parameter) -> Declaration:
    return function_of_one(operation, variants_of((Q16S,), plan), *attributes)


_REQUANTIZED = (Q8, Q8S, Q16S, I32)

DECLARATIONS = (
    _sum(Op.ADD, 1),
    _sum(Op.SUB, -1),
    replace(sixteen_bit(find(binary_arithmetic.DECLARATIONS, Op.MUL), plan_mul), shape=broadcast_shapes),
    replace(sixteen_bit(find(binary_arithmetic.DECLARATIONS, Op.DIV), plan_div), shape=broadcast_shapes),
    sixteen_bit(find(reduction.DECLARATIONS, Op.REDUCE_PROD), plan_prod),
    *(
        sixteen_bit(find(comparison.DECLARATIONS, code), partial(plan_comparison, ufunc))
        for code, ufunc in comparison.COMPARISONS.items()
    ),
    replace(
        sixteen_bit(find(activations.DECLARATIONS, Op.PRELU), plan_prelu),
        overloads=(overload(data("input"), data("alpha", Q8S), level=V1_2),),
    ),
    _unary(TfliteOperation.Q16_LEAKY_RELU, plan_leaky_relu, attribute("alpha", FLOAT32)),
    _unary(TfliteOperation.Q16_RELU, partial(plan_clamp, math.inf)),
    _unary(TfliteOperation.Q16_RELU6, partial(plan_clamp, 6.0)),
    _unary(TfliteOperation.Q16_ABS, plan_abs),
    _unary(TfliteOperation.Q16_NEG, plan_neg),
    function_of_one(
        TfliteOperation.REQUANTIZE,
        conversions(plan_requantize, itertools.product(_REQUANTIZED, _REQUANTIZED)),
        *(attribute("input_scale", FLOAT32), attribute("input_zero_point")),
        *(attribute("output_scale", FLOAT32), attribute("output_zero_point")),
    ),
)
