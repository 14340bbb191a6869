"""Depthwise convolutions whose input rows are interleaved in registers, compared with the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.compiled import assert_kernels_agree, assert_kernels_agree_on
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels.depthwise_int8 import DwConvInt8Kernel, plan_dwconv_int8
from nnfmq.engines.compiled.kernels.interleaving import RowDot
from nnfmq.engines.compiled.kernels.requantize import NO_REQUANTIZATION
from nnfmq.engines.compiled.target import TARGETS
from nnfmq.hal.types import ChannelQuant, Model, Operand, OperandType, OperationType
from nnfmq.operations.shapes import WindowDimension, window_dimension

Q8, Q8S = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
PER_CHANNEL, I32 = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_INT32
SAME, NO_PADDING, WIDE = (0, 1, 0, 1), (0, 0, 0, 0), (2, 1, 1, 2)  # left, right, top, bottom

KINDS = ("uint8", "uint8, two terms", "int8", "int8 per channel")
SIZES = [  # batch, height, width, channels
    (1, 8, 8, 256),
    (2, 7, 15, 64),
    (1, 6, 5, 130),
    (1, 9, 12, 96),
    (1, 12, 26, 16),
    (1, 7, 66, 16),
    (1, 3, 4, 40),
    (3, 9, 3, 72),
]
WINDOWS = [  # height, width, vertical and horizontal stride, padding
    (3, 3, 1, 1, (1, 1, 1, 1)),
    (3, 3, 1, 1, NO_PADDING),
    (2, 2, 1, 1, SAME),
    (1, 3, 1, 1, (2, 0, 0, 0)),
    (4, 1, 1, 1, (0, 0, 3, 2)),
    (3, 3, 2, 1, WIDE),
    (3, 3, 2, 2, SAME),
    (3, 3, 2, 2, NO_PADDING),
    (3, 3, 2, 2, WIDE),
    (3, 2, 1, 2, NO_PADDING),
    (2, 3, 1, 2, SAME),
    (1, 3, 1, 2, NO_PADDING),
    (3, 3, 3, 3, SAME),
    (2, 4, 2, 2, (3, 1, 1, 0)),
    (3, 3, 1, 2, WIDE),
]


def filter_of(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> Operand | tuple[Operand, bytes]:
    """Return a filter; "two terms" has weights that int8 does not hold, in one channel of every 200."""
    channels = shape[3]
    if kind == "int8 per channel":
        scales = tuple(map(float, random.uniform(0.001, 0.02, channels).astype(np.float32)))
        values = random.integers(-127, 128, shape).astype(np.int8)
        return Operand(PER_CHANNEL, shape, channel_quant=ChannelQuant(scales, 3)), values.tobytes()
    if kind == "int8":
        values = random.integers(-125, 125, shape).astype(np.int8)
        return Operand(Q8S, shape, 0.0078125, -3), values.tobytes()
    values, zero_point = random.integers(10, 256, shape).astype(np.uint8), 128
    if "two terms" in kind:
        zero_point = 131
        values[..., 5::200] = random.integers(0, 3, values[..., 5::200].shape)
    return Operand(Q8, shape, 0.0078125, zero_point), values.tobytes()


def depthwise(kind: str, size: tuple[int, ...], window: tuple[Any, ...], dilations: tuple[int, int] = (1, 1)) -> Model:
    batch, height, width, channels = size
    rows, columns, down, right, padding = window
    random, signed = np.random.default_rng(4), kind.startswith("int8")
    vertical = window_of(height, rows, down, padding[2:], dilations[0])
    horizontal = window_of(width, columns, right, padding[:2], dilations[1])
    input_type, scale = (Q8S if signed else Q8), 0.5
    biases = random.integers(-2000, 2000, channels).astype("<i4").tobytes()
    bias = Operand(I32, (channels,), 0.0 if "per channel" in kind else scale * 0.0078125)
    arguments = [
        Operand(input_type, size, scale, 115 - 128 * signed),
        filter_of(kind, (1, rows, columns, channels), random),
        (bias, biases),
        *padding,
        *(right, down, 1, 0, False, dilations[1], dilations[0]),
    ]
    out = Operand(input_type, (batch, vertical.count, horizontal.count, channels), 0.25, 110 - 128 * signed)
    return one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, out)


def window_of(
    extent: int, size: int, stride: int, padding: tuple[int, int] = (0, 0), dilation: int = 1
) -> WindowDimension:
    return window_dimension(extent, size, stride, dilation, padding)


@pytest.mark.instruction_sets
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_depthwise_convolutions_in_registers_match_the_interpreter(
    kind: str, size: tuple[int, ...], window: tuple[Any, ...]
) -> None:
    """With rows of a few tiles or none, row tiles that share a vector, and padding on every side."""
    assert_kernels_agree(depthwise(kind, size, window))


@pytest.mark.instruction_sets("dot4")
@pytest.mark.parametrize("dilations", [(2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_dilated_windows_match_the_interpreter(kind: str, dilations: tuple[int, int]) -> None:
    """Rows of a window that is dilated horizontally are interleaved in scratch memory."""
    assert_kernels_agree(depthwise(kind, (1, 11, 9, 80), (3, 3, 2, 2, (1, 1, 2, 2)), dilations))


@pytest.mark.instruction_sets
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_sums_in_registers_match_the_interpreter(kind: str) -> None:
    size = (1, 5, 9, 192)
    dtype, ends = (np.int8, (-128, 127)) if kind.startswith("int8") else (np.uint8, (0, 255))
    inputs = [np.full(size, value, dtype) for value in ends]
    assert_kernels_agree_on(depthwise(kind, size, (3, 3, 2, 2, WIDE)), [[array] for array in inputs])


# -- the plan ----------------------------------------------------------------------------------------------------------


def planned(
    rows: tuple[int, int],
    columns: tuple[int, int],
    channels: int = 64,
    width: int = 40,
    dot_rows: int = 4,
    name: str = "avx512vnni",
) -> DwConvInt8Kernel:
    """Return the kernel for windows of (size, stride) each."""
    along = window_of(40, *rows), window_of(width, *columns)
    dot = RowDot(dot_rows, 1, False, NO_REQUANTIZATION)
    return plan_dwconv_int8((1, 40, width, channels), 1, *along, dot, TARGETS[name])


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((3, 1), (3, 1)), ((2, 1), (3, 1)), ((1, 1), (1, 1)), ((3, 2), (3, 2)), ((3, 3), (3, 3)), ((4, 2), (4, 2))],
    ids=str,
)
def test_rows_of_small_windows_are_interleaved_in_registers(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    kernel = planned(rows, columns)

    assert kernel.uses_registers
    assert kernel.scratch_bytes(TARGETS["avx512vnni"]) == 40 * 64, "a row of padding"
    sums, kept, pixel = 4 * kernel.mr * kernel.taps.rows, 4 * (columns[0] - columns[1]), 4
    assert sums + kept + pixel <= 28, "32 registers hold them, rows that are interleaved, and constants"


def test_other_rows_are_interleaved_in_scratch_memory() -> None:
    assert not planned((5, 2), (5, 2)).uses_registers, "two groups of rows"
    assert not planned((3, 2), (5, 2)).uses_registers, "three pixels to be kept"
    assert not planned((3, 7), (8, 7)).uses_registers, "too many columns to unroll"
    assert not planned((3, 2), (1, 2)).uses_registers, "pixels between windows"
    assert not planned((3, 2), (3, 2), channels=8).uses_registers, "rows are copied first"
    assert not planned((3, 2), (3, 2), dot_rows=2).uses_registers, "two groups of two rows"
    assert not planned((2, 2), (3, 2), dot_rows=2, name="avx512").uses_registers, "no dot4"
    assert not planned((3, 2), (3, 2), name="neon-dotprod").uses_registers, "short vectors"


@pytest.mark.parametrize(("channels", "row_tiles", "width"), [(64, 1, 4), (32, 2, 33), (16, 4, 65)])
def test_wide_rows_of_several_row_tiles_are_interleaved_in_registers(channels: int, row_tiles: int, width: int) -> None:
    wide = planned((3, 1), (3, 1), channels, width)
    assert (wide.row_tiles, wide.uses_registers) == (row_tiles, True)
    narrow = planned((3, 1), (3, 1), channels, width - 1)
    assert (narrow.row_tiles, narrow.uses_registers) == (row_tiles, row_tiles == 1)
    strided = planned((3, 2), (3, 2), channels, width - 1)
    assert (strided.row_tiles, strided.uses_registers) == (row_tiles, True)
