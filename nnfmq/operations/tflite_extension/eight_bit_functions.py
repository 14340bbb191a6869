"""Functions of one 8-bit value as TFLite defines them, each a table of 256 entries.

CLAMP, ABS, LEAKY_RELU and RSQRT are computed in fixed point. LOG, EXP and ELU are computed in float32 and multiplied by
the reciprocal of the output's scale, SQRT is divided by that scale and rounded toward zero. Where a function is not
defined, LOG gives the lowest value, SQRT the zero point and RSQRT the highest value.

    Q1 range of the real multiplier of CLAMP, ABS, LEAKY_RELU and RSQRT
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.kernel_adapters import stateless, via_lut8
from nnfmq.operations.l2_lrn_instance_norm import inverse_square_root
from nnfmq.operations.quantization import dequantized_values, dtype_range, quantized_range
from nnfmq.operations.signature import (
    FLOAT32,
    Q8,
    Q8S,
    Array,
    Declaration,
    Parameter,
    Plan,
    Tensor,
    attribute,
)
from nnfmq.operations.tflite_extension.declaring import function_of_one, variants_of
from nnfmq.operations.tflite_extension.sixteen_bits import float_ratio

_FRACTION_BITS = 20  # of an inverse square root


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
    fractions = fixed_point.multiply(np.ones_like(values), inverses, _FRACTION_BITS - right)
    roots = fixed_point.multiply(fractions, multiplier, shift - _FRACTION_BITS)
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


DECLARATIONS = (
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
