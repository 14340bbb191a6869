"""Convolutions and FULLY_CONNECTED by generated kernels, against the interpreter, over shapes that cut work oddly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.compiled import assert_kernels_agree
from support.small_models import one_operation

from nnfmq.engines.compiled.kernels.dwconv import DwConvKernel
from nnfmq.engines.compiled.kernels.requantize import REQUANT_ROWS
from nnfmq.engines.compiled.lowering import KernelLaunch
from nnfmq.engines.compiled.partition import LOWERING_RULES
from nnfmq.engines.compiled.target import TARGETS, Target
from nnfmq.hal.types import ChannelQuant, Model, Operand, OperandType, OperationType
from nnfmq.operations.signature import Tensor

pytestmark = pytest.mark.instruction_sets

F32, Q8, Q8S = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
PC, I32 = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_INT32
SAME, VALID = 1, 2
FLOAT, CODES = np.dtype("<f4"), np.dtype("u1")
KINDS = ("float", "uint8", "int8", "uint8 per channel", "int8 per channel")
IMAGES = [  # batch, height, width, channels, filters
    (1, 8, 8, 8, 16),
    (2, 7, 5, 3, 1),
    (1, 13, 11, 17, 33),
    (3, 1, 1, 64, 100),
    (1, 2, 3, 1, 7),
]
FILTERS = [  # height, width, stride, dilation, padding, activation
    (1, 1, 1, 1, SAME, 0),
    (3, 3, 1, 1, SAME, 1),
    (3, 2, 2, 1, SAME, 3),
    (2, 3, 1, 2, SAME, 2),
    (1, 1, 2, 1, VALID, 0),
]


def weights(kind: str, shape: tuple[int, ...], channels: int, axis: int, random: np.random.Generator) -> list[Any]:
    """Return filter and bias as constants of an operation whose input has scale 0.5."""
    if kind == "float":
        filter, bias = random.normal(size=shape).astype("<f4"), random.normal(size=channels).astype("<f4")
        return [(Operand(F32, shape), filter.tobytes()), (Operand(F32, (channels,)), bias.tobytes())]
    bias = random.integers(-2000, 2000, channels).astype("<i4")
    if "per channel" in kind:
        scales = tuple(map(float, random.uniform(0.001, 0.02, channels).astype(np.float32)))
        codes = random.integers(-127, 128, shape).astype(np.int8)
        filter = Operand(PC, shape, channel_quant=ChannelQuant(scales, axis))
        return [(filter, codes.tobytes()), (Operand(I32, (channels,)), bias.tobytes())]
    signed = kind == "int8"
    codes = random.integers(-128 if signed else 0, 128 if signed else 256, shape).astype("i1" if signed else "u1")
    filter = Operand(Q8S if signed else Q8, shape, 0.0078125, -3 if signed else 131)
    return [(filter, codes.tobytes()), (Operand(I32, (channels,), 0.5 * 0.0078125), bias.tobytes())]


def image(kind: str, shape: tuple[int, ...], scale: float, zero_point: int) -> Operand:
    if kind == "float":
        return Operand(F32, shape)
    signed = kind.startswith("int8")
    return Operand(Q8S if signed else Q8, shape, scale, zero_point - 128 * signed)


def extents(size: tuple[int, int], filter: tuple[int, ...]) -> tuple[int, int]:
    rows, columns, stride, dilation, padding, _ = filter
    reaches = ((rows - 1) * dilation + 1, (columns - 1) * dilation + 1)
    vector_loop = [s if padding == SAME else s - reach + 1 for s, reach in zip(size, reaches, strict=True)]
    return -(-vector_loop[0] // stride), -(-vector_loop[1] // stride)


def convolution(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> Model:
    batch, height, width, channels, filters = size
    rows, columns, stride, dilation, padding, activation = filter
    constants = weights(kind, (filters, rows, columns, channels), filters, 0, np.random.default_rng(1))
    out = image(kind, (batch, *extents((height, width), filter), filters), 2.0, 120)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, activation, False, dilation, dilation]
    return one_operation(OperationType.CONV_2D, arguments, out)


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_are_the_interpreter_s(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> None:
    assert_kernels_agree(convolution(kind, size, filter))


@pytest.mark.parametrize("filter", [*FILTERS, (5, 7, 1, 1, SAME, 0)])
@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_depthwise_convolutions_are_the_interpreter_s(
    kind: str, size: tuple[int, ...], filter: tuple[int, ...]
) -> None:
    batch, height, width, channels, _ = size
    rows, columns, stride, dilation, padding, activation = filter
    constants = weights(kind, (1, rows, columns, channels), channels, 3, np.random.default_rng(2))
    out = image(kind, (batch, *extents((height, width), filter), channels), 0.25, 110)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, 1, activation, False, dilation, dilation]

    assert_kernels_agree(one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, out))


@pytest.mark.parametrize("size", [(1, 8, 8, 8, 16, 2), (2, 7, 5, 9, 3, 3), (1, 13, 11, 14, 66, 2), (1, 4, 6, 5, 85, 5)])
@pytest.mark.parametrize("filter", [filter for filter in FILTERS if filter[3] == 1])
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_convolutions_are_the_interpreter_s(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> None:
    batch, height, width, channels, filters, groups = size
    rows, columns, stride, _, padding, activation = filter
    constants = weights(kind, (filters, rows, columns, channels // groups), filters, 0, np.random.default_rng(1))
    out = image(kind, (batch, *extents((height, width), filter), filters), 2.0, 120)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, groups, activation, False]

    assert_kernels_agree(one_operation(OperationType.GROUPED_CONV_2D, arguments, out))


SPREADS = [  # filter height and width, stride, paddings left, right, top, bottom, activation
    (2, 2, 2, (0, 0, 0, 0), 0),
    (3, 3, 2, (0, 1, 0, 1), 1),
    (3, 4, 1, (1, 1, 0, 2), 3),
    (4, 4, 2, (1, 1, 1, 1), 0),
    (1, 2, 3, (0, 0, 0, -2), 0),
    (5, 3, 3, (2, 0, 3, 1), 2),
]


@pytest.mark.parametrize("size", [(1, 8, 8, 8, 16), (2, 4, 5, 3, 1), (1, 5, 3, 17, 13)])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_transposed_convolutions_are_the_interpreter_s(
    kind: str, size: tuple[int, ...], spread: tuple[int, int, int, tuple[int, int, int, int], int]
) -> None:
    batch, height, width, channels, filters = size
    rows, columns, stride, (left, right, top, bottom), activation = spread
    constants = weights(kind, (filters, rows, columns, channels), filters, 0, np.random.default_rng(1))
    tall, wide = (height - 1) * stride + rows - top - bottom, (width - 1) * stride + columns - left - right
    source, out = image(kind, (batch, height, width, channels), 0.5, 115), (batch, tall, wide, filters)
    arguments = [source, *constants, left, right, top, bottom, stride, stride, activation, False]

    assert_kernels_agree(one_operation(OperationType.TRANSPOSE_CONV_2D, arguments, image(kind, out, 1.0, 120)))


@pytest.mark.parametrize("size", [(1, 9, 8, 1, 8), (2, 7, 5, 3, 2), (1, 13, 11, 5, 9), (1, 4, 5, 16, 3)])
@pytest.mark.parametrize("filter", [FILTERS[1], FILTERS[2]])
@pytest.mark.parametrize("kind", KINDS)
def test_depth_multipliers_are_the_interpreter_s(kind: str, size: tuple[int, ...], filter: tuple[int, ...]) -> None:
    batch, height, width, channels, multiplier = size
    rows, columns, stride, dilation, padding, activation = filter
    filters = channels * multiplier
    constants = weights(kind, (1, rows, columns, filters), filters, 3, np.random.default_rng(4))
    out = image(kind, (batch, *extents((height, width), filter), filters), 0.25, 110)
    source = image(kind, (batch, height, width, channels), 0.5, 115)
    arguments = [source, *constants, padding, stride, stride, multiplier, activation, False, dilation, dilation]

    assert_kernels_agree(one_operation(OperationType.DEPTHWISE_CONV_2D, arguments, out))


@pytest.mark.parametrize("size", [(1, 16, 8), (1, 1000, 1001), (5, 3, 17), (7, 64, 1)])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_fully_connected_is_the_interpreter_s(kind: str, size: tuple[int, int, int]) -> None:
    batch, length, units = size
    constants = weights(kind, (units, length), units, 0, np.random.default_rng(3))
    arguments = [image(kind, (batch, length), 0.5, 115), *constants, 0]

    assert_kernels_agree(
        one_operation(OperationType.FULLY_CONNECTED, arguments, image(kind, (batch, units), 2.0, 120)), tolerance=1e-4
    )


@pytest.mark.parametrize("multiplier", [1, 3])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_place_of_a_panel_has_its_numbers(target: Target, multiplier: int) -> None:
    for channels in range(multiplier, 70, multiplier):
        shape, window = (1, 5, 5, channels // multiplier), (1, 3, 3, channels)
        bias = np.arange(channels, dtype=np.int32)
        tensors = {
            "float": (Tensor(shape, FLOAT), Tensor(window, FLOAT, value=np.ones(window, FLOAT)), FLOAT),
            "codes": (
                Tensor(shape, CODES, 0.5, 1),
                Tensor(window, CODES, 0.25, 2, value=np.ones(window, CODES)),
                CODES,
            ),
        }
        for kind, (input, filter, dtype) in tensors.items():
            lowered = LOWERING_RULES[OperationType.DEPTHWISE_CONV_2D](
                input,
                filter,
                Tensor((channels,), FLOAT if kind == "float" else np.dtype("i4"), 0.125, value=bias),
                output=Tensor((1, 3, 3, channels), dtype, 2.0, 3),
                target=target,
                depth_multiplier=multiplier,
                activation=0,
                stride_width=1,
                stride_height=1,
                padding_scheme=VALID,
            )
            assert isinstance(lowered, KernelLaunch)
            assert isinstance(lowered.kernel, DwConvKernel)
            places = lowered.kernel.panels * lowered.kernel.nr
            rows, head = (1, 0) if kind == "float" else (REQUANT_ROWS + 1, 5 * 64)  # those of each channel, of all
            assert len(lowered.constants[1]) == head + 4 * rows * places
