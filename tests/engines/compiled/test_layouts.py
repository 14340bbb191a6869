"""Operations between NCHW images: which are computed in NHWC, with the interpreter's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.chains import Step, kernels_of, launches_of, model_of, tensor, weights
from support.compiled import assert_kernels_agree
from support.small_models import I32, vector

from nnfmq.hal.types import Operand, OperationType

pytestmark = pytest.mark.instruction_sets

KINDS = ["float32", "uint8", "int8"]
CHANNELS, HEIGHT, WIDTH = 8, 6, 5


def image(kind: str, channels: int = CHANNELS, height: int = HEIGHT, width: int = WIDTH) -> Operand:
    return tensor(kind, 2, channels, height, width)


def pointwise(kind: str, source: int, result: Operand, channels: int | None = None) -> Step:
    """Return a convolution of an NCHW image, 1 x 1."""
    count = result.dimensions[1]
    arguments = [[source], *weights(kind, (count, 1, 1, channels or count), count), 2, 1, 1, 0, True]
    return OperationType.CONV_2D, arguments, result


def constant(kind: str, *shape: int) -> tuple[Operand, bytes]:
    operand = tensor(kind, *shape)
    random = np.random.default_rng(3)
    if kind == "float32":
        return operand, random.normal(size=shape).astype("<f4").tobytes()
    return operand, random.integers(0, 256, shape).astype("u1").tobytes()


def between(kind: str, code: OperationType, arguments: list[Any], result: Operand) -> list[Step]:
    """Return a convolution, an operation with its result as an argument ([0]), and a convolution of that."""
    return [
        pointwise(kind, -1, image(kind)),
        (code, arguments, result),
        pointwise(kind, 1, image(kind, *result.dimensions[1:])),
    ]


def conversions(kind: str, steps: list[Step], outputs: list[int] | None = None, source: Operand | None = None) -> int:
    """Compare both engines, and return the number of kernels that only move elements between layouts."""
    model = model_of(source or image(kind), steps, outputs or [])
    assert_kernels_agree(model, tolerance=1e-4)
    moving = ("TransposeKernel", "InterleaveKernel")
    return sum(name in moving for name in kernels_of(model))


AXES = np.array([2, 3], "<i4").tobytes()
PADDINGS = np.array([[0, 0], [1, 0], [0, 2], [3, 1]], "<i4").tobytes()
CASES: dict[str, tuple[OperationType, list[Any], tuple[int, int, int]]] = {
    "arithmetic": (OperationType.ADD, [[0], [0], 0], (CHANNELS, HEIGHT, WIDTH)),
    "clamp": (OperationType.RELU6, [[0]], (CHANNELS, HEIGHT, WIDTH)),
    "concatenation": (OperationType.CONCATENATION, [[0], [0], 1], (2 * CHANNELS, HEIGHT, WIDTH)),
    "concatenation of columns": (OperationType.CONCATENATION, [[0], [0], -1], (CHANNELS, HEIGHT, 2 * WIDTH)),
    "gather": (OperationType.GATHER, [[0], 2, vector([3, 0, 0])], (CHANNELS, 3, WIDTH)),
    "mirrored padding": (
        OperationType.MIRROR_PAD,
        [[0], (Operand(I32, (4, 2)), PADDINGS), 1],
        (CHANNELS + 1, HEIGHT + 2, WIDTH + 4),
    ),
    "padding": (OperationType.PAD, [[0], (Operand(I32, (4, 2)), PADDINGS)], (CHANNELS + 1, HEIGHT + 2, WIDTH + 4)),
    "slice": (OperationType.SLICE, [[0], vector([0, 1, 2, 3]), vector([2, 5, 3, 2])], (5, 3, 2)),
    "tile": (OperationType.TILE, [[0], vector([1, 1, 2, 3])], (CHANNELS, 2 * HEIGHT, 3 * WIDTH)),
    "mean": (OperationType.MEAN, [[0], (Operand(I32, (2,)), AXES), 1], (CHANNELS, 1, 1)),
    "maximum of columns": (OperationType.REDUCE_MAX, [[0], vector([-1]), True], (CHANNELS, HEIGHT, 1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_between_convolutions_is_computed_in_nhwc(kind: str, case: str) -> None:
    code, arguments, result = CASES[case]

    assert (
        conversions(kind, between(kind, code, arguments, image(kind, *result))) <= 2
    )  # of the model's input and output


@pytest.mark.parametrize("shape", [(CHANNELS, 1, 1), (1, CHANNELS, 1, 1), (1,), (1, 1, HEIGHT, WIDTH)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_operand_with_the_same_order_in_both_layouts_is_read_as_it_is(kind: str, shape: tuple[int, ...]) -> None:
    steps = between(kind, OperationType.ADD, [constant(kind, *shape), [0], 0], image(kind))

    assert conversions(kind, steps) == 2


def test_an_operand_in_nchw_alone_lets_the_operation_stay_in_nchw() -> None:
    other = constant("float32", CHANNELS, HEIGHT, WIDTH)
    steps = between("float32", OperationType.MUL, [[0], other, 0], image("float32"))

    assert conversions("float32", steps) == 4


@pytest.mark.parametrize("keeps", [0, 1])
def test_a_mean_of_all_pixels_is_read_in_nhwc(keeps: int) -> None:
    result = tensor("float32", 2, CHANNELS, *[1, 1][: 2 * keeps])
    mean: Step = (OperationType.MEAN, [[0], (Operand(I32, (2,)), AXES), keeps], result)

    assert conversions("float32", [pointwise("float32", -1, image("float32")), mean]) == 1


def test_a_reduction_whose_result_is_another_array_in_nhwc_stays_in_nchw() -> None:
    rows: Step = (OperationType.REDUCE_MAX, [[0], vector([3]), False], tensor("float32", 2, CHANNELS, HEIGHT))

    assert conversions("float32", [pointwise("float32", -1, image("float32")), rows]) == 2


def test_gathers_with_more_dimensions_and_softmax_of_the_last_axis_by_default_stay_in_nchw() -> None:
    table = np.array([[0, 1]], "<i4").tobytes()
    gather: Step = (
        OperationType.GATHER,
        [[0], 3, (Operand(I32, (1, 2)), table)],
        tensor("float32", 2, CHANNELS, HEIGHT, 1, 2),
    )
    softmax: Step = (OperationType.SOFTMAX, [[0], 1.0], image("float32"))

    for step in (gather, softmax):
        assert conversions("float32", [pointwise("float32", -1, image("float32")), step]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_also_an_output_is_converted_for_it(kind: str) -> None:
    steps = between(kind, OperationType.RELU, [[0]], image(kind))
    third: Step = (OperationType.ADD, [[1], [2], 0], image(kind))

    assert conversions(kind, [*steps, third], outputs=[0, 1]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_split_are_computed_in_nhwc(kind: str) -> None:
    half = image(kind, CHANNELS // 2)
    steps: list[Step] = [
        pointwise(kind, -1, image(kind)),
        (OperationType.SPLIT, [[0], 1, 2], [half, half]),
        (OperationType.ADD, [[1], [2], 0], half),
        pointwise(kind, 3, half),
    ]

    assert conversions(kind, steps) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_pad_in_nhwc_becomes_the_padding_of_a_convolution(kind: str) -> None:
    paddings = np.array([[0, 0], [0, 0], [1, 1], [0, 2]], "<i4").tobytes()
    wide = tensor(kind, 2, CHANNELS, HEIGHT + 2, WIDTH + 2)
    filter = weights(kind, (CHANNELS, 3, 3, CHANNELS), CHANNELS)
    steps: list[Step] = [
        pointwise(kind, -1, image(kind)),
        (OperationType.PAD, [[0], (Operand(I32, (4, 2)), paddings)], wide),
        (OperationType.CONV_2D, [[1], *filter, 2, 1, 1, 0, True], image(kind)),
    ]

    assert kernels_of(model_of(image(kind), steps)).count("GemmKernel") == 2
    assert "StridedCopy" not in kernels_of(model_of(image(kind), steps))
    assert conversions(kind, steps) == 2


def test_an_operand_of_more_dimensions_lets_the_operation_stay_in_nchw() -> None:
    other, result = constant("float32", 2, 1, 1, 1, 1), tensor("float32", 2, 2, CHANNELS, HEIGHT, WIDTH)
    steps: list[Step] = [
        pointwise("float32", -1, image("float32")),
        (OperationType.MAXIMUM, [[0], other], result),
    ]

    assert conversions("float32", steps) == 2


@pytest.mark.parametrize("axis", [1, -1])
def test_softmax_along_an_axis_is_computed_in_nhwc(axis: int) -> None:
    steps = between("float32", OperationType.SOFTMAX, [[0], 1.0, axis], image("float32"))

    assert conversions("float32", steps) == 2


@pytest.mark.parametrize("permutation", [(0, 2, 3, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_transpose_reads_nhwc(kind: str, permutation: tuple[int, ...]) -> None:
    shape = image(kind).dimensions
    transpose: Step = (
        OperationType.TRANSPOSE,
        [[0], vector(permutation)],
        tensor(kind, *(shape[axis] for axis in permutation)),
    )
    model = model_of(image(kind), [pointwise(kind, -1, image(kind)), transpose])

    assert_kernels_agree(model, tolerance=1e-4)
    assert len(launches_of(model)) == 3  # the input's conversion, the convolution, the transpose


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_one_pixel_or_channel_are_the_same_in_both_layouts(kind: str) -> None:
    pixel = image(kind, CHANNELS, 1, 1)
    squeezed = tensor(kind, 2, CHANNELS)
    steps: list[Step] = [
        pointwise(kind, -1, image(kind)),
        (OperationType.MEAN, [[0], (Operand(I32, (2,)), AXES), 1], pixel),
        pointwise(kind, 1, pixel),
        (OperationType.RESHAPE, [[2], vector([2, CHANNELS])], squeezed),
        (OperationType.ADD, [[3], [3], 0], squeezed),
    ]
    model = model_of(image(kind), steps, outputs=[2])

    assert_kernels_agree(model, tolerance=1e-4)
    assert len(launches_of(model)) == 5  # the input's conversion, and one for each operation but RESHAPE


CUBE = tensor("float32", 2, 8, 8, 8)
"""An image whose shapes in both layouts are equal."""


def test_a_loop_in_nchw_is_not_fused_with_one_in_nhwc() -> None:
    other = constant("float32", 8, 8, 8)
    steps: list[Step] = [
        pointwise("float32", -1, CUBE),
        (OperationType.MAX_POOL_2D, [[0], 1, 1, 1, 2, 2, 0, True], CUBE),
        (OperationType.SUB, [[0], [1], 0], CUBE),
        (OperationType.MUL, [[2], other, 0], CUBE),
    ]

    assert conversions("float32", steps, source=CUBE) == 2
    assert sum(name.endswith("ElementwiseKernel") for name in kernels_of(model_of(CUBE, steps))) == 2


def test_a_loop_in_nchw_is_no_epilogue_of_a_convolution_in_nhwc() -> None:
    big = tensor("float32", 2, 32, 32, 32)
    product: Step = (OperationType.MUL, [[0], constant("float32", 2, 32, 32, 32), 0], big)

    assert conversions("float32", [pointwise("float32", -1, big), product], source=big) == 2


def test_a_cast_that_computes_nothing_stays_a_view() -> None:
    steps = between("float32", OperationType.CAST, [[0]], image("float32"))

    assert conversions("float32", steps) == 4


def test_a_pad_in_another_layout_than_the_convolution_is_computed() -> None:
    """The second convolution reads the first one's channels as rows."""
    paddings = np.array([[0, 0], [0, 0], [1, 1], [0, 0]], "<i4").tobytes()
    filter = weights("float32", (CHANNELS, 3, 3, 8), CHANNELS)
    steps: list[Step] = [
        pointwise("float32", -1, image("float32", CHANNELS, 8, 8)),
        (OperationType.PAD, [[0], (Operand(I32, (4, 2)), paddings)], tensor("float32", 2, CHANNELS, 10, 8)),
        (OperationType.CONV_2D, [[1], *filter, 2, 1, 1, 0, False], tensor("float32", 2, CHANNELS - 2, 8, CHANNELS)),
    ]

    assert conversions("float32", steps, source=image("float32", CHANNELS, 8, 8)) == 2
    assert "StridedCopy" in kernels_of(model_of(image("float32", CHANNELS, 8, 8), steps))
