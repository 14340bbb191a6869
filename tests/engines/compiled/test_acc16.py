"""GEMMs with acc16 compared with the interpreter: zero points, signs and extreme accumulators.

Rules would often choose dot2; most tests make it look slow, so that acc16 is tested with every shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.compiled import assert_kernels_agree_on
from support.quantized_gemm import (
    INPUTS,
    PATTERNS,
    PER_CHANNEL,
    SAME,
    SCALE,
    SIZES,
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
    quantized_weights,
)
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels.gemm import GemmKernel, LhsLayout
from nnfmq.engines.compiled.kernels.gemm_plan import estimate_cycles
from nnfmq.engines.compiled.kernels.micro_kernels import DotS16x2, MaddU8S8Acc16
from nnfmq.engines.compiled.lowering import products
from nnfmq.hal.types import Model, OperationType
from nnfmq.operations.declaration import Array

pytestmark = pytest.mark.instruction_sets("acc16")


def small(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Like a trained filter: nearly all groups keep the bound."""
    return np.rint(random.normal(0, 10, shape)).clip(-100, 100).astype(np.int16)


def outliers(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """3 % of the weights at the limits of int8."""
    return np.where(random.random(shape) < 0.03, random.choice([-128, 127], shape), small(shape, random))


def all_zero(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Empty group lists."""
    return np.zeros(shape, np.int16)


def few_channels(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Three channels with weights: the lists of whole panels are empty."""
    weights, first = small(shape, random), shape[0] // 2
    weights[:first], weights[first + 3 :] = 0, 0
    return weights


def extreme(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Channels at either limit of int8, and at both: unsplit groups would overflow int16."""
    kinds = [np.full(shape[1:], 127), np.full(shape[1:], -128), random.choice([-128, 127], shape[1:])]
    return np.stack([kinds[n % 3] for n in range(shape[0])]).astype(np.int16)


Make = Callable[[tuple[int, ...], np.random.Generator], Array]
KINDS: list[Make] = [small, outliers, all_zero, few_channels, extreme]


@pytest.fixture
def always_acc16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cost model find every other micro-kernel slower."""

    def cycles(kernel: GemmKernel, weights: Array) -> float:
        return estimate_cycles(kernel, weights) if kernel.micro_kernel.is_group_sparse else math.inf

    monkeypatch.setattr(products, "estimate_cycles", cycles)


def output_scale(weights: Array) -> float:
    """Return an output scale with which results are large but few saturate."""
    magnitudes = np.abs(weights.astype(float)).reshape(len(weights), -1)
    mean = max(1.0, float(np.sqrt((magnitudes**2).sum(axis=1)).mean()))
    return mean * 74 * SCALE * 0.0078125 / 40


def filter_of(input: QuantType, zero_point: int | None, weights: Array) -> list[object]:
    kind = filter_kind(input, zero_point)
    return constants_of(kind, quantized_weights(kind, weights))


def conv_with_weights(
    input: QuantType, zero_point: int | None, size: tuple[int, ...], window: tuple[int, ...], make: Make
) -> Model:
    (rows, columns, stride, dilation, padding), (*extents, filters) = window, size
    weights = make((filters, rows, columns, extents[3]), np.random.default_rng(1))
    constants = filter_of(input, zero_point, weights)
    return convolution(input, constants, tuple(extents), (stride, dilation, padding), output_scale(weights))


def assert_acc16_matches(
    model: Model, kind: QuantType, planned: list[GemmKernel], patterns: Sequence[str] = ("random", "high")
) -> GemmKernel:
    """Compare with the interpreter on inputs of these patterns; return the kernel, which must be acc16."""
    assert_kernels_agree_on(model, inputs_of(model, kind, patterns))
    assert isinstance(planned[-1].micro_kernel, MaddU8S8Acc16)
    return planned[-1]


@pytest.mark.parametrize(("input", "filter"), [(INPUTS[1], 128), (INPUTS[4], PER_CHANNEL)], ids=["uint8", "int8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.usefixtures("always_acc16")
def test_convolutions_match_the_interpreter(
    input: QuantType, filter: int | None, size: tuple[int, ...], window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    assert_acc16_matches(conv_with_weights(input, filter, size, window, small), input, planned)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("input", INPUTS, ids=str)
@pytest.mark.parametrize(("window", "depth"), [(WINDOWS[0], 24), (WINDOWS[0], 20), (WINDOWS[1], 13)])
@pytest.mark.usefixtures("always_acc16")
def test_extreme_accumulators_match_the_interpreter(
    input: QuantType, window: tuple[int, ...], depth: int, make: Make, planned: list[GemmKernel]
) -> None:
    """Zero points and values at both ends of their ranges, and in between; padding is the zero point."""
    model = conv_with_weights(input, 128, (1, 5, 6, depth, 70), window, make)
    kernel = assert_acc16_matches(model, input, planned, PATTERNS)
    pixel_layout = LhsLayout.DIRECT if not input.signed and depth % 8 == 0 else LhsLayout.PACKED
    assert kernel.lhs_layout == (LhsLayout.ROW_BUFFER if window == WINDOWS[1] else pixel_layout)


@pytest.mark.parametrize("filter", [PER_CHANNEL, 0, 122, 255])
@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.usefixtures("always_acc16")
def test_weights_outside_int8_match_the_interpreter(
    filter: int | None, window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    """With a zero point at one end of the range, weights reach 255 in magnitude."""
    low, high = filter_kind(INPUTS[1], filter).weights

    def ends(shape: tuple[int, ...], random: np.random.Generator) -> Array:
        every = random.choice([low, 0, high], shape).astype(np.int16)
        return np.where(random.random(shape) < 0.2, every, small(shape, random)).clip(low, high)

    assert_acc16_matches(
        conv_with_weights(INPUTS[1], filter, (1, 5, 6, 20, 19), window, ends), INPUTS[1], planned, PATTERNS
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.usefixtures("always_acc16")
def test_int16_sums_at_the_bound_are_exact(sign: int, planned: list[GemmKernel]) -> None:
    """Channels with two weights in a four whose sum is 126 to 131; the output scale shows each unit of the sum.

    An int16 sum that overflowed would saturate or wrap, and so give another result.
    """
    pairs = [p for four in ((0, 1, 4, 5), (2, 3, 6, 7)) for p in itertools.combinations(four, 2)]
    weights = np.zeros((len(pairs) * 6, 64), np.int16)
    for channel, ((first, second), more) in enumerate(itertools.product(pairs, range(-1, 5))):
        weights[channel, [8 * (channel % 8) + first, 8 * (channel % 8) + second]] = 120 * sign, (7 + more) * sign
    inputs = np.array([[255] * 64, [0] * 64, [254] * 64], np.uint8)
    constants = filter_of(INPUTS[0], 128, weights)
    biases = (-32640 * sign + 64 * (np.arange(len(weights)) % 3)).astype("<i4")
    constants[1] = (constants[1][0], biases.tobytes())
    model = fully_connected(INPUTS[0], constants, len(inputs), 4 * SCALE * 0.0078125)
    assert_kernels_agree_on(model, [[inputs], [inputs[::-1].copy()]])
    assert isinstance(planned[-1].micro_kernel, MaddU8S8Acc16)


@pytest.mark.parametrize("size", [(1, 16, 8), (1, 1024, 70), (5, 3, 17), (7, 65, 1), (19, 128, 40)])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
@pytest.mark.parametrize("make", [small, outliers], ids=["small", "outliers"])
@pytest.mark.usefixtures("always_acc16")
def test_fully_connected_matches_the_interpreter(
    input: QuantType, size: tuple[int, int, int], make: Make, planned: list[GemmKernel]
) -> None:
    batch, length, units = size
    weights = make((units, length), np.random.default_rng(2))
    model = fully_connected(input, filter_of(input, 128, weights), batch, output_scale(weights))
    assert_acc16_matches(model, input, planned, PATTERNS)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.usefixtures("always_acc16")
def test_panels_of_any_width_match_the_interpreter(
    width: int, batch: int, planned: list[GemmKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ACC16_WIDTHS", "_ACC16_WIDTHS_GEMV"):
        monkeypatch.setattr(products, name, (width,))
    weights = outliers((300, 40), np.random.default_rng(2))
    model = fully_connected(INPUTS[1], filter_of(INPUTS[1], 128, weights), batch, output_scale(weights))
    assert assert_acc16_matches(model, INPUTS[1], planned, PATTERNS).tile[1] == width


@pytest.mark.parametrize("depth", [8, 6])
@pytest.mark.parametrize("window", [(1, 1), (3, 2)])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
@pytest.mark.usefixtures("always_acc16")
def test_grouped_convolutions_match_the_interpreter(
    input: QuantType, window: tuple[int, int], depth: int, planned: list[GemmKernel]
) -> None:
    """The last K group of a group of channels contains inputs of the next one, which must not count."""
    weights = outliers((3 * 37, *window, depth), np.random.default_rng(3))
    weights[37:74] = 0
    arguments = [
        input_operand(input, (2, 5, 4, 3 * depth), SCALE),
        *filter_of(input, 128, weights),
        SAME,
        1,
        1,
        3,
        0,
        False,
    ]
    result = output_operand(input, (2, 5, 4, len(weights)), output_scale(weights))
    model = one_operation(OperationType.GROUPED_CONV_2D, arguments, result)
    assert assert_acc16_matches(model, input, planned, PATTERNS).is_grouped


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
@pytest.mark.usefixtures("always_acc16")
def test_transposed_convolutions_match_the_interpreter(
    input: QuantType, stride: int, planned: list[GemmKernel]
) -> None:
    weights, side = outliers((7, 3, 3, 20), np.random.default_rng(4)), 3 * stride + 3
    arguments = [input_operand(input, (1, 4, 4, 20), SCALE), *filter_of(input, 128, weights)]
    result = output_operand(input, (1, side, side, 7), output_scale(weights))
    model = one_operation(OperationType.TRANSPOSE_CONV_2D, [*arguments, 0, 0, 0, 0, stride, stride, 0, False], result)
    assert_acc16_matches(model, input, planned, PATTERNS)


@pytest.mark.parametrize("window", WINDOWS[:2])
def test_acc16_is_chosen_for_short_lists_and_dot2_for_long_ones(
    window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    def uniform(shape: tuple[int, ...], random: np.random.Generator) -> Array:
        return random.integers(-127, 128, shape, np.int16)

    for make, micro_kernel in (
        (small, MaddU8S8Acc16),
        (uniform, DotS16x2),
        (all_zero, MaddU8S8Acc16),
        (extreme, DotS16x2),
    ):
        model = conv_with_weights(INPUTS[1], 128, (1, 8, 8, 64, 128), window, make)
        assert_kernels_agree_on(model, inputs_of(model, INPUTS[1], ["random"]))
        assert isinstance(planned[-1].micro_kernel, micro_kernel)


def test_dot2_is_chosen_if_int32_might_overflow(planned: list[GemmKernel]) -> None:
    """With K = 40000 the uint8 terms of the accumulators exceed int32, although their sum does not."""
    weights = small((3, 40000), np.random.default_rng(5))
    model = fully_connected(INPUTS[0], filter_of(INPUTS[0], 128, weights), 1, 50 * output_scale(weights))
    assert_kernels_agree_on(model, inputs_of(model, INPUTS[0], ["random"]))
    assert isinstance(planned[-1].micro_kernel, DotS16x2)


def test_weights_and_corrected_biases_are_restored_from_a_cache(planned: list[GemmKernel]) -> None:
    """The weights are not read again."""
    assert_packed_weights_are_restored(conv_with_weights(INPUTS[1], 128, (1, 9, 11, 64, 100), WINDOWS[1], small))
    assert [type(kernel.micro_kernel) for kernel in planned] == [MaddU8S8Acc16]
