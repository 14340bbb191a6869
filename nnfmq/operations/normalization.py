"""L2_NORMALIZATION, LOCAL_RESPONSE_NORMALIZATION and INSTANCE_NORMALIZATION.

The first two normalize along one axis, by default the last; the third over the height and width of an image. The
quantized norm is computed in integers as in TFLite: 1/sqrt by five Newton steps in fixed point. float16
INSTANCE_NORMALIZATION is computed in float32 and rounded once; TFLite rounds each step.

L2_NORMALIZATION               R1 rank 1 to 4   A1 axis   Q6 output scale 1/128, zero point 128 (uint8) or 0 (int8)
LOCAL_RESPONSE_NORMALIZATION   R1 rank 1 to 4   A1 axis   C1 the radius is not negative
INSTANCE_NORMALIZATION         C2 the input has rank 4
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nnfmq.hal.types import Operand, OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.fixed_point import (
    INT32_MAX,
    Ints,
    bit_length,
    high_mul,
    ints,
    rounding_shift,
    saturated,
)
from nnfmq.operations.kernel_adapters import float_variants, stateless
from nnfmq.operations.quantization import clamped, dtype_range, require_quantization
from nnfmq.operations.shapes import normalize_axis, require, require_rank

_MIN_NORM = np.float32(1e-6)
ONE_Q3, HALF_SQRT_2_Q0 = 1 << 28, 1518500250


def _axis_shape(input: Shape, axis: int) -> Shape:
    require_rank(input, range(1, 5), "input")
    normalize_axis(axis, len(input))
    return input


def _rank_level(inputs: Mapping[str, Operand], output: Operand) -> int:
    dimensions = inputs["input"].dimensions
    return op.V1_0 if len(dimensions) == 4 else op.V1_2


def l2_normalization_shape(input: Shape, *, axis: int = -1) -> Shape:
    """Return the input's shape."""
    return _axis_shape(input, axis)


def l2_normalization(input: Array, *, axis: int = -1) -> Array:
    """Divide by the norm along `axis`, at least 1e-6."""
    norms = np.sqrt(np.sum(np.square(input), axis=axis, keepdims=True))
    result: Array = input / np.maximum(norms, _MIN_NORM)
    return result


def plan_quantized_l2_normalization(input: Tensor, *, output: Tensor, axis: int = -1) -> Run:
    """Plan the normalization of quantized values."""
    low, high = dtype_range(output)
    require_quantization(output, 1 / 128, low + 128)

    def run(quantized: Array) -> Array:
        centered = ints(quantized) - input.zero_point
        multiplier, shift = inverse_square_root(np.sum(np.square(centered), axis=axis, keepdims=True))
        scaled = rounding_shift(high_mul(centered * 128, multiplier), shift)
        return np.clip(scaled + output.zero_point, low, high).astype(output.dtype)

    return run


def plan_tflite_l2_normalization(input: Tensor, *, output: Tensor, axis: int = -1) -> Run:
    """Plan the normalization of INT8 as TFLite defines it, with 7 more bits of the inverse norm."""
    require_quantization(output, 1 / 128, 0)

    def run(stored: Array) -> Array:
        centered = ints(stored) - input.zero_point
        multiplier, right = inverse_square_root(np.sum(np.square(centered), axis=axis, keepdims=True))
        return clamped(fixed_point.multiply(centered, multiplier, 7 - right), output)

    return run


def inverse_square_root(sums: Ints) -> tuple[Ints, Ints]:
    """GetInvSqrtQuantizedMultiplierExp: 1/sqrt(sum) as multiplier / 2^31 / 2^shift; sums of 0 and 1 give about 1."""
    inputs, shift = ints(np.maximum(sums, 2)), np.full(sums.shape, 11, np.int64)
    while (large := inputs >= 1 << 29).any():
        inputs, shift = np.where(large, inputs >> 2, inputs), shift + large
    pairs = (31 - bit_length(inputs)) // 2 - 1
    shift -= pairs
    x = high_mul(_newton_steps(inputs << 2 * pairs), HALF_SQRT_2_Q0)
    x, shift = x << np.maximum(-shift, 0), np.maximum(shift, 0)
    return np.where(sums <= 1, INT32_MAX, x), np.where(sums <= 1, 0, shift)


