"""GEMMs with dot4 compared with the interpreter: zero points, signs and extreme accumulators.

On a target without a dot4 instruction it is emulated with dot2, so packing and corrections are tested on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.compiled import assert_kernels_agree_on, random_inputs
from support.quantized_gemm import (
    INPUTS,
    PATTERNS,
    PER_CHANNEL,
    SAME,
    SCALE,
    SIZES,
    WEIGHT_SCALE,
    WINDOWS,
    QuantType,
    assert_packed_weights_are_restored,
    constants_of,
    convolution,
    filter_kind,
    fully_connected,
    input_operand,
    inputs_of,
    output_operand,
    quantized_values,
)
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.micro_kernels import Dot4, DotS16x2
from nnfmq.hal.types import Model, OperationType

pytestmark = pytest.mark.instruction_sets("dot4")

FILTERS = [PER_CHANNEL, 0, 122, 127, 128, 255]
"""Zero points of uint8 filters. Models have 122, with weights from -122 to 133; with 128 they just fit int8."""


def filter_of(input: QuantType, zero_point: int | None, shape: tuple[int, ...], patterns: Sequence[str]) -> list[Any]:
    """Return filter and bias as constants; the channels cycle through `patterns`."""
    kind, random = filter_kind(input, zero_point), np.random.default_rng(1)
    data = np.stack([quantized_values(kind, shape[1:], patterns[n % len(patterns)], random) for n in range(shape[0])])
    data.reshape(-1)[:2] = kind.ends
    return constants_of(kind, data)


def output_scale(taps: int, patterns: Sequence[str] = ("random",)) -> float:
    """Return an output scale with which few results saturate."""
    return 0.0078125 * (taps if "low" in patterns else math.sqrt(taps)) * 100


def conv_with_weights(
    input: QuantType,
    filter: int | None,
    size: tuple[int, ...],
    window: tuple[int, ...],
    patterns: Sequence[str] = ("random",),
) -> Model:
    rows, columns, *moves = window
    constants = filter_of(input, filter, (size[4], rows, columns, size[3]), patterns)
    return convolution(input, constants, size[:4], tuple(moves), output_scale(rows * columns * size[3], patterns))


def fully_connected_with(input: QuantType, filter: int, size: tuple[int, int, int], scale: float) -> Model:
    batch, length, units = size
    return fully_connected(input, filter_of(input, filter, (units, length), ("random",)), batch, scale)


def assert_dot4_matches(model: Model, kind: QuantType, planned: list[GemmKernel], patterns: Sequence[str] = ()) -> None:
    assert_kernels_agree_on(model, inputs_of(model, kind, patterns or ("random", "high")))
    assert isinstance(planned[-1].micro_kernel, Dot4)


@pytest.mark.parametrize(("input", "filter"), [(INPUTS[1], 122), (INPUTS[4], PER_CHANNEL)], ids=["uint8", "int8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_convolutions_match_the_interpreter(
    input: QuantType, filter: int | None, size: tuple[int, ...], window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    assert_dot4_matches(conv_with_weights(input, filter, size, window), input, planned)


@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("input", INPUTS)
def test_extreme_accumulators_match_the_interpreter(
    input: QuantType, filter: int | None, window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    """Zero points and values at both ends of their ranges, and in between."""
    model = conv_with_weights(input, filter, (1, 5, 6, 20, 9), window, PATTERNS)
    assert_dot4_matches(model, input, planned, PATTERNS)


@pytest.mark.parametrize("size", [(1, 16, 8), (1, 1024, 70), (5, 3, 17), (7, 65, 1), (19, 128, 40)])
@pytest.mark.parametrize("filter", [122, 128])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
def test_fully_connected_matches_the_interpreter(
    input: QuantType, filter: int, size: tuple[int, int, int], planned: list[GemmKernel]
) -> None:
    scale = output_scale(size[1])
    assert_dot4_matches(fully_connected_with(input, filter, size, scale), input, planned)


def test_multipliers_above_1_match_the_interpreter(planned: list[GemmKernel]) -> None:
    """Accumulators are shifted left by more than the one bit of the doubling."""
    model = fully_connected_with(INPUTS[0], 122, (3, 3, 20), 0.0009765625)
    assert_dot4_matches(model, INPUTS[0], planned)


def test_dot2_is_chosen_if_int32_might_overflow(planned: list[GemmKernel]) -> None:
    """With K = 40000 the uint8 terms of the accumulators exceed int32, although their sum does not."""
    model = fully_connected_with(INPUTS[0], 122, (1, 40000, 3), 1000.0)
    assert_kernels_agree_on(model, [random_inputs(model, 0)])
    assert isinstance(planned[-1].micro_kernel, DotS16x2)


def test_filters_of_uint8_share_a_kernel_whatever_their_zero_point(planned: list[GemmKernel]) -> None:
    """int8 holds the weights minus 128: they need no correction."""
    for zero_point in (122, 128):
        assert_dot4_matches(fully_connected_with(INPUTS[1], zero_point, (3, 40, 20), 20.0), INPUTS[1], planned)

    assert planned[0].micro_kernel.has_weight_zero_point
    assert repr(planned[0]) == repr(planned[-1])


@pytest.mark.parametrize("filter", [PER_CHANNEL, 122])
def test_grouped_convolutions_use_dot4_only_without_weight_zero_point(
    filter: int | None, planned: list[GemmKernel]
) -> None:
    constants = filter_of(INPUTS[1], filter, (10, 3, 3, 6), ("random",))
    arguments = [input_operand(INPUTS[1], (1, 5, 5, 12), SCALE), *constants, SAME, 1, 1, 2, 0, False]
    result = input_operand(INPUTS[1], (1, 5, 5, 10), output_scale(54))
    model = one_operation(OperationType.GROUPED_CONV_2D, arguments, result)
    assert_kernels_agree_on(model, [random_inputs(model, 0)])
    assert isinstance(planned[-1].micro_kernel, Dot4 if filter is PER_CHANNEL else DotS16x2)


@pytest.mark.parametrize("zero_point", [128, 122])
@pytest.mark.parametrize("input", INPUTS)
def test_depthwise_convolutions_match_the_interpreter(input: QuantType, zero_point: int) -> None:
    kind, size = filter_kind(input, zero_point), (1, 5, 6, 20)
    values = quantized_values(kind, (20, 3, 3, 1), "random", np.random.default_rng(1))
    (_, data), bias = constants_of(kind, values)
    filter = input_operand(kind, (1, 3, 3, 20), WEIGHT_SCALE), data
    arguments = [input_operand(input, size, SCALE), filter, bias, SAME, 1, 1, 1, 0]
    result = output_operand(input, size, output_scale(9))
    model = one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, result)
    assert_kernels_agree_on(model, inputs_of(model, input, ("random", "high")))


@pytest.mark.parametrize("stride", [1, 2])
def test_padded_filters_match_the_interpreter(stride: int, planned: list[GemmKernel]) -> None:
    constants = filter_of(INPUTS[1], 0, (7, 3, 3, 5), ("high",))
    source, result = (
        input_operand(INPUTS[1], (1, 4, 4, 5), SCALE),
        input_operand(INPUTS[1], (1, 3 * stride + 3, 3 * stride + 3, 7), 100.0),
    )
    arguments = [source, *constants, 0, 0, 0, 0, stride, stride, 0, False]
    assert_dot4_matches(one_operation(OperationType.TRANSPOSE_CONV_2D, arguments, result), INPUTS[1], planned)


def test_weights_and_corrected_biases_are_restored_from_a_cache() -> None:
    """The weights are not read again."""
    assert_packed_weights_are_restored(conv_with_weights(INPUTS[1], 122, SIZES[2], WINDOWS[1]))
