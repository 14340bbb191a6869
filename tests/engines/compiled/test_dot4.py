"""Products of codes in quads of bytes, against the interpreter: zero points, signs and sums at their ends.

Where no instruction makes such products plain ones do, so that all around them is tested on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.code_products import (
    INPUTS,
    PATTERNS,
    PER_CHANNEL,
    SAME,
    SCALE,
    SIZES,
    WINDOWS,
    Codified,
    assert_weights_are_restored,
    codes,
    connected,
    constants_of,
    convolution,
    filter_kind,
    image,
    inputs_of,
)
from support.compiled import assert_kernels_agree_on, random_inputs
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels.dot_product import DotS16x2, DotU8S8x4
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.hal.types import Model, OperationType

pytestmark = pytest.mark.instruction_sets("dot4")

FILTERS = [PER_CHANNEL, 0, 122, 127, 128, 255]
"""Zero points, as of codes without sign. Files have such as 122, with weights from -122 to 133; 128 just fits."""


def filter_of(input: Codified, zero_point: int | None, shape: tuple[int, ...], patterns: Sequence[str]) -> list[Any]:
    """Return filter and bias as constants; channels have one pattern after the other."""
    kind, random = filter_kind(input, zero_point), np.random.default_rng(1)
    data = np.stack([codes(kind, shape[1:], patterns[n % len(patterns)], random) for n in range(shape[0])])
    data.reshape(-1)[:2] = kind.ends
    return constants_of(kind, data)


def output_scale(taps: int, patterns: Sequence[str] = ("random",)) -> float:
    """Return a scale at which most sums are not held at an end of the codes."""
    return 0.0078125 * (taps if "low" in patterns else math.sqrt(taps)) * 100


def convolved(
    input: Codified,
    filter: int | None,
    size: tuple[int, ...],
    window: tuple[int, ...],
    patterns: Sequence[str] = ("random",),
) -> Model:
    rows, columns, *moves = window
    constants = filter_of(input, filter, (size[4], rows, columns, size[3]), patterns)
    return convolution(input, constants, size[:4], tuple(moves), output_scale(rows * columns * size[3], patterns))


def rows_by(input: Codified, filter: int, size: tuple[int, int, int], scale: float) -> Model:
    batch, length, units = size
    return connected(input, filter_of(input, filter, (units, length), ("random",)), batch, scale)


def assert_quads_agree(model: Model, kind: Codified, planned: list[GemmKernel], patterns: Sequence[str] = ()) -> None:
    assert_kernels_agree_on(model, inputs_of(model, kind, patterns or ("random", "high")))
    assert isinstance(planned[-1].micro_kernel, DotU8S8x4)


@pytest.mark.parametrize(("input", "filter"), [(INPUTS[1], 122), (INPUTS[4], PER_CHANNEL)], ids=["uint8", "int8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_convolutions_are_the_interpreter_s(
    input: Codified, filter: int | None, size: tuple[int, ...], window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    assert_quads_agree(convolved(input, filter, size, window), input, planned)


@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("input", INPUTS)
def test_sums_at_their_ends_are_the_interpreter_s(
    input: Codified, filter: int | None, window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    """Zero points and codes at the ends of their ranges, and in between."""
    model = convolved(input, filter, (1, 5, 6, 20, 9), window, PATTERNS)
    assert_quads_agree(model, input, planned, PATTERNS)


@pytest.mark.parametrize("size", [(1, 16, 8), (1, 1024, 70), (5, 3, 17), (7, 65, 1), (19, 128, 40)])
@pytest.mark.parametrize("filter", [122, 128])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
def test_fully_connected_is_the_interpreter_s(
    input: Codified, filter: int, size: tuple[int, int, int], planned: list[GemmKernel]
) -> None:
    scale = output_scale(size[1])
    assert_quads_agree(rows_by(input, filter, size, scale), input, planned)


def test_multipliers_above_1_are_the_interpreter_s(planned: list[GemmKernel]) -> None:
    """Sums are shifted to the left by more than the one bit that they all are."""
    model = rows_by(INPUTS[0], 122, (3, 3, 20), 0.0009765625)
    assert_quads_agree(model, INPUTS[0], planned)


def test_sums_that_might_not_fit_are_made_of_pairs(planned: list[GemmKernel]) -> None:
    """Of 40000 codes without sign the parts of a sum are larger than the sum."""
    model = rows_by(INPUTS[0], 122, (1, 40000, 3), 1000.0)
    assert_kernels_agree_on(model, [random_inputs(model, 0)])
    assert isinstance(planned[-1].micro_kernel, DotS16x2)


@pytest.mark.parametrize("filter", [PER_CHANNEL, 122])
def test_parts_of_channels_have_quads_where_weights_fit(filter: int | None, planned: list[GemmKernel]) -> None:
    constants = filter_of(INPUTS[1], filter, (10, 3, 3, 6), ("random",))
    arguments = [image(INPUTS[1], (1, 5, 5, 12), SCALE), *constants, SAME, 1, 1, 2, 0, False]
    result = image(INPUTS[1], (1, 5, 5, 10), output_scale(54))
    model = one_operation(OperationType.GROUPED_CONV_2D, arguments, result)
    assert_kernels_agree_on(model, [random_inputs(model, 0)])
    assert isinstance(planned[-1].micro_kernel, DotU8S8x4 if filter is PER_CHANNEL else DotS16x2)


@pytest.mark.parametrize("stride", [1, 2])
def test_filters_that_are_filled_up_are_the_interpreter_s(stride: int, planned: list[GemmKernel]) -> None:
    constants = filter_of(INPUTS[1], 0, (7, 3, 3, 5), ("high",))
    source, result = (
        image(INPUTS[1], (1, 4, 4, 5), SCALE),
        image(INPUTS[1], (1, 3 * stride + 3, 3 * stride + 3, 7), 100.0),
    )
    arguments = [source, *constants, 0, 0, 0, 0, stride, stride, 0, False]
    assert_quads_agree(one_operation(OperationType.TRANSPOSE_CONV_2D, arguments, result), INPUTS[1], planned)


def test_what_depends_on_weights_is_restored() -> None:
    """Weights in quads and the biases that their sums correct come back from a cache: nothing looks at them."""
    assert_weights_are_restored(convolved(INPUTS[1], 122, SIZES[2], WINDOWS[1]))
