"""Convolutions in every form, fully connected layers, products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnfmq.hal.types import Operand, OperationType
from support.litert import by_litert, shared
from support.litert_cases.images import windowed
from support.one_result import results_of
from support.oracles import (
    FLOAT,
    FLOAT_AND_CODES,
    Argument,
    Builder,
    Case,
    Draw,
    Listed,
    channel_weights,
    integers,
    weights,
)


def result(draw: Draw, shape: tuple[int, ...]) -> Operand:
    """Return an output whose scale leaves most sums of products within the codes."""
    return draw.operand(shape, draw.real(0.3, 1.5))


def filters(
    draw: Draw, shape: tuple[int, ...], argument: Operand, channels: bool, dimension: int, units: int
) -> tuple[Argument, Argument]:
    """Return filter and bias, with a scale for each channel if `channels`."""
    return channel_weights(draw, shape, dimension) if channels else weights(draw, shape, argument, units)


def convolution(name: str, *, channels: bool = False) -> Builder:
    """Build CONV_2D or DEPTHWISE_CONV_2D, with dilation and a fused activation."""
    deep = name == "DEPTHWISE_CONV_2D"

    def build(draw: Draw) -> Case:
        depth, many, same, code = draw.below(1, 4), draw.below(1, 5), draw.below(0, 2), draw.below(0, 4)
        dilations = [draw.below(1, 4), draw.below(1, 4)] if draw.truth() else [1, 1]
        extents, strides = [draw.below(1, 4), draw.below(1, 4)], [draw.below(1, 3), draw.below(1, 3)]
        if max(dilations) > 1:
            strides = [1, 1]
        argument = draw.tensor((draw.below(1, 3), draw.below(7, 11), draw.below(7, 11), depth), -1, 1)
        units = depth * many if deep else many
        shape = (1, *extents, units) if deep else (units, *extents, depth)
        filter, bias = filters(draw, shape, argument[0], channels, 3 if deep else 0, units)
        wide = [(f - 1) * d + 1 for f, d in zip(extents, dilations, strict=True)]
        output = result(draw, (*windowed(argument[1].shape, wide, strides, same)[:3], units))
        data = [argument, filter, bias]
        rest = [2 - same, strides[1], strides[0], *([many] if deep else []), code, False, dilations[1], dilations[0]]
        options = _window(same, strides, code) | {"DilationWFactor": dilations[1], "DilationHFactor": dilations[0]}
        if deep:
            options["DepthMultiplier"] = many
        table = "DepthwiseConv2DOptions" if deep else "Conv2DOptions"
        return shared(name, OperationType[name], data, output, rest, (), table, options)

    return build


def _window(same: int, strides: Sequence[int], code: int) -> dict[str, Any]:
    return {"Padding": 1 - same, "StrideW": strides[1], "StrideH": strides[0], "FusedActivationFunction": code}


def grouped_convolution(*, channels: bool = False) -> Builder:
    """Build GROUPED_CONV_2D, which TFLite has as CONV_2D with flatter filters."""

    def build(draw: Draw) -> Case:
        groups, each, many = draw.below(2, 4), draw.below(1, 4), draw.below(1, 4)
        same, code, strides = draw.below(0, 2), draw.below(0, 4), [draw.below(1, 3), draw.below(1, 3)]
        extents = [draw.below(1, 4), draw.below(1, 4)]
        argument = draw.tensor((draw.below(1, 3), draw.below(4, 9), draw.below(4, 9), groups * each), -1, 1)
        units = groups * many
        filter, bias = filters(draw, (units, *extents, each), argument[0], channels, 0, units)
        output = result(draw, (*windowed(argument[1].shape, extents, strides, same)[:3], units))
        rest = [2 - same, strides[1], strides[0], groups, code, False]
        data, options = [argument, filter, bias], _window(same, strides, code)
        operation = OperationType.GROUPED_CONV_2D
        return shared("CONV_2D", operation, data, output, rest, (), "Conv2DOptions", options)

    return build


def transposed_convolution(*, channels: bool = False) -> Builder:
    """Build TRANSPOSE_CONV_2D; TFLite takes the output's shape first and the image third."""

    def build(draw: Draw) -> Case:
        depth, units, same, code = draw.below(1, 4), draw.below(1, 4), draw.below(0, 2), draw.below(0, 4)
        extents, strides = [draw.below(1, 5), draw.below(1, 5)], [draw.below(1, 4), draw.below(1, 4)]
        argument = draw.tensor((draw.below(1, 3), draw.below(1, 6), draw.below(1, 6), depth), -1, 1)
        filter, bias = filters(draw, (units, *extents, depth), argument[0], channels, 0, units)
        sizes = [
            (n - 1) * s + 1 + draw.below(0, s) if same else (n - 1) * s + f
            for n, f, s in zip(argument[1].shape[1:3], extents, strides, strict=True)
        ]
        shape = (argument[1].shape[0], *sizes, units)
        output, held = result(draw, shape), integers(shape)
        rest = [held, 2 - same, strides[1], strides[0], code, False]
        options = _window(same, strides, code)
        return Case(
            lambda: results_of(OperationType.TRANSPOSE_CONV_2D, [argument, filter, bias, *rest], [output]),
            lambda: by_litert(
                "TRANSPOSE_CONV", [held, filter, argument, bias], [output], "TransposeConvOptions", options
            ),
        )

    return build


