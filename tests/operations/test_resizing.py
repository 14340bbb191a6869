"""Resized images: by definition, pixel by pixel in float32, and at the limits of the definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.one_result import result_of, tensor

from nnfmq.hal.types import Operand, OperandType, OperationType

Array = npt.NDArray[Any]
F32 = OperandType.TENSOR_FLOAT32
BILINEAR, NEAREST = OperationType.RESIZE_BILINEAR, OperationType.RESIZE_NEAREST_NEIGHBOR
FLAGS = [(False, False), (True, False), (False, True)]
SIZES = [(5, 7), (3, 4), (2, 9), (1, 1), (8, 2)]
one, half = np.float32(1), np.float32(0.5)


def scale(size: int, new: int, align: bool) -> np.float32:
    return np.float32(size - 1) / np.float32(new - 1) if align and new > 1 else np.float32(size) / np.float32(new)


def taps(position: int, size: int, new: int, align: bool, centered: bool) -> list[tuple[int, np.float32]]:
    """Return the two input positions for an output position, with their weights."""
    step, place = scale(size, new, align), np.float32(position)
    real = (place + half) * step - half if centered else place * step
    lower, upper = max(math.floor(real), 0), min(math.ceil(real), size - 1)
    part = real - np.float32(lower)
    return [(lower, one - part), (upper, part)]


def bilinear(image: Array, rows: int, columns: int, align: bool, centered: bool) -> Array:
    """Interpolate in float32; products and sums in the order of the reference."""
    result = np.empty((image.shape[0], rows, columns, image.shape[3]), np.float32)
    for y, x in itertools.product(range(rows), range(columns)):
        vertical = taps(y, image.shape[1], rows, align, centered)
        horizontal = taps(x, image.shape[2], columns, align, centered)
        terms = [image[:, i, j].astype(np.float32) * a * b for j, b in horizontal for i, a in vertical]
        result[:, y, x] = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    return result


def nearest(size: int, new: int, align: bool, centered: bool) -> list[int]:
    step, found = scale(size, new, align), []
    for position in range(new):
        real = float((np.float32(position) + (half if centered else np.float32(0))) * step)
        found.append(min(math.floor(real + 0.5) if align else math.floor(real), size - 1))
    return found


def arguments(image: Any, rows: float, columns: float, align: bool, centered: bool) -> list[Any]:
    return [image, columns, rows, False, align, centered]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("size", SIZES)
def test_a_bilinear_float_image_is_its_definition_to_the_bit(size: tuple[int, int], flags: tuple[bool, bool]) -> None:
    image = np.random.default_rng(1).standard_normal((2, 3, 5, 2)).astype(np.float32)

    found = result_of(BILINEAR, arguments(tensor(image), *size, *flags), Operand(F32, ()))

    np.testing.assert_array_equal(found, bilinear(image, *size, *flags))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("size", SIZES)
def test_SUP_5_bilinear_codes_are_rounded_up_from_a_half_and_int8_ones_are_128_less(
    size: tuple[int, int], flags: tuple[bool, bool]
) -> None:
    image = np.random.default_rng(2).integers(0, 256, (1, 3, 5, 2)).astype(np.uint8)
    expected = np.floor(bilinear(image, *size, *flags) + half).astype(np.uint8)
    uint8, int8 = tensor(image, "uint8", 0.5, 9), tensor(image.astype(np.int16) - 128, "int8", 0.5, 9 - 128)

    unsigned = result_of(BILINEAR, arguments(uint8, *size, *flags), Operand(uint8[0].type, (), 0.5, 9))
    signed = result_of(BILINEAR, arguments(int8, *size, *flags), Operand(int8[0].type, (), 0.5, 9 - 128))

    np.testing.assert_array_equal(unsigned, expected)
    np.testing.assert_array_equal(signed, expected.astype(np.int16) - 128)


@pytest.mark.parametrize("size", SIZES)
def test_half_precision_is_the_float32_result_rounded_once(size: tuple[int, int]) -> None:
    image = np.random.default_rng(3).standard_normal((1, 3, 5, 2)).astype(np.float16)

    found = result_of(
        BILINEAR, arguments(tensor(image, "float16"), *size, False, False), Operand(OperandType.TENSOR_FLOAT16, ())
    )

    np.testing.assert_array_equal(found, bilinear(image, *size, False, False).astype(np.float16))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("size", SIZES)
def test_a_nearest_pixel_is_below_or_with_aligned_corners_rounded(
    size: tuple[int, int], flags: tuple[bool, bool]
) -> None:
    image = np.random.default_rng(4).standard_normal((2, 3, 5, 2)).astype(np.float32)

    found = result_of(NEAREST, arguments(tensor(image), *size, *flags), Operand(F32, ()))

    rows, columns = nearest(3, size[0], *flags), nearest(5, size[1], *flags)
    np.testing.assert_array_equal(found, image[:, rows][:, :, columns])


@pytest.mark.parametrize("code", [BILINEAR, NEAREST])
def test_a_size_given_as_a_factor_is_rounded_down(code: OperationType) -> None:
    image = np.arange(12, dtype=np.float32).reshape(1, 3, 4, 1)

    found = result_of(code, [tensor(image), 1.49, 0.7, False], Operand(F32, ()))

    assert found.shape == (1, 2, 5, 1)


@pytest.mark.parametrize("code", [BILINEAR, NEAREST])
def test_a_factor_for_half_precision_is_of_half_precision(code: OperationType) -> None:
    image, factor = np.ones((1, 2, 2, 1), np.float16), (Operand(OperandType.FLOAT16), np.float16(1.5).tobytes())

    found = result_of(code, [tensor(image, "float16"), factor, factor, False], Operand(OperandType.TENSOR_FLOAT16, ()))

    np.testing.assert_array_equal(found, np.ones((1, 3, 3, 1), np.float16))


@pytest.mark.parametrize("code", [BILINEAR, NEAREST])
def test_an_empty_batch_gives_an_empty_batch(code: OperationType) -> None:
    image = tensor(np.empty((0, 2, 2, 3), np.float32))

    found = result_of(code, [image, 4, 5, False], Operand(F32, ()), known=False)

    assert found.shape == (0, 5, 4, 3)


def test_a_bilinear_image_of_the_other_layout_has_the_same_pixels() -> None:
    image = np.random.default_rng(5).standard_normal((1, 3, 5, 2)).astype(np.float32)
    turned = np.ascontiguousarray(np.moveaxis(image, 3, 1))

    found = result_of(BILINEAR, [tensor(turned), 7, 4, True], Operand(F32, ()))

    np.testing.assert_array_equal(np.moveaxis(found, 1, 3), bilinear(image, 4, 7, False, False))
