"""Windowed operations with random window parameters against their definitions: plain loops over output elements."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.small_models import one_operation

from nnfmq.engines import interpreter
from nnfmq.hal.types import ChannelQuant, Operand, OperandType, OperationType
from nnfmq.operations import fixed_point
from nnfmq.operations.fixed_point import ints

F32, I32, PC = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32, OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
CODES = {OperandType.TENSOR_QUANT8_ASYMM: (np.uint8, 130), OperandType.TENSOR_QUANT8_ASYMM_SIGNED: (np.int8, 2)}
WINDOWS = [  # filter (height, width), stride (x, y), dilation (x, y), padding (left, right, top, bottom)
    ((3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    ((3, 2), (2, 1), (1, 1), (0, 1, 2, 0)),
    ((2, 3), (3, 2), (2, 1), (1, 0, 0, 1)),
    ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    ((1, 1), (2, 3), (1, 1), (0, 0, 0, 0)),
    ((2, 2), (9, 9), (3, 4), (3, 3, 4, 4)),
]


def cells(window: Any, height: int, width: int) -> Any:
    """Yield (row, column, [(tap row, tap column, image row, image column) inside the image]) for each output cell."""
    (tall, wide), (sx, sy), (dx, dy), (left, right, top, bottom) = window
    rows = (height + top + bottom - (tall - 1) * dy - 1) // sy + 1
    columns = (width + left + right - (wide - 1) * dx - 1) // sx + 1
    for row, column in itertools.product(range(rows), range(columns)):
        taps = [
            (i, j, row * sy + i * dy - top, column * sx + j * dx - left)
            for i, j in itertools.product(range(tall), range(wide))
        ]
        yield row, column, [tap for tap in taps if 0 <= tap[2] < height and 0 <= tap[3] < width]


def output_extents(window: Any, height: int, width: int) -> tuple[int, int]:
    rows, columns, _ = list(cells(window, height, width))[-1]
    return rows + 1, columns + 1


def convolved(image: Any, filter: Any, window: Any, multiplier: int | None) -> Any:
    """Sum products in the dtype of the arguments; `multiplier` of a depthwise convolution, None of a full one."""
    batch, height, width, channels = image.shape
    outputs = filter.shape[3 if multiplier else 0]
    out = np.zeros((batch, *output_extents(window, height, width), outputs), image.dtype)
    for row, column, taps in cells(window, height, width):
        for (i, j, y, x), channel in itertools.product(taps, range(channels)):
            value = image[:, y, x, channel]
            if multiplier:
                first = channel * multiplier
                out[:, row, column, first : first + multiplier] += (
                    value[:, None] * filter[0, i, j, first : first + multiplier]
                )
            else:
                out[:, row, column] += value[:, None] * filter[:, i, j, channel]
    return out


def window_arguments(window: Any, multiplier: int | None) -> list[Any]:
    _, stride, dilation, padding = window
    return [*padding, *stride, *([multiplier] if multiplier else []), 0, False, *dilation]


def code_of(multiplier: int | None) -> OperationType:
    return OperationType.DEPTHWISE_CONV_2D if multiplier else OperationType.CONV_2D


def filter_shape(window: Any, multiplier: int | None) -> tuple[int, ...]:
    return (1, *window[0], 3 * multiplier) if multiplier else (5, *window[0], 3)


@pytest.mark.parametrize("multiplier", [None, 1, 2])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", [0, 2])
def test_a_float_convolution_is_its_definition(window: Any, multiplier: int | None, batch: int) -> None:
    rng = np.random.default_rng(1)
    image = rng.standard_normal((batch, 9, 11, 3)).astype(np.float32)
    filter = rng.standard_normal(filter_shape(window, multiplier)).astype(np.float32)
    expected = convolved(image.astype(np.float64), filter.astype(np.float64), window, multiplier)
    bias = rng.standard_normal(expected.shape[3]).astype(np.float32)
    constants = [(Operand(F32, filter.shape), filter.tobytes()), (Operand(F32, bias.shape), bias.tobytes())]
    arguments = [Operand(F32, image.shape), *constants, *window_arguments(window, multiplier)]
    found = np.empty(expected.shape, np.float32)

    interpreter.prepare(one_operation(code_of(multiplier), arguments, Operand(F32, expected.shape))).execute(
        [image], [found]
    )

    np.testing.assert_allclose(found, expected + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operand_type", CODES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("multiplier", [None, 1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_quantized_convolution_is_its_definition(
    window: Any, multiplier: int | None, per_channel: bool, operand_type: OperandType
) -> None:
    rng, (dtype, zero_point) = np.random.default_rng(2), CODES[operand_type]
    info = np.iinfo(dtype)
    image = rng.integers(info.min, info.max + 1, (2, 9, 11, 3)).astype(dtype)
    shape = filter_shape(window, multiplier)
    channels = shape[3] if multiplier else shape[0]
    scales = [2.0**-k for k in range(channels)] if per_channel else [0.5]
    if per_channel:
        filter = rng.integers(-127, 128, shape).astype(np.int8)
        kind = Operand(PC, shape, channel_quant=ChannelQuant(tuple(scales), 3 if multiplier else 0))
    else:
        filter = rng.integers(info.min, info.max + 1, shape).astype(dtype)
        kind = Operand(operand_type, shape, 0.5, zero_point)
    bias = rng.integers(-5000, 5000, channels).astype(np.int32)
    sums = convolved(ints(image) - zero_point, ints(filter) - kind.zero_point, window, multiplier) + bias
    pairs = [fixed_point.quantize_multiplier(0.25 * scale / 12.0) for scale in scales]
    scaled = fixed_point.multiply(sums, ints([m for m, _ in pairs]), ints([s for _, s in pairs]))
    constants = [
        (kind, filter.tobytes()),
        (Operand(I32, bias.shape, 0.0 if per_channel else 0.125), bias.tobytes()),
    ]
    arguments = [
        Operand(operand_type, image.shape, 0.25, zero_point),
        *constants,
        *window_arguments(window, multiplier),
    ]
    found = np.empty(sums.shape, dtype)
    output = Operand(operand_type, sums.shape, 12.0, zero_point)

    interpreter.prepare(one_operation(code_of(multiplier), arguments, output)).execute([image], [found])

    np.testing.assert_array_equal(found, np.clip(scaled + zero_point, info.min, info.max))


@pytest.mark.parametrize("operand_type", CODES)
@pytest.mark.parametrize("window", [g for g in WINDOWS if g[2] == (1, 1)])
@pytest.mark.parametrize("code", [OperationType.AVERAGE_POOL_2D, OperationType.MAX_POOL_2D])
def test_a_quantized_pool_is_its_definition(code: OperationType, window: Any, operand_type: OperandType) -> None:
    rng, (dtype, zero_point) = np.random.default_rng(3), CODES[operand_type]
    image = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (2, 9, 11, 3)).astype(dtype)
    expected = np.empty((2, *output_extents(window, 9, 11), 3), dtype)
    for row, column, taps in cells(window, 9, 11):
        pixels = np.stack([ints(image[:, y, x]) for _, _, y, x in taps])
        least, count = np.iinfo(dtype).min, len(taps)
        mean = ((pixels - least).sum(axis=0) + count // 2) // count + least  # int8 as uint8 (SUP-5)
        expected[:, row, column] = pixels.max(axis=0) if code == OperationType.MAX_POOL_2D else mean
    (tall, wide), stride, _, padding = window
    arguments = [Operand(operand_type, image.shape, 0.5, zero_point), *padding, *stride, wide, tall, 0]
    found = np.empty(expected.shape, dtype)

    interpreter.prepare(one_operation(code, arguments, Operand(operand_type, expected.shape, 0.5, zero_point))).execute(
        [image], [found]
    )

    np.testing.assert_array_equal(found, expected)
