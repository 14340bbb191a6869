"""ROI_ALIGN, ROI_POOLING and HEATMAP_MAX_KEYPOINT against loops over their definitions, and their errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import executed

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import ints
from nnfmq.operations.keypoints import refine_maximum

Array = npt.NDArray[Any]

F32, I32, UINT16 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32, OperandType.TENSOR_QUANT16_ASYMM
UINT8, INT8 = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
ALIGN, POOLING = OperationType.ROI_ALIGN, OperationType.ROI_POOLING
REGIONS = np.array([[0, 0, 14, 10], [1.5, 2.25, 9, 9.5], [4, 4, 4, 4], [13, 9, 14, 10], [2, 0.5, 13.75, 1]])
BATCHES = np.array([0, 0, 1, 1, 1], np.int32)
STRIDE = 2.0  # pixels of the image to a cell of the feature map, (2, 5, 7, 3)


def floats(array: Array) -> tuple[Operand, Array]:
    return Operand(F32), np.array(array, np.float32)


def arguments(
    image: tuple[Operand, Array],
    regions: tuple[Operand, Array],
    batches: Array,
    extents: tuple[int, int],
    ratios: tuple[int, ...],
) -> list[tuple[Operand, Array]]:
    integers = [(Operand(OperandType.INT32), np.array(value, np.int32)) for value in (*extents, *ratios)]
    strides = [(Operand(OperandType.FLOAT32), np.array(STRIDE, np.float32))] * 2
    nhwc = (Operand(OperandType.BOOL), np.array(0, np.uint8))
    return [image, regions, (Operand(I32), batches), *integers[:2], *strides, *integers[2:], nhwc]


def places(start: np.float32, end: np.float32, count: int, ratio: int, cell: int) -> list[np.float32]:
    """Return where a cell is sampled along one axis, summed up in float32."""
    step = max(end - start, np.float32(1)) / np.float32(count)
    size = step / np.float32(ratio or math.ceil(step))
    place, found = step * np.float32(cell) + start + size / np.float32(2), []
    while place < step * np.float32(cell + 1) + start:
        found.append(place)
        place += size
    return found


def corners(place: np.float32, extent: int) -> list[tuple[int, np.float32]]:
    """Return the two cells beside a place, with their weights; at the end the last cell alone counts."""
    low = math.floor(place)
    if low >= extent - 1:
        return [(extent - 1, np.float32(1)), (extent - 1, np.float32(0))]
    fraction = place - np.float32(low)
    return [(low, np.float32(1) - fraction), (low + 1, fraction)]


def aligned(image: Array, region: Array, extents: tuple[int, int], ratios: tuple[int, int], is_real: bool) -> Array:
    """Return the sums of samples: with float weights, or with weights in 1/255."""
    height, width, channels = image.shape
    sums = np.zeros((*extents, channels), np.float64 if is_real else np.int64)
    x1, y1, x2, y2 = (np.float32(value) / np.float32(STRIDE) for value in region)
    for i, j in np.ndindex(*extents):
        for y, x in itertools.product(
            places(y1, y2, extents[0], ratios[0], i), places(x1, x2, extents[1], ratios[1], j)
        ):
            for (row, down), (column, across) in itertools.product(corners(y, height), corners(x, width)):
                weight = down * across
                sums[i, j] += image[row, column] * (
                    weight if is_real else math.floor(weight / np.float32(1 / 255) + 0.5)
                )
    return sums


def sample_count(region: Array, extents: tuple[int, int], ratios: tuple[int, int]) -> int:
    sizes = [max((region[3] - region[1]) / STRIDE, 1), max((region[2] - region[0]) / STRIDE, 1)]
    return math.prod(r or math.ceil(s / e) for s, e, r in zip(sizes, extents, ratios, strict=True))


@pytest.mark.parametrize("extents", [(1, 1), (2, 3), (7, 4)])
@pytest.mark.parametrize("ratios", [(0, 0), (2, 1), (3, 0)])
def test_aligned_bins_are_averages_of_bilinear_samples(extents: tuple[int, int], ratios: tuple[int, int]) -> None:
    image = np.random.default_rng(1).standard_normal((2, 5, 7, 3)).astype(np.float32)
    given = arguments(floats(image), floats(REGIONS), BATCHES, extents, ratios)

    (found,) = executed(ALIGN, given, [Operand(F32)])

    for cells, region, batch in zip(found, REGIONS, BATCHES, strict=True):
        expected = aligned(image[batch], region, extents, ratios, True) / sample_count(region, extents, ratios)
        np.testing.assert_allclose(cells, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [UINT8, INT8])
@pytest.mark.parametrize("extents", [(1, 1), (2, 3), (7, 4)])
@pytest.mark.parametrize("ratios", [(0, 0), (2, 1), (3, 0)])
def test_aligned_codes_are_exact(extents: tuple[int, int], ratios: tuple[int, int], kind: OperandType) -> None:
    dtype, zero = (np.uint8, 100) if kind == UINT8 else (np.int8, -28)
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    image = np.random.default_rng(2).integers(low, high + 1, (2, 5, 7, 3)).astype(dtype)
    regions = (Operand(UINT16, (), 0.125), (REGIONS * 8).astype(np.uint16))
    given = arguments((Operand(kind, (), 0.25, zero), image), regions, BATCHES, extents, ratios)

    (found,) = executed(ALIGN, given, [Operand(kind, (), 0.2, zero + 5)])

    for cells, region, batch in zip(found, REGIONS, BATCHES, strict=True):
        sums = aligned(ints(image[batch]) - zero, region, extents, ratios, False)
        unit = np.float32(0.25) * np.float32(1 / 255) / np.float32(0.2)
        real = unit / np.float32(sample_count(region, extents, ratios))
        expected = fixed_point.multiply(sums, *fixed_point.quantize_multiplier(float(real))) + zero + 5
        np.testing.assert_array_equal(cells, np.clip(expected, low, high))


@pytest.mark.parametrize("extents", [(1, 1), (2, 3), (7, 4)])
def test_pooled_bins_are_maxima_of_their_pixels(extents: tuple[int, int]) -> None:
    image = np.random.default_rng(3).standard_normal((2, 5, 7, 3)).astype(np.float32)
    given = arguments(floats(image), floats(REGIONS), BATCHES, extents, ())

    (found,) = executed(POOLING, given, [Operand(F32)])

    expected = np.zeros(found.shape, np.float32)
    for number, i, j in np.ndindex(len(REGIONS), *extents):
        x1, y1, x2, y2 = (math.floor(value / STRIDE + 0.5) for value in REGIONS[number])
        down, across = np.float32((y2 - y1 + 1) / extents[0]), np.float32((x2 - x1 + 1) / extents[1])
        rows = slice(math.floor(y1 + i * down), math.ceil(y1 + (i + 1) * down))
        columns = slice(math.floor(x1 + j * across), math.ceil(x1 + (j + 1) * across))
        below = image[BATCHES[number], rows, columns]
        if below.size:
            expected[number, i, j] = below.max(axis=(0, 1))
    np.testing.assert_array_equal(found, expected)


def test_a_pooled_bin_beyond_the_image_has_the_zero_point() -> None:
    image = (Operand(UINT8, (), 0.5, 7), np.full((1, 5, 7, 1), 9, np.uint8))
    regions = (Operand(UINT16, (), 0.125), np.array([[112, 80, 112, 80]], np.uint16))

    (found,) = executed(
        POOLING, arguments(image, regions, np.zeros(1, np.int32), (1, 1), ()), [Operand(UINT8, (), 0.5, 7)]
    )

    assert found.ravel().tolist() == [7]


@pytest.mark.parametrize("code", [ALIGN, POOLING])
@pytest.mark.parametrize(
    ("constraint", "region", "batch"),
    [
        ("C5", [-1, 0, 4, 4], 0),
        ("C5", [0, 0, 15, 4], 0),
        ("C5", [0, 0, 4, 11], 0),
        ("X2", [4, 0, 2, 4], 0),
        ("X2", [0, 4, 2, 2], 0),
        ("X2", [0, float("nan"), 2, 2], 0),
        ("X3", [0, 0, 4, 4], 2),
        ("X3", [0, 0, 4, 4], -1),
    ],
)
def test_N_OPF_7_a_malformed_region_is_rejected(
    code: OperationType, constraint: str, region: list[float], batch: int
) -> None:
    ratios = (0, 0) if code == ALIGN else ()
    image = floats(np.ones((2, 5, 7, 3)))
    given = arguments(image, floats(np.array([region])), np.array([batch], np.int32), (2, 2), ratios)

    with pytest.raises(GeneralFailure, match=rf"\({constraint}\)$"):
        executed(code, given, [Operand(F32)])


@pytest.mark.parametrize("ratios", [(1 << 30, 1), (1 << 15, 1 << 15)])
def test_C6_a_region_of_too_many_samples_is_rejected(ratios: tuple[int, int]) -> None:
    given = arguments(floats(np.ones((1, 5, 7, 3))), floats(REGIONS[:1]), np.zeros(1, np.int32), (2, 2), ratios)

    with pytest.raises(GeneralFailure, match=r"\(C6\)$"):
        executed(ALIGN, given, [Operand(F32)])


def test_no_regions_give_no_bins() -> None:
    image, none = floats(np.ones((2, 5, 7, 3))), floats(np.empty((0, 4)))

    (found,) = executed(
        ALIGN, arguments(image, none, np.empty(0, np.int32), (2, 4), (0, 0)), [Operand(F32)], unknown=True
    )

    assert found.shape == (0, 2, 4, 3)


def test_a_keypoint_is_the_top_of_the_parabola() -> None:
    y, x = np.mgrid[:8, :8].astype(np.float64)
    peaks = [(2.3, 5.1), (6.2, 1.4)]
    heatmap = np.stack([3 - (x - px) ** 2 - 0.5 * (y - py) ** 2 for px, py in peaks], axis=-1)[None]
    boxes = np.array([[10, 20, 26, 28]])

    score, place = executed(
        OperationType.HEATMAP_MAX_KEYPOINT,
        [floats(heatmap), floats(boxes), (Operand(OperandType.BOOL), np.array(0, np.uint8))],
        [Operand(F32), Operand(F32)],
    )

    expected = [[10 + 16 * (px + 0.5) / 8, 20 + 8 * (py + 0.5) / 8] for px, py in peaks]
    np.testing.assert_allclose(score, [[3, 3]], rtol=1e-5)
    np.testing.assert_allclose(place[0], expected, rtol=1e-5)


def test_N_OPF_7_a_malformed_box_of_a_heatmap_is_rejected() -> None:
    layout = (Operand(OperandType.BOOL), np.array(0, np.uint8))
    heatmap, boxes = floats(np.ones((1, 3, 3, 1))), floats([[4, 0, 2, 4]])

    with pytest.raises(GeneralFailure, match=r"\(X2\)$"):
        executed(OperationType.HEATMAP_MAX_KEYPOINT, [heatmap, boxes, layout], [Operand(F32), Operand(F32)])


def test_a_flat_heatmap_is_not_refined() -> None:
    with np.errstate(all="ignore"):  # as the interpreter does
        shift, value = refine_maximum(np.full((3, 3, 1), 2, np.float32), np.float32(1e-5))

    assert (shift.tolist(), value.tolist()) == ([[0, 0]], [2])


def test_a_shift_is_limited_to_one_and_a_half_pixels() -> None:
    grid = np.array([[0, 0, 0], [0.9, 1, 1.099], [0, 0, 0]], np.float32)[..., None]  # almost a slope along x

    shift, _ = refine_maximum(grid, np.float32(1e-5))

    assert abs(shift).max() == pytest.approx(1.5)