def _newton_steps(inputs: Ints) -> Ints:
    """Five steps of x ← 1.5·x - input/2·x³ in Q3."""
    half_input = rounding_shift(inputs >> 1, 1)
    x = np.full(inputs.shape, ONE_Q3, np.int64)
    for _ in range(5):
        cube = saturated(high_mul(high_mul(x, x), x) << 6)
        x = saturated((high_mul(x, ONE_Q3 + (ONE_Q3 >> 1)) - high_mul(half_input, cube)) << 3)
    return x


def local_response_shape(input: Shape, *, radius: int, bias: float, alpha: float, beta: float, axis: int = -1) -> Shape:
    """Return the input's shape."""
    require(radius >= 0, "C1", f"radius {radius}, it must not be negative")
    return _axis_shape(input, axis)


def local_response(input: Array, *, radius: int, bias: float, alpha: float, beta: float, axis: int = -1) -> Array:
    """Multiply by (bias + alpha · Σ x²)^-beta; the sum is over the elements up to `radius` away along `axis`."""
    squares = np.moveaxis(np.square(input), axis, 0)
    sums = squares.copy()
    for distance in range(1, min(radius, len(squares) - 1) + 1):
        sums[distance:] += squares[:-distance]
        sums[:-distance] += squares[distance:]
    factors = np.power(np.float32(bias) + np.float32(alpha) * sums, np.float32(-beta))
    result: Array = input * np.moveaxis(factors, 0, axis)
    return result


def instance_shape(input: Shape, *, gamma: float, beta: float, epsilon: float) -> Shape:
    """Return the input's shape."""
    require(len(input) == 4, "C2", f"input {input} must have rank 4")
    return input


def instance_normalization(input: Array, *, gamma: float, beta: float, epsilon: float) -> Array:
    """Return gamma · (x - mean) / sqrt(variance + epsilon) + beta for each image and channel."""
    centered = input - np.mean(input, axis=(1, 2), keepdims=True)
    sigma = np.sqrt(np.mean(np.square(centered), axis=(1, 2), keepdims=True) + np.float32(epsilon))
    result: Array = centered * np.float32(gamma) / sigma + np.float32(beta)
    return result


_FACTORS = (op.attribute("bias", "S"), op.attribute("alpha", "S"), op.attribute("beta", "S"))

DECLARATIONS = (
    op.Declaration(
        OperationType.L2_NORMALIZATION,
        since=op.V1_0,
        overloads=(op.overload(op.data("input"), op.attribute("axis"), level=op.V1_2, also={1: op.V1_0}),),
        variants=(
            *float_variants(stateless(l2_normalization), level=op.V1_0),
            *op.types_since(op.V1_2, plan_quantized_l2_normalization, op.Q8, op.Q8S),
        ),
        shape=l2_normalization_shape,
        level=_rank_level,
        extended=(op.tflite(*op.of_types(plan_tflite_l2_normalization, op.Q8S)),),
    ),
    op.Declaration(
        OperationType.LOCAL_RESPONSE_NORMALIZATION,
        since=op.V1_0,
        overloads=(
            op.overload(
                op.data("input"),
                op.attribute("radius"),
                *_FACTORS,
                op.attribute("axis"),
                level=op.V1_2,
                also={5: op.V1_0},
            ),
        ),
        variants=float_variants(stateless(local_response), "S", level=op.V1_0),
        shape=local_response_shape,
        level=_rank_level,
    ),
    op.Declaration(
        OperationType.INSTANCE_NORMALIZATION,
        since=op.V1_2,
        overloads=(
            op.overload(
                op.data("input"),
                op.attribute("gamma", "S"),
                op.attribute("beta", "S"),
                op.attribute("epsilon", "S"),
                op.attribute("nchw", op.BOOL),
                level=op.V1_2,
            ),
        ),
        variants=float_variants(stateless(instance_normalization), "S"),
        shape=instance_shape,
        images=("input",),
    ),
)
