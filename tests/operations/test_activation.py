"""Activations of codes against their real functions, and where those saturate; LOG_SOFTMAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.one_result import result_of, tensor

from nnfmq.hal.types import Operand, OperandType, OperationType

F32, F16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16
KINDS = {
    "uint8": (OperandType.TENSOR_QUANT8_ASYMM, 0),
    "int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, -128),
}


def of_all_quantized_values(
    code: OperationType, dtype: str, input: tuple[float, int], output: tuple[float, int]
) -> Any:
    """Return unsigned results for the quantized values 0 to 255; zero points are those of uint8."""
    kind, zero = KINDS[dtype]
    codes = np.arange(256) + zero
    found = result_of(
        code, [tensor(codes, dtype, input[0], input[1] + zero)], Operand(kind, (), output[0], output[1] + zero)
    )
    return found.astype(int) - zero


def reals(scale: float, zero_point: int) -> Any:
    return (np.arange(256) - zero_point) * scale


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("scale", [2.0**-20, 0.01, 0.05, 1.0, 4.0, 7.99, 8.0, 1e6])
@pytest.mark.parametrize(
    ("code", "function", "steps", "middle"),
    [
        (OperationType.TANH, np.tanh, 128, 128),
        (OperationType.LOGISTIC, lambda x: 1 / (1 + np.exp(-np.clip(x, -700, 700))), 256, 0),
    ],
)
def test_a_sigmoid_of_quantized_values_is_the_rounded_real_one(
    code: OperationType, function: Any, steps: int, middle: int, scale: float, dtype: str
) -> None:
    found = of_all_quantized_values(code, dtype, (scale, 100), (1 / steps, middle))

    exact = np.clip(function(reals(scale, 100)) * steps + middle, 0, 255)
    assert np.abs(found - exact).max() < 0.51  # half a unit, and the error of the fixed-point polynomials


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("scale", "output_scale"), [(0.0625, 0.0625), (0.1, 0.03), (0.01, 0.05), (3.0, 0.3), (0.5, 9.0)]
)
def test_hard_swish_of_quantized_values_is_within_a_unit_of_the_real_one(
    scale: float, output_scale: float, dtype: str
) -> None:
    found = of_all_quantized_values(OperationType.HARD_SWISH, dtype, (scale, 100), (output_scale, 20))

    x = reals(scale, 100)
    exact = np.clip(x * np.clip(x + 3, 0, 6) / 6 / output_scale + 20, 0, 255)
    assert np.abs(found - exact).max() < 1


def test_hard_swish_saturates_at_3_and_vanishes_at_minus_3() -> None:
    found = result_of(OperationType.HARD_SWISH, [tensor([-9.0, -3.0, 0.0, 3.0, 9.0])], Operand(F32))

    np.testing.assert_allclose(found, [0, 0, 0, 3, 9], rtol=1e-6)


@pytest.mark.parametrize("dtype", KINDS)
def test_quantized_prelu_keeps_non_negative_inputs_and_scales_negative_ones(dtype: str) -> None:
    kind, zero = KINDS[dtype]
    input = tensor(np.array([0, 90, 100, 101, 250]) + zero, dtype, 0.5, zero + 100)  # -50, -5, 0, 0.5, 75
    alpha = tensor(np.array([[14], [6]]) + zero, dtype, 0.125, zero + 10)  # 0.5, -0.5

    found = result_of(OperationType.PRELU, [input, alpha], Operand(kind, (), 0.25, zero + 20))

    assert (found.astype(int) - zero).tolist() == [[0, 10, 20, 22, 255], [120, 30, 20, 22, 255]]


@pytest.mark.parametrize("dtype", KINDS)
def test_prelu_of_quantized_values_takes_multipliers_of_any_size(dtype: str) -> None:
    kind, zero = KINDS[dtype]
    input = tensor(np.array([99, 100, 101]) + zero, dtype, 1000.0, zero + 100)
    alpha = tensor(np.array([11]) + zero, dtype, 1000.0, zero + 10)

    found = result_of(OperationType.PRELU, [input, alpha], Operand(kind, (), 1.0, zero + 20))

    assert (found.astype(int) - zero).tolist() == [0, 20, 255]


def test_float_prelu_scales_negative_inputs() -> None:
    found = result_of(OperationType.PRELU, [tensor([[-2.0, 3.0]]), tensor([[0.5], [-1.0]])], Operand(F32))

    assert found.tolist() == [[-1.0, 3.0], [2.0, 3.0]]


@pytest.mark.parametrize(("dtype", "kind"), [("float32", F32), ("float16", F16)])
def test_elu_is_exact_near_0_and_tends_to_minus_alpha(dtype: str, kind: OperandType) -> None:
    alpha = (
        Operand(OperandType.FLOAT16 if dtype == "float16" else OperandType.FLOAT32),
        np.array(0.5, dtype).tobytes(),
    )

    found = result_of(OperationType.ELU, [tensor([-np.inf, -1e-4, 0.0, 2.0], dtype), alpha], Operand(kind))

    np.testing.assert_allclose(found.astype(float), [-0.5, -5e-5, 0.0, 2.0], rtol=1e-3)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("scale", [15.9, 16.0, 20.0, 40.0, 1e4])
def test_softmax_of_quantized_values_takes_scales_at_which_only_the_largest_is_left(scale: float, dtype: str) -> None:
    kind, zero = KINDS[dtype]
    codes = np.array([[9, 8, 7, 0], [9, 9, 8, 0]]) + zero

    found = result_of(OperationType.SOFTMAX, [tensor(codes, dtype, scale, zero), 1.0], Operand(kind, (), 1 / 256, zero))

    assert (found.astype(int) - zero).tolist() == [[255, 0, 0, 0], [128, 128, 0, 0]]  # 256 does not fit


def test_log_softmax_keeps_what_would_underflow_and_overflow() -> None:
    found = result_of(OperationType.LOG_SOFTMAX, [tensor([[1000.0, 1000.0, 0.0]]), 1.0, -1], Operand(F32))

    np.testing.assert_allclose(found, [[-np.log(2), -np.log(2), -1000 - np.log(2)]], rtol=1e-6)


@pytest.mark.parametrize("axis", range(-5, 5))
def test_log_softmax_is_the_logarithm_of_a_distribution_along_its_axis(axis: int) -> None:
    values = np.random.default_rng(1).standard_normal((2, 3, 1, 2, 4)).astype(np.float32)

    found = result_of(OperationType.LOG_SOFTMAX, [tensor(values), 2.0, axis], Operand(F32)).astype(float)

    weights = np.exp(2 * values.astype(float))
    np.testing.assert_allclose(np.exp(found), weights / weights.sum(axis=axis, keepdims=True), rtol=1e-5)
