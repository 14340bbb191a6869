"""SOFTMAX and LOG_SOFTMAX: e^(beta·x) over its sum along an axis, and the logarithm of that.

Quantized SOFTMAX uses a table of exponentials, a sum and one reciprocal for each row; there is no quantized
LOG_SOFTMAX.

    C1 beta is positive
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.types import OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.declaration import (
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    Q8,
    Q8S,
    V1_0,
    V1_2,
    V1_3,
    Array,
    Declaration,
    Run,
    Shape,
    Tensor,
    Variant,
    attribute,
    data,
    overload,
)
from nnfmq.operations.fixed_point import Ints
from nnfmq.operations.kernel_adapters import fp16_via_fp32, stateless
from nnfmq.operations.quantization import dtype_range, require_quantization
from nnfmq.operations.shapes import normalize_axis, require, require_rank


def softmax_shape(input: Shape, *, beta: float, axis: int = -1) -> Shape:
    """Return the input's shape."""
    require_rank(input, range(1, 5), "input")
    return log_softmax_shape(input, beta=beta, axis=axis)


def log_softmax_shape(input: Shape, *, beta: float, axis: int) -> Shape:
    """Return the input's shape."""
    require(beta > 0, "C1", f"beta {beta}, it must be positive")
    normalize_axis(axis, len(input))
    return input


def softmax(input: Array, *, beta: float, axis: int = -1) -> Array:
    """Return e^(beta·(x - max)) over its sum along `axis`."""
    if 0 in input.shape:
        return input.copy()
    exponentials = np.exp((input - input.max(axis=axis, keepdims=True)) * np.float32(beta))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)  # type: ignore[no-any-return]


def log_softmax(input: Array, *, beta: float, axis: int) -> Array:
    """Return beta·(x - max) minus the logarithm of the sum of its exponentials along `axis`."""
    scaled = (input - input.max(axis=axis, keepdims=True)) * np.float32(beta)
    return scaled - np.log(np.exp(scaled).sum(axis=axis, keepdims=True))  # type: ignore[no-any-return]


def plan_quantized_softmax(input: Tensor, *, output: Tensor, beta: float, axis: int = -1) -> Run:
    """Plan quantized SOFTMAX: Q5 differences, exponentials in Q0, their sum in Q12."""
    lowest = dtype_range(output)[0]
    require_quantization(output, 1 / 256, lowest)
    exponentials, summands = exponential_tables(input.scale, beta)
    if 0 in input.shape:
        return lambda quantized: quantized.copy()

    def run(quantized: Array) -> Array:
        wide = quantized.astype(np.int64)
        below = wide.max(axis=axis, keepdims=True) - wide
        scale, bits = reciprocal_of_sums(summands.take(below).sum(axis=axis, keepdims=True))
        shares = fixed_point.rounding_shift(fixed_point.high_mul(exponentials.take(below), scale), bits + 23)
        return (np.clip(shares, 0, 255) + lowest).astype(output.dtype)

    return run


def exponential_tables(scale: float, beta: float) -> tuple[Ints, Ints]:
    """Return e^(-beta·scale·d) for d = 0..255, in Q0 and in Q12; 0 beyond the radius."""
    real = min(beta * scale * (1 << 26), float((1 << 30) - 1))  # larger: every exponential but e^0 rounds to 0
    multiplier, shift = fixed_point.quantize_multiplier_above_one(real)
    differences = -np.arange(256, dtype=np.int64)
    inside = differences >= -fixed_point.input_radius(5, shift)
    scaled = fixed_point.high_mul(np.where(inside, differences, 0) << shift, multiplier)
    exponentials = np.where(inside, fixed_point.exp_on_negative_values(scaled, 5), 0)
    return exponentials, fixed_point.rounding_shift(exponentials, 12)


def reciprocal_of_sums(sums: Ints) -> tuple[Ints, Ints]:
    """GetReciprocal of sums in Q12: return a Q0 multiplier and the number of bits by which it exceeds one."""
    leading_zeros = 32 - fixed_point.bit_length(sums)
    return fixed_point.reciprocal_of_one_plus((sums << leading_zeros) - (1 << 31)), 12 - leading_zeros


def _softmax_level(inputs: Any, output: Any) -> int:
    return V1_0 if len(inputs["input"].dimensions) in (2, 4) else V1_2


DECLARATIONS = (
    Declaration(
        OperationType.SOFTMAX,
        since=V1_0,
        overloads=(overload(data("input"), attribute("beta", "S"), attribute("axis"), level=V1_2, also={2: V1_0}),),
        variants=(
            Variant({"T": F32, "S": FLOAT32}, V1_0, stateless(softmax)),
            Variant({"T": Q8, "S": FLOAT32}, V1_0, plan_quantized_softmax),
            Variant({"T": F16, "S": FLOAT16}, V1_2, fp16_via_fp32(stateless(softmax))),
            Variant({"T": Q8S, "S": FLOAT32}, V1_3, plan_quantized_softmax),
        ),
        shape=softmax_shape,
        zero_sized=True,
        level=_softmax_level,
    ),
    Declaration(
        OperationType.LOG_SOFTMAX,
        since=V1_2,
        overloads=(overload(data("input"), attribute("beta", "S"), attribute("axis"), level=V1_2),),
        variants=(
            Variant({"T": F32, "S": FLOAT32}, V1_2, stateless(log_softmax)),
            Variant({"T": F16, "S": FLOAT16}, V1_2, fp16_via_fp32(stateless(log_softmax))),
        ),
        shape=log_softmax_shape,
    ),
)
