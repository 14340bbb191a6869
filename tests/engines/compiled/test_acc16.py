"""Products of codes in listed octets of bytes, against the interpreter: zero points, signs and sums at their ends.

The least product would often be one of pairs; here the rules never find these faster, so that octets have every shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

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
    connected,
    constants_of,
    convolution,
    filter_kind,
    image,
    inputs_of,
    result_of,
    weight_codes,
)
from support.compiled import assert_kernels_agree_on
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels.dot_product import DotS16x2, MaddU8S8Acc16
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.gemm_plan import estimate_cycles
from nnfmq.engines.compiled.lowering import conv_matmul_rules
from nnfmq.hal.types import Model, OperationType
from nnfmq.operations.signature import Array

pytestmark = pytest.mark.instruction_sets("acc16")


def small(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """As a trained filter has: nearly all fit at once."""
    return np.rint(random.normal(0, 10, shape)).clip(-100, 100).astype(np.int16)


def outliers(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """With some at the ends of a byte."""
    return np.where(random.random(shape) < 0.03, random.choice([-128, 127], shape), small(shape, random))


def nothing(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """A list with nothing in it."""
    return np.zeros(shape, np.int16)


def lone(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Some channels alone: the lists of whole panels are empty, beside others."""
    weights, first = small(shape, random), shape[0] // 2
    weights[:first], weights[first + 3 :] = 0, 0
    return weights


