"""Grouped and transposed convolutions, matrix products and L2 pools against loops over their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import executed

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import ChannelQuant, Operand, OperandType, OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import ints

Array = npt.NDArray[Any]

F32, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
PC, INT8 = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
CODES = {OperandType.TENSOR_QUANT8_ASYMM: (np.uint8, 130), INT8: (np.int8, 2)}
SAME, VALID = 1, 2


def i32(*values: int) -> list[tuple[Operand, Array]]:
    return [(Operand(OperandType.INT32), np.array(value, np.int32)) for value in values]


def layout(nchw: bool = False) -> tuple[Operand, Array]:
    return Operand(OperandType.BOOL), np.array(nchw, np.uint8)


def floats(array: Array) -> tuple[Operand, Array]:
    return Operand(F32), array.astype(np.float32)


def grouped(image: Array, filter: Array, groups: int, stride: tuple[int, int], padding: tuple[int, ...]) -> Array:
    """Sum products in the dtype of the arguments; stride is (x, y), padding (left, right, top, bottom)."""
    (batch, height, width, _), (outputs, tall, wide, depth) = image.shape, filter.shape
    left, right, top, bottom = padding
    rows = (height + top + bottom - tall) // stride[1] + 1
    columns = (width + left + right - wide) // stride[0] + 1
    out = np.zeros((batch, rows, columns, outputs), image.dtype)
    for b, y, x, channel in np.ndindex(*out.shape):
        first = channel // (outputs // groups) * depth
        for i, j, d in itertools.product(range(tall), range(wide), range(depth)):
            row, column = y * stride[1] + i - top, x * stride[0] + j - left
            if 0 <= row < height and 0 <= column < width:
                out[b, y, x, channel] += image[b, row, column, first + d] * filter[channel, i, j, d]
    return out


def transposed(image: Array, filter: Array, stride: tuple[int, int], padding: tuple[int, ...]) -> Array:
    (batch, height, width, _), (outputs, tall, wide, _) = image.shape, filter.shape
    left, right, top, bottom = padding
    extents = ((height - 1) * stride[1] + tall - top - bottom, (width - 1) * stride[0] + wide - left - right)
    out = np.zeros((batch, *extents, outputs), image.dtype)
    for b, y, x, d in np.ndindex(*image.shape):
        for k, i, j in itertools.product(range(outputs), range(tall), range(wide)):
            row, column = y * stride[1] + i - top, x * stride[0] + j - left
            if 0 <= row < extents[0] and 0 <= column < extents[1]:
                out[b, row, column, k] += image[b, y, x, d] * filter[k, i, j, d]
    return out


GROUPED = [  # groups, stride (x, y), padding (left, right, top, bottom)
    (1, (1, 1), (0, 0, 0, 0)),
    (2, (2, 1), (1, 0, 2, 1)),
    (4, (1, 3), (1, 1, 1, 1)),
]
TRANSPOSED = [
    ((1, 1), (0, 0, 0, 0)),
    ((2, 3), (1, 0, 2, 1)),
    ((3, 1), (0, -2, 1, 0)),  # a negative tail: columns that no input cell reaches
    ((5, 4), (0, 0, 0, 0)),  # strides beyond the filter: output cells that no tap reaches
    ((1, 1), (1, 1, 2, 2)),
]
IMAGE_SHAPE, GROUPED_FILTER, TRANSPOSED_FILTER = (2, 5, 6, 8), 8, (3, 3, 2, 8)


def case(code: OperationType, window: Any) -> tuple[tuple[int, ...], Any, list[tuple[Operand, Array]]]:
    """Return the filter's shape, the definition and the arguments after the bias."""
    if code == OperationType.GROUPED_CONV_2D:
        groups, stride, padding = window
        shape = (GROUPED_FILTER, 3, 2, IMAGE_SHAPE[3] // groups)
        arguments = [*i32(*padding, *stride, groups, 0), layout()]
        return shape, lambda image, filter: grouped(image, filter, groups, stride, padding), arguments
    stride, padding = window
    arguments = [*i32(*padding, *stride, 0), layout()]
    return TRANSPOSED_FILTER, lambda image, filter: transposed(image, filter, stride, padding), arguments


CASES: list[tuple[OperationType, Any]] = [(OperationType.GROUPED_CONV_2D, window) for window in GROUPED]
CASES += [(OperationType.TRANSPOSE_CONV_2D, window) for window in TRANSPOSED]


@pytest.mark.parametrize(("code", "window"), CASES)
def test_a_float_convolution_is_its_definition(code: OperationType, window: Any) -> None:
    rng = np.random.default_rng(1)
    shape, definition, rest = case(code, window)
    image, filter = rng.standard_normal(IMAGE_SHAPE), rng.standard_normal(shape)
    bias = rng.standard_normal(shape[0])

    (found,) = executed(code, [floats(image), floats(filter), floats(bias), *rest], [Operand(F32)])

    np.testing.assert_allclose(found, definition(image, filter) + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("code", "window"), CASES)
def test_a_quantized_convolution_is_its_definition(
    code: OperationType, window: Any, kind: OperandType, per_channel: bool
) -> None:
    rng, (dtype, zero_point) = np.random.default_rng(2), CODES[kind]
    info = np.iinfo(dtype)
    shape, definition, rest = case(code, window)
    image = rng.integers(info.min, info.max + 1, IMAGE_SHAPE).astype(dtype)
    scales = [0.5 / (k + 1) for k in range(shape[0])] if per_channel else [0.5]
    weights = rng.integers(-127, 128, shape)
    if per_channel:
        filter, stored = weights.astype(np.int8), Operand(PC, (), channel_quant=ChannelQuant(tuple(scales), 0))
    else:
        filter = (weights + zero_point).clip(info.min, info.max).astype(dtype)
        stored = Operand(kind, (), 0.5, zero_point)
    bias = rng.integers(-5000, 5000, shape[0]).astype(np.int32)
    sums = definition(ints(image) - zero_point, ints(filter) - stored.zero_point) + bias
    pairs = [fixed_point.quantize_multiplier(0.25 * float(np.float32(scale)) / 40.0) for scale in scales]
    scaled = fixed_point.multiply(sums, ints([m for m, _ in pairs]), ints([s for _, s in pairs]))
    arguments: list[tuple[Operand, Array]] = [
        (Operand(kind, (), 0.25, zero_point), image),
        (stored, filter),
        (Operand(I32, (), 0.0 if per_channel else 0.125), bias),
        *rest,
    ]
    constants = range(1, len(arguments))

    (found,) = executed(code, arguments, [Operand(kind, (), 40.0, zero_point - 3)], constants)

    np.testing.assert_array_equal(found, np.clip(scaled + zero_point - 3, info.min, info.max))


def test_a_grouped_convolution_is_the_same_in_one_band_and_in_many() -> None:
    rng = np.random.default_rng(3)
    image, filter = rng.standard_normal((1, 70, 60, 8)), rng.standard_normal((4, 3, 3, 4))
    rest = [*i32(VALID, 1, 1, 2, 0), layout()]

    (found,) = executed(
        OperationType.GROUPED_CONV_2D, [floats(image), floats(filter), floats(np.zeros(4)), *rest], [Operand(F32)]
    )

    for row in (0, 33, 67):
        part = grouped(image[:, row : row + 3, :9], filter, 2, (1, 1), (0, 0, 0, 0))
        np.testing.assert_allclose(found[:, row : row + 1, :7], part, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wanted", "scheme", "stride", "found"),
    [
        ((8, 10), SAME, (2, 2), (8, 10)),
        ((7, 9), SAME, (2, 2), (7, 9)),
        ((4, 5), VALID, (2, 2), (9, 11)),  # VALID: the shape that is given decides nothing
        ((12, 15), SAME, (3, 3), (12, 15)),
    ],
)
def test_the_given_output_shape_decides_the_padding(
    wanted: tuple[int, int], scheme: int, stride: tuple[int, int], found: tuple[int, int]
) -> None:
    image, filter = np.ones((1, 4, 5, 2)), np.ones((1, 3, 3, 2))
    shape = (Operand(I32), np.array([1, *wanted, 1], np.int32))
    rest = [shape, *i32(scheme, *stride, 0), layout()]
    arguments = [floats(image), floats(filter), floats(np.zeros(1)), *rest]

    (result,) = executed(OperationType.TRANSPOSE_CONV_2D, arguments, [Operand(F32)])

    excess = [(-(-w // s) - 1) * s + 3 - w if scheme == SAME else 0 for w, s in zip(wanted, stride, strict=True)]
    heads = [max(e, 0) // 2 for e in excess]
    padding = (heads[1], excess[1] - heads[1], heads[0], excess[0] - heads[0])
    assert result.shape == (1, *found, 1)
    np.testing.assert_array_equal(result, transposed(image, filter, (stride[0], stride[1]), padding))


def test_C4_an_output_shape_without_dimensions_is_rejected() -> None:
    packed = [floats(np.ones((1, 4, 5, 2))), floats(np.ones((1, 3, 3, 2))), floats(np.zeros(1))]
    arguments = [*packed, (Operand(I32), np.array(7, np.int32)), *i32(SAME, 1, 1, 0), layout()]

    with pytest.raises(GeneralFailure, match=r"output shape 7, .*\(C4\)$"):
        executed(OperationType.TRANSPOSE_CONV_2D, arguments, [Operand(F32)], unknown=True)


@pytest.mark.parametrize(("adjoint_left", "adjoint_right"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_a_quantized_matrix_product_is_its_definition(
    batch: tuple[int, ...], adjoint_left: bool, adjoint_right: bool
) -> None:
    rng = np.random.default_rng(4)
    left, right = rng.integers(-128, 128, (*batch, 4, 7)), rng.integers(-128, 128, (*batch, 7, 5))
    sums = np.einsum("...ij,...jk->...ik", left - 3, right + 5)
    pair = fixed_point.quantize_multiplier(0.5 * 0.25 / 300)
    expected = np.clip(fixed_point.multiply(sums, *pair) - 7, -128, 127)
    given = [
        np.swapaxes(left, -1, -2) if adjoint_left else left,
        np.swapaxes(right, -1, -2) if adjoint_right else right,
    ]
    operands = [Operand(INT8, (), 0.5, 3), Operand(INT8, (), 0.25, -5)]
    arguments = [(o, np.ascontiguousarray(a, np.int8)) for o, a in zip(operands, given, strict=True)]

    (found,) = executed(
        OperationType.BATCH_MATMUL,
        [*arguments, layout(adjoint_left), layout(adjoint_right)],
        [Operand(INT8, (), 300.0, -7)],
    )

    np.testing.assert_array_equal(found, expected)


def test_an_int32_matrix_product_wraps_around() -> None:
    left, right = np.array([[1 << 20, 3]], np.int32), np.array([[1 << 12], [5]], np.int32)

    (found,) = executed(
        OperationType.BATCH_MATMUL, [(Operand(I32), left), (Operand(I32), right), layout(), layout()], [Operand(I32)]
    )

    assert found.tolist() == [[15]]


def test_an_l2_pool_is_the_root_of_the_mean_square_of_the_pixels_inside() -> None:
    image = np.random.default_rng(5).standard_normal((2, 5, 4, 3))
    arguments = [floats(image), *i32(1, 1, 1, 0, 2, 1, 3, 2, 0)]

    (found,) = executed(OperationType.L2_POOL_2D, arguments, [Operand(F32)])

    expected = np.empty((2, 5, 2, 3))
    for y, x in np.ndindex(5, 2):
        window = image[:, max(y - 1, 0) : y + 1, max(2 * x - 1, 0) : 2 * x + 2]
        expected[:, y, x] = np.sqrt(np.mean(window**2, axis=(1, 2)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_SUP_5_an_int8_average_rounds_as_the_uint8_one() -> None:
    codes = np.array([-2, -1], np.int8).reshape(1, 1, 2, 1)  # 126 and 127 as uint8, whose average rounds to 127
    operand = Operand(INT8, (), 1.0, 0)

    (found,) = executed(OperationType.AVERAGE_POOL_2D, [(operand, codes), *i32(VALID, 1, 1, 2, 1, 0)], [operand])

    assert found.ravel().tolist() == [-1]


@pytest.mark.parametrize("code", ["CONV_2D", "TRANSPOSE_CONV_2D", "AVERAGE_POOL_2D", "L2_POOL_2D", "MAX_POOL_2D"])
def test_a_batch_of_no_images_gives_no_images(code: str) -> None:
    image = floats(np.empty((0, 4, 4, 2)))
    packed = [floats(np.ones((3, 3, 3, 2))), floats(np.ones(3))]
    arguments = {
        "CONV_2D": [image, *packed, *i32(SAME, 1, 1, 0)],
        "TRANSPOSE_CONV_2D": [image, *packed, *i32(0, 0, 0, 0, 1, 1, 0), layout()],
    }.get(code, [image, *i32(SAME, 1, 1, 3, 3, 0)])

    (found,) = executed(OperationType[code], arguments, [Operand(F32)], unknown=True)

    assert found.shape[0] == 0
    assert found.shape[1] in (4, 6)
