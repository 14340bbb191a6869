"""Models of one quantized CONV_2D or FULLY_CONNECTED, with types, zero points and weights that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.lowering import products
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import ChannelQuant, Model, Operand, OperandType, OperationType
from nnfmq.operations.declaration import Array
from support.compiled import outputs_of, random_inputs
from support.small_models import one_operation

Q8, Q8S = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
PC, I32 = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_INT32
SAME, VALID = 1, 2
SCALE, WEIGHT_SCALE = 0.5, 0.0078125
"""Scales of inputs, and of filters with one scale."""

PER_CHANNEL = None
SIZES = [  # batch, height, width, channels, output channels
    (1, 5, 5, 8, 16),
    (2, 7, 3, 3, 1),
    (1, 9, 11, 66, 33),
    (1, 4, 4, 64, 100),
    (3, 1, 1, 132, 7),
    (1, 2, 3, 1, 17),
]
WINDOWS = [(1, 1, 1, 1, SAME), (3, 3, 1, 1, SAME), (3, 2, 2, 1, SAME), (2, 3, 1, 2, SAME), (1, 1, 2, 1, VALID)]
"""Rows, columns, stride, dilation, padding."""


class QuantType(NamedTuple):
    """uint8 or int8, and the zero point; None for a filter with a scale per channel."""

    signed: bool
    zero_point: int | None

    @property
    def ends(self) -> tuple[int, int]:
        """The minimum and maximum of the type."""
        return (-128, 127) if self.signed else (0, 255)

    @property
    def weights(self) -> tuple[int, int]:
        """The minimum and maximum of value - zero point."""
        low, high = self.ends
        return low - (self.zero_point or 0), high - (self.zero_point or 0)


INPUTS = [QuantType(False, 0), QuantType(False, 117), QuantType(False, 255), QuantType(True, -128), QuantType(True, 4)]
PATTERNS = ("random", "low", "high", "ends")


def filter_kind(input: QuantType, zero_point: int | None) -> QuantType:
    """Return the type of a filter for `input`; `zero_point` is that of uint8, or PER_CHANNEL."""
    return QuantType(True, None) if zero_point is None else QuantType(input.signed, zero_point - 128 * input.signed)


def quantized_values(kind: QuantType, shape: Sequence[int], pattern: str, random: np.random.Generator) -> Array:
    """Return random values, or only the minimum, the maximum or both."""
    low, high = kind.ends
    ends = {"low": [low], "high": [high], "ends": [low, high]}.get(pattern)
    made = random.integers(low, high + 1, shape) if ends is None else random.choice(ends, shape)
    return made.astype("i1" if kind.signed else "u1")


def quantized_weights(kind: QuantType, weights: Array) -> Array:
    """Return the stored values of `weights`, which must be in the type's range."""
    low, high = kind.weights
    assert low <= weights.min() and weights.max() <= high
    return (weights + (kind.zero_point or 0)).astype("i1" if kind.signed else "u1")


def constants_of(kind: QuantType, data: Array) -> list[Any]:
    """Return a filter with these stored values (output channels first) and a bias, as constants."""
    random, channels = np.random.default_rng(1), data.shape[:1]
    bias = random.integers(-20000, 20000, channels).astype("<i4")
    if kind.zero_point is None:
        scales = tuple(map(float, random.uniform(0.005, 0.01, channels).astype(np.float32)))
        filter = Operand(PC, data.shape, channel_quant=ChannelQuant(scales, 0))
        return [(filter, data.tobytes()), (Operand(I32, channels), bias.tobytes())]
    filter = Operand(Q8S if kind.signed else Q8, data.shape, WEIGHT_SCALE, kind.zero_point)
    return [(filter, data.tobytes()), (Operand(I32, channels, SCALE * WEIGHT_SCALE), bias.tobytes())]


def input_operand(kind: QuantType, shape: tuple[int, ...], scale: float) -> Operand:
    """Return an operand of this type."""
    assert kind.zero_point is not None
    return Operand(Q8S if kind.signed else Q8, shape, scale, kind.zero_point)


def output_operand(input: QuantType, shape: tuple[int, ...], scale: float) -> Operand:
    """Return an output operand of the type of `input`, with a zero point in the middle."""
    return input_operand(QuantType(input.signed, 120 - 128 * input.signed), shape, scale)


def convolution(
    input: QuantType, constants: Sequence[Any], size: tuple[int, ...], moves: tuple[int, int, int], scale: float
) -> Model:
    """Return a CONV_2D of inputs of `size`; `moves` are stride, dilation and padding, `scale` the output's."""
    (batch, height, width, _), (stride, dilation, padding) = size, moves
    out = (batch, -(-height // stride), -(-width // stride), constants[0][0].dimensions[0])
    arguments = [input_operand(input, size, SCALE), *constants, padding, stride, stride, 0, False, dilation, dilation]
    return one_operation(OperationType.CONV_2D, arguments, output_operand(input, out, scale))


def fully_connected(input: QuantType, constants: Sequence[Any], batch: int, scale: float) -> Model:
    """Return a FULLY_CONNECTED over `batch` rows."""
    units, length = constants[0][0].dimensions
    arguments = [input_operand(input, (batch, length), SCALE), *constants, 0]
    return one_operation(OperationType.FULLY_CONNECTED, arguments, output_operand(input, (batch, units), scale))


def inputs_of(model: Model, kind: QuantType, patterns: Sequence[str]) -> list[list[Array]]:
    """Return inputs with each of `patterns`."""
    shape = model.main.operands[model.main.input_indexes[0]].dimensions
    return [[quantized_values(kind, shape, pattern, np.random.default_rng(7))] for pattern in patterns]


def assert_packed_weights_are_restored(model: Model) -> None:
    """Assert that a program from a cache has packed weights and corrected biases, and that no weights are read."""
    first = prepare(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "without_zero_point", lambda filter: pytest.fail("weights are read"))
        second = prepare(model, first.prepacked)
    assert second.compiled_ops == first.compiled_ops == {0}
    inputs = random_inputs(model, 3)
    (expected,) = outputs_of(interpreter.prepare(model), model, inputs)
    for program in (first, second):
        (found,) = outputs_of(program, model, inputs)
        np.testing.assert_array_equal(found, expected)
