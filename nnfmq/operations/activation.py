"""RELU, RELU1, RELU6, LOGISTIC and SOFTMAX.

A function of one 8-bit code is a table of 256, computed once by the reference's fixed-point formulas. SOFTMAX needs
a table of exponentials, a sum and one reciprocal for each row.

    C1 beta is positive
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.types import FusedActivationFunc, OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import Ints, ints
from nnfmq.operations.policies import direct, half, table
from nnfmq.operations.quantization import code_range, float_range, require_quantization, type_range
from nnfmq.operations.shapes import normal_axis, require, require_rank, same_up_to_4
from nnfmq.operations.signature import (
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
    Plan,
    Run,
    Shape,
    Tensor,
    Variant,
    control,
    data,
    form,
)


def clamp(input: Array, *, low: float, high: float) -> Array:
    """Return the input held within [low, high]."""
    return np.clip(input, input.dtype.type(low), input.dtype.type(high))


def _clamped_codes(codes: Array, input: Tensor, output: Tensor, *, activation: int) -> Array:
    low, high = code_range(activation, output)
    clamped: Array = np.clip(codes, low, high).astype(output.dtype)
    return clamped


def _unary(code: OperationType, in_float: Plan, in_integers: Plan, *, same_quantization: bool) -> Declaration:
    return Declaration(
        code,
        since=V1_0,
        forms=(form(data("input")),),
        variants=(
            Variant({"T": F32}, V1_0, in_float),
            Variant({"T": Q8}, V1_0, in_integers),
            Variant({"T": F16}, V1_2, half(in_float)),
            Variant({"T": Q8S}, V1_3, in_integers),
        ),
        shape=same_up_to_4,
        zero_sized=True,
        same_quantization=same_quantization,
    )


def _rectifier(code: OperationType, activation: FusedActivationFunc) -> Declaration:
    low, high = float_range(activation)
    in_float = direct(partial(clamp, low=low, high=high))
    return _unary(code, in_float, table(partial(_clamped_codes, activation=activation)), same_quantization=True)


def logistic(input: Array) -> Array:
    """Return 1 / (1 + e^-x)."""
    result: Array = np.reciprocal(np.exp(-input) + input.dtype.type(1))
    return result


def _logistic_codes(codes: Array, input: Tensor, output: Tensor) -> Array:
    """LOGISTIC in Q4 fixed point; inputs beyond the radius saturate."""
    lowest = type_range(output)[0]
    require_quantization(output, 1 / 256, lowest)
    multiplier, shift = fixed_point.quantize_multiplier_above_one(input.scale * (1 << 27))
    radius = fixed_point.input_radius(4, shift)
    centred = ints(codes) - input.zero_point
    inside = np.clip(centred, -radius, radius)
    value = fixed_point.logistic(fixed_point.high_mul(inside << shift, multiplier), 4)
    result = np.minimum(fixed_point.rounding_shift(value, 23), 255)
    result = np.where(centred < -radius, 0, np.where(centred > radius, 255, result))
    return (result + lowest).astype(output.dtype)


def softmax_shape(input: Shape, *, beta: float, axis: int = -1) -> Shape:
    """Return the input's shape."""
    require_rank(input, range(1, 5), "input")
    require(beta > 0, "C1", f"beta {beta} is not positive")
    normal_axis(axis, len(input))
    return input


def softmax(input: Array, *, beta: float, axis: int = -1) -> Array:
    """Return e^(beta·(x - max)) over its sum along `axis`."""
    exponentials = np.exp((input - input.max(axis=axis, keepdims=True)) * np.float32(beta))
    exponentials = np.exp((input - input.max(axis=axis, keepdims=True)) * np.float32(beta))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)  # type: ignore[no-any-return]


def plan_quantized_softmax(input: Tensor, *, output: Tensor, beta: float, axis: int = -1) -> Run:
    """Plan SOFTMAX of codes: Q5 differences, exponentials in Q0, their sum in Q12."""
    lowest = type_range(output)[0]
    require_quantization(output, 1 / 256, lowest)
    exponentials = _exponentials(input.scale, beta)
    summands = fixed_point.rounding_shift(exponentials, 12)
    if 0 in input.shape:
        return lambda codes: codes.copy()

    def run(codes: Array) -> Array:
        wide = codes.astype(np.int64)
        below = wide.max(axis=axis, keepdims=True) - wide
        scale, bits = _reciprocal(summands.take(below).sum(axis=axis, keepdims=True))
        shares = fixed_point.rounding_shift(fixed_point.high_mul(exponentials.take(below), scale), bits + 23)
        return (np.clip(shares, 0, 255) + lowest).astype(output.dtype)

    return run


def _exponentials(scale: float, beta: float) -> Ints:
    """Return e^(-beta·scale·d) in Q0 for d = 0..255; 0 beyond the radius."""
    real = min(beta * scale * (1 << 26), float((1 << 31) - 1))
    multiplier, shift = fixed_point.quantize_multiplier_above_one(real)
    differences = -np.arange(256, dtype=np.int64)
    inside = differences >= -fixed_point.input_radius(5, shift)
    scaled = fixed_point.high_mul(np.where(inside, differences, 0) << shift, multiplier)
    return np.where(inside, fixed_point.exp_on_negative_values(scaled, 5), 0)


def _reciprocal(sums: Ints) -> tuple[Ints, Ints]:
    """GetReciprocal of sums in Q12: return a Q0 mantissa, and the bits by which it exceeds one."""
    _, exponents = np.frexp(sums.astype(np.float64))
    leading_zeros = 32 - ints(exponents)
    return fixed_point.reciprocal_of_one_plus((sums << leading_zeros) - (1 << 31)), 12 - leading_zeros


def _softmax_level(inputs: Any, output: Any) -> int:
    return V1_0 if len(inputs["input"].dimensions) in (2, 4) else V1_2


DECLARATIONS = (
    _rectifier(OperationType.RELU, FusedActivationFunc.RELU),
    _rectifier(OperationType.RELU1, FusedActivationFunc.RELU1),
    _rectifier(OperationType.RELU6, FusedActivationFunc.RELU6),
    _unary(OperationType.LOGISTIC, direct(logistic), table(_logistic_codes), same_quantization=False),
    Declaration(
        OperationType.SOFTMAX,
        since=V1_0,
        forms=(form(data("input"), control("beta", "S"), control("axis"), level=V1_2, also={2: V1_0}),),
        variants=(
            Variant({"T": F32, "S": FLOAT32}, V1_0, direct(softmax)),
            Variant({"T": Q8, "S": FLOAT32}, V1_0, plan_quantized_softmax),
            Variant({"T": F16, "S": FLOAT16}, V1_2, half(direct(softmax))),
            Variant({"T": Q8S, "S": FLOAT32}, V1_3, plan_quantized_softmax),
        ),
        shape=softmax_shape,
        zero_sized=True,
        level=_softmax_level,
    ),
)