def largest(shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """At the ends of a byte: channels of either, and of both. Without parts every sum would leave 16 bits."""
    kinds = [np.full(shape[1:], 127), np.full(shape[1:], -128), random.choice([-128, 127], shape[1:])]
    return np.stack([kinds[n % 3] for n in range(shape[0])]).astype(np.int16)


Make = Callable[[tuple[int, ...], np.random.Generator], Array]
KINDS: list[Make] = [small, outliers, nothing, lone, largest]


@pytest.fixture
def octets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs take longer, whatever is computed."""

    def time(product: GemmKernel, weights: Array) -> float:
        return estimate_cycles(product, weights) if product.micro_kernel.is_group_sparse else math.inf

    monkeypatch.setattr(conv_matmul_rules, "estimate_cycles", time)


def output_scale(weights: Array) -> float:
    """Return a scale at which sums are seen, but as few as may be are held at an end of the codes."""
    of_a_channel = np.abs(weights.astype(float)).reshape(len(weights), -1)
    mean = max(1.0, float(np.sqrt((of_a_channel**2).sum(axis=1)).mean()))
    return mean * 74 * SCALE * 0.0078125 / 40


def filter_of(input: Codified, zero_point: int | None, weights: Array) -> list[object]:
    kind = filter_kind(input, zero_point)
    return constants_of(kind, weight_codes(kind, weights))


def convolved(
    input: Codified, zero_point: int | None, size: tuple[int, ...], window: tuple[int, ...], make: Make
) -> Model:
    (rows, columns, stride, dilation, padding), (*extents, filters) = window, size
    weights = make((filters, rows, columns, extents[3]), np.random.default_rng(1))
    constants = filter_of(input, zero_point, weights)
    return convolution(input, constants, tuple(extents), (stride, dilation, padding), output_scale(weights))


def assert_octets_agree(
    model: Model, kind: Codified, planned: list[GemmKernel], patterns: Sequence[str] = ("random", "high")
) -> GemmKernel:
    """Compare with the interpreter on these inputs; return the product, which is one of octets."""
    assert_kernels_agree_on(model, inputs_of(model, kind, patterns))
    assert isinstance(planned[-1].micro_kernel, MaddU8S8Acc16)
    return planned[-1]


@pytest.mark.parametrize(("input", "filter"), [(INPUTS[1], 128), (INPUTS[4], PER_CHANNEL)], ids=["uint8", "int8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.usefixtures("octets_alone")
def test_convolutions_are_the_interpreter_s(
    input: Codified, filter: int | None, size: tuple[int, ...], window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    assert_octets_agree(convolved(input, filter, size, window, small), input, planned)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("input", INPUTS, ids=str)
@pytest.mark.parametrize(("window", "depth"), [(WINDOWS[0], 24), (WINDOWS[0], 20), (WINDOWS[1], 13)])
@pytest.mark.usefixtures("octets_alone")
def test_sums_at_their_ends_are_the_interpreter_s(
    input: Codified, window: tuple[int, ...], depth: int, make: Make, planned: list[GemmKernel]
) -> None:
    """Zero points and codes at the ends of their ranges and in between; padding is the zero point."""
    model = convolved(input, 128, (1, 5, 6, depth, 70), window, make)
    product = assert_octets_agree(model, input, planned, PATTERNS)
    in_place = not input.signed and depth % 8 == 0
    assert product.lhs_layout == ("row_buffer" if window == WINDOWS[1] else "direct" if in_place else "packed")


@pytest.mark.parametrize("filter", [PER_CHANNEL, 0, 122, 255])
@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.usefixtures("octets_alone")
def test_weights_beyond_a_byte_are_the_interpreter_s(
    filter: int | None, window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    """Of any zero point: those at one end of the codes are as far as 255 from it."""
    low, high = filter_kind(INPUTS[1], filter).weights

    def ends(shape: tuple[int, ...], random: np.random.Generator) -> Array:
        every = random.choice([low, 0, high], shape).astype(np.int16)
        return np.where(random.random(shape) < 0.2, every, small(shape, random)).clip(low, high)

    assert_octets_agree(convolved(INPUTS[1], filter, (1, 5, 6, 20, 19), window, ends), INPUTS[1], planned, PATTERNS)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.usefixtures("octets_alone")
def test_every_sum_of_16_bits_is_exact(sign: int, planned: list[GemmKernel]) -> None:
    """Channels with two weights in a four, together between 126 and 131: one unit of a sum is no less than a code.

    A sum of 16 bits that does not fit would be held at its end, or wrap.
    """
    pairs = [p for four in ((0, 1, 4, 5), (2, 3, 6, 7)) for p in itertools.combinations(four, 2)]
    weights = np.zeros((len(pairs) * 6, 64), np.int16)
    for channel, ((first, second), more) in enumerate(itertools.product(pairs, range(-1, 5))):
        weights[channel, [8 * (channel % 8) + first, 8 * (channel % 8) + second]] = 120 * sign, (7 + more) * sign
    cells = np.array([[255] * 64, [0] * 64, [254] * 64], np.uint8)
    constants = filter_of(INPUTS[0], 128, weights)
    biases = (-32640 * sign + 64 * (np.arange(len(weights)) % 3)).astype("<i4")
    constants[1] = (constants[1][0], biases.tobytes())
    model = connected(INPUTS[0], constants, len(cells), 4 * SCALE * 0.0078125)
    assert_kernels_agree_on(model, [[cells], [cells[::-1].copy()]])
    assert isinstance(planned[-1].micro_kernel, MaddU8S8Acc16)


@pytest.mark.parametrize("size", [(1, 16, 8), (1, 1024, 70), (5, 3, 17), (7, 65, 1), (19, 128, 40)])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
@pytest.mark.parametrize("make", [small, outliers], ids=["small", "outliers"])
@pytest.mark.usefixtures("octets_alone")
def test_fully_connected_is_the_interpreter_s(
    input: Codified, size: tuple[int, int, int], make: Make, planned: list[GemmKernel]
) -> None:
    batch, length, units = size
    weights = make((units, length), np.random.default_rng(2))
    model = connected(input, filter_of(input, 128, weights), batch, output_scale(weights))
    assert_octets_agree(model, input, planned, PATTERNS)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.usefixtures("octets_alone")
def test_panels_of_any_width_are_the_interpreter_s(
    width: int, batch: int, planned: list[GemmKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ACC16_WIDTHS", "_ACC16_WIDTHS_GEMV"):
        monkeypatch.setattr(conv_matmul_rules, name, (width,))
    weights = outliers((300, 40), np.random.default_rng(2))
    model = connected(INPUTS[1], filter_of(INPUTS[1], 128, weights), batch, output_scale(weights))
    assert assert_octets_agree(model, INPUTS[1], planned, PATTERNS).tile[1] == width


@pytest.mark.parametrize("depth", [8, 6])
@pytest.mark.parametrize("window", [(1, 1), (3, 2)])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
@pytest.mark.usefixtures("octets_alone")
def test_parts_of_channels_are_the_interpreter_s(
    input: Codified, window: tuple[int, int], depth: int, planned: list[GemmKernel]
) -> None:
    """Groups at a part's end have cells of the next part, which is not to be seen."""
    weights = outliers((3 * 37, *window, depth), np.random.default_rng(3))
    weights[37:74] = 0
    arguments = [image(input, (2, 5, 4, 3 * depth), SCALE), *filter_of(input, 128, weights), SAME, 1, 1, 3, 0, False]
    result = result_of(input, (2, 5, 4, len(weights)), output_scale(weights))
    model = one_operation(OperationType.GROUPED_CONV_2D, arguments, result)
    assert assert_octets_agree(model, input, planned, PATTERNS).is_grouped


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("input", [INPUTS[1], INPUTS[4]], ids=["uint8", "int8"])
@pytest.mark.usefixtures("octets_alone")
def test_transposed_convolutions_are_the_interpreter_s(input: Codified, stride: int, planned: list[GemmKernel]) -> None:
    weights, side = outliers((7, 3, 3, 20), np.random.default_rng(4)), 3 * stride + 3
    arguments = [image(input, (1, 4, 4, 20), SCALE), *filter_of(input, 128, weights)]
    result = result_of(input, (1, side, side, 7), output_scale(weights))
    model = one_operation(OperationType.TRANSPOSE_CONV_2D, [*arguments, 0, 0, 0, 0, stride, stride, 0, False], result)
    assert_octets_agree(model, input, planned, PATTERNS)


@pytest.mark.parametrize("window", WINDOWS[:2])
def test_products_of_short_lists_are_octets_and_of_long_ones_pairs(
    window: tuple[int, ...], planned: list[GemmKernel]
) -> None:
    def uniform(shape: tuple[int, ...], random: np.random.Generator) -> Array:
        return random.integers(-127, 128, shape, np.int16)

    for make, arithmetic in (
        (small, MaddU8S8Acc16),
        (uniform, DotS16x2),
        (nothing, MaddU8S8Acc16),
        (largest, DotS16x2),
    ):
        model = convolved(INPUTS[1], 128, (1, 8, 8, 64, 128), window, make)
        assert_kernels_agree_on(model, inputs_of(model, INPUTS[1], ["random"]))
        assert isinstance(planned[-1].micro_kernel, arithmetic)


def test_sums_that_might_not_fit_are_made_of_pairs(planned: list[GemmKernel]) -> None:
    """Of 40000 codes without sign the parts of a sum are larger than the sum."""
    weights = small((3, 40000), np.random.default_rng(5))
    model = connected(INPUTS[0], filter_of(INPUTS[0], 128, weights), 1, 50 * output_scale(weights))
    assert_kernels_agree_on(model, inputs_of(model, INPUTS[0], ["random"]))
    assert isinstance(planned[-1].micro_kernel, DotS16x2)


def test_what_depends_on_weights_is_restored(planned: list[GemmKernel]) -> None:
    """Lists and the biases that sums of weights correct."""
    assert_weights_are_restored(convolved(INPUTS[1], 128, (1, 9, 11, 64, 100), WINDOWS[1], small))
    assert [type(product.micro_kernel) for product in planned] == [MaddU8S8Acc16]
