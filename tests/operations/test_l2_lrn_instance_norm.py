"""Normalizations against loops over their definitions, and at their corners."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import executed

from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import match
from nnfmq.operations.normalization import inverse_square_root

Array = npt.NDArray[Any]

F32, INT32, FLOAT32 = OperandType.TENSOR_FLOAT32, OperandType.INT32, OperandType.FLOAT32
UINT8 = OperandType.TENSOR_QUANT8_ASYMM
L2, LOCAL = OperationType.L2_NORMALIZATION, OperationType.LOCAL_RESPONSE_NORMALIZATION
SHAPES = [(7,), (3, 5), (2, 3, 4), (2, 3, 4, 5)]
AXES = [(shape, axis) for shape in SHAPES for axis in range(-len(shape), len(shape))]


def floats(array: Array) -> tuple[Operand, Array]:
    return Operand(F32), array.astype(np.float32)


def integer(value: int) -> tuple[Operand, Array]:
    return Operand(INT32), np.array(value, np.int32)


def real(value: float) -> tuple[Operand, Array]:
    return Operand(FLOAT32), np.array(value, np.float32)


@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_l2_normalization_divides_by_the_norm_along_the_axis(shape: tuple[int, ...], axis: int) -> None:
    array = np.random.default_rng(1).standard_normal(shape)

    (found,) = executed(L2, [floats(array), integer(axis)], [Operand(F32)])

    np.testing.assert_allclose(found, array / np.linalg.norm(array, axis=axis, keepdims=True), rtol=2e-6)


def test_l2_normalization_without_an_axis_takes_the_last_one() -> None:
    array = np.random.default_rng(1).standard_normal((2, 3, 4))

    (found,) = executed(L2, [floats(array)], [Operand(F32)])

    np.testing.assert_allclose(found, array / np.linalg.norm(array, axis=-1, keepdims=True), rtol=2e-6)


def test_a_vector_of_zeros_stays_zero_when_normalized() -> None:
    (found,) = executed(L2, [floats(np.zeros((2, 4)))], [Operand(F32)])
    (codes,) = executed(
        L2, [(Operand(UINT8, (), 0.1, 7), np.full((2, 4), 7, np.uint8))], [Operand(UINT8, (), 1 / 128, 128)]
    )

    assert not found.any()
    assert (codes == 128).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_quantized_norm_is_the_real_one_to_the_nearest_code(axis: int) -> None:
    codes = np.random.default_rng(2).integers(0, 256, (9, 11)).astype(np.uint8)
    without_zero_point = codes.astype(np.float64) - 100

    (found,) = executed(L2, [(Operand(UINT8, (), 0.1, 100), codes), integer(axis)], [Operand(UINT8, (), 1 / 128, 128)])

    expected = np.clip(
        128 * without_zero_point / np.linalg.norm(without_zero_point, axis=axis, keepdims=True) + 128, 0, 255
    )
    assert np.abs(found - expected).max() <= 0.5 + 2**-5  # rounded twice, the second time by a few bits


def test_the_inverse_square_root_is_exact_to_19_bits_over_the_whole_range() -> None:
    sums = np.unique(np.geomspace(2, (1 << 31) - 1, 4000).astype(np.int64))

    multiplier, shift = inverse_square_root(sums)

    assert multiplier.max() < 1 << 31
    np.testing.assert_allclose(multiplier / 2.0**31 / 2.0**shift, sums**-0.5, rtol=2.0**-19)


@pytest.mark.parametrize("value", [0, 1])
def test_the_inverse_square_root_of_0_and_1_is_the_largest_multiplier(value: int) -> None:
    multiplier, shift = inverse_square_root(np.array([value]))

    assert (multiplier.tolist(), shift.tolist()) == ([(1 << 31) - 1], [0])


@pytest.mark.parametrize("radius", [0, 1, 2, 100])
@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_local_response_sums_the_squares_within_the_radius(shape: tuple[int, ...], axis: int, radius: int) -> None:
    array = np.random.default_rng(3).standard_normal(shape)
    moved = np.moveaxis(array, axis, 0)
    expected = np.empty_like(moved)
    for cell in range(len(moved)):
        window = moved[max(cell - radius, 0) : cell + radius + 1]
        expected[cell] = moved[cell] * (2 + 0.5 * (window**2).sum(axis=0)) ** -0.75
    arguments = [floats(array), integer(radius), real(2), real(0.5), real(0.75), integer(axis)]

    (found,) = executed(LOCAL, arguments, [Operand(F32)])

    np.testing.assert_allclose(found, np.moveaxis(expected, 0, axis), rtol=1e-5)


def test_instance_normalization_takes_mean_and_variance_of_each_image_and_channel() -> None:
    array = np.random.default_rng(4).standard_normal((2, 4, 3, 5)) * 3 + 1
    nhwc = (Operand(OperandType.BOOL), np.array(0, np.uint8))
    expected = np.empty_like(array)
    for image, channel in np.ndindex(2, 5):
        cells = array[image, :, :, channel]
        expected[image, :, :, channel] = 2 * (cells - cells.mean()) / np.sqrt(cells.var() + 0.25) - 1

    (found,) = executed(
        OperationType.INSTANCE_NORMALIZATION, [floats(array), real(2), real(-1), real(0.25), nhwc], [Operand(F32)]
    )

    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "axis", "level"), [((1, 2, 3, 4), (), 1), ((1, 2, 3, 4), (3,), 3), ((3, 4), (), 3)])
def test_an_axis_and_a_rank_other_than_4_need_1_2(shape: tuple[int, ...], axis: tuple[int, ...], level: int) -> None:
    operand, axes = Operand(F32, shape), [Operand(INT32) for _ in axis]
    factors = [Operand(INT32), *[Operand(FLOAT32)] * 3]

    assert match(REGISTRY[L2], [operand, *axes], [operand]).level == level
    assert match(REGISTRY[LOCAL], [operand, *factors, *axes], [operand]).level == level
