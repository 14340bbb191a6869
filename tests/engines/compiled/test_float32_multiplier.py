"""Requantization in float32: results at the first accumulator of each step, and the check of all steps."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from support.compiled import assert_kernels_agree_on
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.requantize import REQUANT_ROWS, Float32Multiplier, float32_constants
from nnfmq.engines.compiled.lowering import KernelLaunch
from nnfmq.engines.compiled.partition import LOWERING_RULES
from nnfmq.engines.compiled.target import TARGETS
from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations.declaration import Tensor
from nnfmq.operations.fixed_point import multiply, quantize_multiplier
from nnfmq.operations.quantization import OutputMultipliers

Q8, Q8S, I32 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED, OperandType.TENSOR_INT32
SAME = 1
AVX512 = TARGETS["avx512"]
WRONG = 1472992305, -3
"""A multiplier and a shift with a step that float32 misses."""
EVERY_RESULT = -255, 255


def of(multiplier: int, shift: int, bound: int = 1 << 20) -> Float32Multiplier | None:
    multipliers, shifts, bounds = (np.array([number], np.int64) for number in (multiplier, shift, bound))
    return Float32Multiplier.of(OutputMultipliers(multipliers, shifts), bounds, EVERY_RESULT, AVX512)


def first_accumulator(real: float, result: int) -> int:
    """Return the least accumulator whose result is `result` or more, by bisection."""
    multiplier, shift = quantize_multiplier(real)
    low, high = -(1 << 24), 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        is_reached = multiply(np.array([middle]), multiplier, shift)[0] >= result
        low, high = (low, middle) if is_reached else (middle, high)
    return high


@pytest.mark.instruction_sets
@pytest.mark.parametrize("operation", [OperationType.CONV_2D, OperationType.DEPTHWISE_CONV_2D])
@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("kind", [Q8, Q8S])
@pytest.mark.parametrize("scale", [1.7, 2.0, 6.5, 8.0, 0.75, 171.3, 4096.0, 30011.0])
def test_every_step_is_at_the_interpreters_accumulator(
    operation: OperationType, kind: OperandType, scale: float, activation: int
) -> None:
    """Weights are 0, so that biases are the accumulators."""
    real = float(np.float32(1.0) / np.float32(scale))
    firsts = [first_accumulator(real, result) for result in range(-128, 129)]
    biases = np.array([acc for first in firsts for acc in (first - 1, first)], np.int32)
    channels, zero_point = len(biases), 128 if kind == Q8 else 0
    is_conv = operation == OperationType.CONV_2D
    shape, depth = ((channels, 1, 1, 4), 4) if is_conv else ((1, 1, 1, channels), channels)
    filter = Operand(kind, shape, 1.0, zero_point), bytes([zero_point]) * (channels * (4 if is_conv else 1))
    bias = Operand(I32, (channels,), 1.0), biases.tobytes()
    source = Operand(kind, (1, 1, 2, depth), 1.0, zero_point)
    arguments = [source, filter, bias, SAME, 1, 1, *([] if is_conv else [1]), activation]
    model = one_operation(operation, arguments, Operand(kind, (1, 1, 2, channels), scale, zero_point))
    assert_kernels_agree_on(model, [[np.full((1, 1, 2, depth), 3, "u1" if kind == Q8 else "i1")]])


def results(multiplier: int, shift: int, acc: int) -> tuple[int, int]:
    """Return the result of two roundings, and that of the float32 numbers, with one rounding to float32."""
    numbers = OutputMultipliers(np.array([multiplier], np.int64), np.array([shift], np.int64))
    high, low, offset = float32_constants(numbers, REQUANT_ROWS)[:3, 0].view(np.float32)
    rest = np.float32(float(acc) * float(low) + float(np.copysign(offset, acc)))  # exact before it is rounded
    doubled = floor(acc * Fraction(float(high)) + Fraction(float(rest)))
    return int(multiply(np.array([acc]), multiplier, shift)[0]), (doubled + 1) >> 1


def test_a_multiplier_is_rejected_exactly_if_a_step_is_wrong() -> None:
    random = np.random.default_rng(0)
    multipliers = [(int(m), int(s)) for m, s in zip(random.integers(1 << 30, 1 << 31, 6), range(-5, 1), strict=True)]
    for multiplier, shift in [*multipliers, (1 << 30, -3), (1 << 30, 2), WRONG]:
        per_result = (1 << 31) / (multiplier * 2.0**shift)
        accs = {floor((half / 2) * per_result) + n for half in range(-512, 512) for n in range(-2, 4)}
        is_right = all(len(set(results(multiplier, shift, acc))) == 1 for acc in accs)
        assert (of(multiplier, shift) is not None) == is_right == ((multiplier, shift) != WRONG)


def test_only_reachable_steps_count() -> None:
    numbers = OutputMultipliers(np.array(WRONG[:1], np.int64), np.array(WRONG[1:], np.int64))
    assert Float32Multiplier.of(numbers, np.array([1 << 20]), (0, 3), AVX512) is not None


def test_accumulators_that_overflow_int32_are_rejected() -> None:
    assert of(1 << 30, 0, (1 << 30) - 1) is not None
    assert of(1 << 30, 0, 1 << 30) is None


def test_shifts_whose_error_is_too_large_are_rejected() -> None:
    assert of(1 << 30, -14) is not None
    assert of(1 << 30, -15) is None


def test_multipliers_of_0_are_rejected() -> None:
    assert of(0, 0) is None


@pytest.mark.parametrize("name", ["avx2", "sse4.1", "neon"])
def test_targets_without_rounding_modes_do_not_use_it(name: str) -> None:
    numbers = OutputMultipliers(np.array([1 << 30], np.int64), np.array([0], np.int64))
    assert Float32Multiplier.of(numbers, np.array([1]), EVERY_RESULT, TARGETS[name]) is None


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("name", ["avx512vnni", "avx512"])
def test_lowered_convolutions_use_it(name: str, activation: int) -> None:
    uint8 = np.dtype("u1")
    operands = [
        Tensor((1, 4, 4, 8), uint8, 0.5, 3),
        Tensor((8, 1, 1, 8), uint8, 0.25, 128, value=np.ones((8, 1, 1, 8), uint8)),
        Tensor((8,), np.dtype("i4"), 0.125, value=np.zeros(8, np.int32)),
    ]
    arguments = {"stride_width": 1, "stride_height": 1, "padding_scheme": SAME, "activation": activation}
    output = Tensor((1, 4, 4, 8), uint8, 3.7, 5)
    launch = LOWERING_RULES[OperationType.CONV_2D](*operands, output=output, target=TARGETS[name], **arguments)
    assert isinstance(launch, KernelLaunch) and isinstance(launch.kernel, GemmKernel)
    assert launch.kernel.micro_kernel.requantization.multiplier == Float32Multiplier(is_rectified=activation == 1)
