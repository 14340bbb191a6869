"""Codes: quantizing, and products of codes.

ONNX rounds halves to the even code and scales in float32; the HAL rounds halves away from zero, after a rounding of
its own. So products get scales whose quotient is 1: the sums are the codes, but for zero points and the codes' ends.
What is quantized is never half way between two codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nnfmq.hal.types import ChannelQuant, Operand, OperandType, OperationType
from support.one_result import results_of
from support.onnx_cases.images import onnx_pads, window
from support.onnx_runtime import by_onnx, channels_last
from support.oracles import CODES, TYPES, Argument, Array, Builder, Case, Draw, Listed

F32 = OperandType.TENSOR_FLOAT32


def quantize(draw: Draw) -> Case:
    """Build QUANTIZE, beyond the codes' ends as well."""
    output = draw.operand(draw.shape(3))
    steps = draw.rng.integers(-300, 300, output.dimensions) + draw.rng.uniform(-0.49, 0.49, output.dimensions)
    numbers = (steps * output.scale).astype(np.float32)
    return Case(
        lambda: results_of(OperationType.QUANTIZE, [(Operand(F32, numbers.shape), numbers)], [output]),
        lambda: by_onnx("QuantizeLinear", [numbers, *quantization(output)]),
    )


def quantization(operand: Operand) -> list[Array]:
    """Return scale and zero point as ONNX's inputs."""
    dtype = "int8" if operand.type == TYPES["int8"] else "uint8"
    return [np.array(operand.scale, np.float32), np.array(operand.zero_point, dtype)]


def dequantize(draw: Draw) -> Case:
    """Build DEQUANTIZE."""
    argument = draw.tensor(draw.shape(3))
    return Case(
        lambda: results_of(OperationType.DEQUANTIZE, [argument], [Operand(F32)]),
        lambda: by_onnx("DequantizeLinear", [argument[1], *quantization(argument[0])]),
    )


def dequantize_channels(draw: Draw) -> Case:
    """Build DEQUANTIZE with a scale for each channel."""
    shape = draw.shape(draw.below(1, 5))
    axis = draw.below(0, len(shape))
    scales = tuple(draw.real(0.01, 0.1) for _ in range(shape[axis]))
    type = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
    operand = Operand(type, shape, channel_quant=ChannelQuant(scales, axis))
    codes = draw.rng.integers(-128, 128, shape).astype(np.int8)
    return Case(
        lambda: results_of(OperationType.DEQUANTIZE, [(operand, codes)], [Operand(F32)]),
        lambda: by_onnx("DequantizeLinear", [codes, np.array(scales, np.float32)], axis=axis),
    )


def codes(draw: Draw, shape: tuple[int, ...], scale: float, reach: int = 256) -> Argument:
    """Return codes within `reach` of a zero point from the middle of their range."""
    low = -128 * (draw.dtype == "int8")
    operand = Operand(TYPES[draw.dtype], shape, scale, draw.below(low + 100, low + 156))
    values = draw.rng.integers(-reach, reach + 1, shape) + operand.zero_point
    return operand, np.clip(values, low, low + 255).astype(draw.dtype)


def symmetric(draw: Draw, shape: tuple[int, ...], scale: float) -> Argument:
    """Return small weights; ONNX Runtime has signed ones with a zero point of 0 only."""
    operand, values = codes(draw, shape, scale, 3)
    if draw.dtype == "uint8":
        return operand, values
    small = draw.rng.integers(-3, 4, shape).astype(np.int8)
    return Operand(operand.type, shape, scale, 0), small


