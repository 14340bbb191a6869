"""SQUARED_DIFFERENCE, DIV, MEAN, REDUCE_SUM and REDUCE_PROD of 8-bit tensors, in fixed point as TFLite defines them.

DIV and REDUCE_PROD of 16-bit tensors are the same, with zero points of 0.

TFLite's DIV shifts by more bits than an int32 has if a quotient is very small, and its sums, products and quotients
wrap around if they are very large. Here, the former are 0 and the latter saturate.

    B1 dimensions are equal or 1     C1 axes are a vector     C2 no divisor is 0
    C3 the multiplier of each factor of a product is below 2^8     Q5 activation code 0 to 3
    Q1, Q2 ranges of real multipliers
"""

from __future__ import annotations

import math
from functools import partial
from typing import cast

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import INT32_MAX, INT32_MIN, Ints, ints
from nnfmq.operations.quantization import all_quantized_values, quantized_activation_range
from nnfmq.operations.reduce_argmax import reduced, reduced_axes
from nnfmq.operations.shapes import broadcast_shapes, require
from nnfmq.operations.signature import (
    BOOL,
    I32,
    Q8,
    Q8S,
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
from nnfmq.operations.tflite_extension.declaring import own_code, variants_of
from nnfmq.operations.tflite_extension.eight_bit_functions import clamped, multiplied
from nnfmq.operations.tflite_extension.sixteen_bits import multiply_wide

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


DECLARATIONS = (
    _binary(TfliteOperation.Q8_SQUARED_DIFFERENCE, plan_squared_difference),
    _binary(TfliteOperation.Q8_DIV, plan_div, attribute("activation")),
    _reduction(TfliteOperation.Q8_MEAN, partial(plan_mean_or_sum, True)),
    _reduction(TfliteOperation.Q8_REDUCE_SUM, partial(plan_mean_or_sum, False)),
    _reduction(TfliteOperation.Q8_REDUCE_PROD, plan_prod),
)