def fully_connected(draw: Draw) -> Case:
    """Build FULLY_CONNECTED, of a matrix or of an image that becomes one row for each batch."""
    rows, length, units = draw.shape(3, 9)
    deep = draw.below(1, 4)
    shape = (rows, length * deep) if draw.truth() else (rows, length, 1, deep)
    code = draw.below(0, 4)
    argument = draw.tensor(shape, -1, 1)
    filter, bias = weights(draw, (units, length * deep), argument[0], units)
    data, options = [argument, filter, bias], {"FusedActivationFunction": code}
    output, name = result(draw, (rows, units)), "FULLY_CONNECTED"
    return shared(name, OperationType[name], data, output, [code], (), "FullyConnectedOptions", options)


def matrices(draw: Draw) -> Case:
    """Build BATCH_MATMUL of equal batches, either side transposed or not."""
    batch, (rows, length, columns) = draw.shape(draw.below(0, 3), 3), draw.shape(3, 7)
    turned = [draw.truth(), draw.truth()]
    left = (length, rows) if turned[0] else (rows, length)
    right = (columns, length) if turned[1] else (length, columns)
    data = [draw.tensor((*batch, *left), -1, 1), draw.tensor((*batch, *right), -1, 1)]
    options = dict(zip(("AdjX", "AdjY"), turned, strict=True))
    output = result(draw, (*batch, rows, columns))
    return shared("BATCH_MATMUL", OperationType.BATCH_MATMUL, data, output, turned, (), "BatchMatMulOptions", options)


CASES: list[Listed] = [
    *((name, FLOAT_AND_CODES, convolution(name)) for name in ("CONV_2D", "DEPTHWISE_CONV_2D")),
    *(
        (f"{name}, per channel", ("int8",), convolution(name, channels=True))
        for name in ("CONV_2D", "DEPTHWISE_CONV_2D")
    ),
    ("CONV_2D, grouped", FLOAT_AND_CODES, grouped_convolution()),
    ("CONV_2D, grouped, per channel", ("int8",), grouped_convolution(channels=True)),
    ("TRANSPOSE_CONV", FLOAT_AND_CODES, transposed_convolution()),
    ("TRANSPOSE_CONV, per channel", ("int8",), transposed_convolution(channels=True)),
    ("FULLY_CONNECTED", FLOAT_AND_CODES, fully_connected),
    ("BATCH_MATMUL", (*FLOAT, "int8"), matrices),
]