def convolution(*, channels: bool) -> Builder:
    """Build CONV_2D of codes with paddings, which stand for the zero point."""

    def build(draw: Draw) -> Case:
        many, depth = draw.below(1, 4), draw.below(1, 4)
        extents, strides = [draw.below(1, 4), draw.below(1, 4)], [draw.below(1, 3), draw.below(1, 3)]
        paddings = window(draw, extents, [1, 1])
        image, codes_of_image = codes(draw, (draw.below(1, 3), depth, 6, 7), 0.25, 12)
        filter, values = symmetric(draw, (many, depth, *extents), 0.5)
        output = Operand(image.type, (), 0.125, codes(draw, (1,), 0.125)[0].zero_point)
        bias = draw.rng.integers(-40, 40, many).astype(np.int32)
        bias_operand, scales = Operand(OperandType.TENSOR_INT32, (many,), 0.125), np.array(0.5, np.float32)
        zero_point = np.array(filter.zero_point, values.dtype)
        hal_filter = Operand(filter.type, channels_last(values).shape, 0.5, filter.zero_point)
        if channels:  # 1, 2 or 4 codes for a unit of the sum
            scales = np.float32(2.0) ** draw.rng.integers(-1, 2, many).astype(np.float32)
            quant, type = ChannelQuant(tuple(map(float, scales)), 0), OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL
            hal_filter, zero_point = Operand(type, hal_filter.dimensions, channel_quant=quant), np.zeros(many, np.int8)
            values, bias = draw.rng.integers(-1, 2, values.shape).astype(np.int8), bias // 4
            bias_operand = Operand(OperandType.TENSOR_INT32, (many,))
        rest: list[Any] = [*paddings, strides[1], strides[0], 0, True]
        data = [(image, codes_of_image), (hal_filter, channels_last(values)), (bias_operand, bias)]
        inputs = [codes_of_image, *quantization(image), values, scales, zero_point, *quantization(output), bias]
        return Case(
            lambda: results_of(OperationType.CONV_2D, [*data, *rest], [output]),
            lambda: by_onnx("QLinearConv", inputs, pads=onnx_pads(paddings), strides=strides),
        )

    return build


def matrices(draw: Draw) -> Case:
    """Build BATCH_MATMUL of codes."""
    batch, (rows, length, columns) = draw.shape(draw.below(0, 3), 3), draw.shape(3, 7)
    left, right = codes(draw, (*batch, rows, length), 0.5, 12), codes(draw, (*batch, length, columns), 0.25, 5)
    output = Operand(left[0].type, (), 0.125, codes(draw, (1,), 0.125)[0].zero_point)
    inputs = [left[1], *quantization(left[0]), right[1], *quantization(right[0]), *quantization(output)]
    return Case(
        lambda: results_of(OperationType.BATCH_MATMUL, [left, right, False, False], [output]),
        lambda: by_onnx("QLinearMatMul", inputs),
    )


def fully_connected(draw: Draw) -> Case:
    """Build FULLY_CONNECTED of codes without a bias, which QLinearMatMul lacks."""
    rows, length, units = draw.shape(3, 9)
    argument, filter = codes(draw, (rows, length), 0.5, 12), codes(draw, (units, length), 0.25, 5)
    bias = Operand(OperandType.TENSOR_INT32, (units,), 0.125), np.zeros(units, np.int32)
    output = Operand(argument[0].type, (), 0.125, codes(draw, (1,), 0.125)[0].zero_point)
    inputs = [
        argument[1],
        *quantization(argument[0]),
        filter[1].T.copy(),
        *quantization(filter[0]),
        *quantization(output),
    ]
    return Case(
        lambda: results_of(OperationType.FULLY_CONNECTED, [argument, filter, bias, 0], [output]),
        lambda: by_onnx("QLinearMatMul", inputs),
    )


CASES: list[Listed] = [
    ("QuantizeLinear", CODES, quantize),
    ("DequantizeLinear", CODES, dequantize),
    ("DequantizeLinear, per channel", ("int8",), dequantize_channels),
    ("QLinearConv", CODES, convolution(channels=False)),
    ("QLinearConv, per channel", CODES, convolution(channels=True)),
    ("QLinearMatMul", ("int8",), matrices),
    ("QLinearMatMul", CODES, fully_connected),
]
