"""Models of one product of codes, with weights that a test chooses: zero points, signs and sums at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.lowering import conv_matmul_rules
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import ChannelQuant, Model, Operand, OperandType, OperationType
from nnfmq.operations.signature import Array
from support.compiled import outputs_of, random_inputs
from support.small_models import one_operation

Q8, Q8S = OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
PC, I32 = OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_INT32
SAME, VALID = 1, 2
SCALE, WEIGHT_SCALE = 0.5, 0.0078125
"""Of images, and of the weights of filters without scales per channel."""

PER_CHANNEL = None
SIZES = [  # batch, height, width, channels, filters
    (1, 5, 5, 8, 16),
    (2, 7, 3, 3, 1),
    (1, 9, 11, 66, 33),
    (1, 4, 4, 64, 100),
    (3, 1, 1, 132, 7),
    (1, 2, 3, 1, 17),
]
WINDOWS = [(1, 1, 1, 1, SAME), (3, 3, 1, 1, SAME), (3, 2, 2, 1, SAME), (2, 3, 1, 2, SAME), (1, 1, 2, 1, VALID)]
"""Rows, columns, stride, dilation, padding."""


class Codified(NamedTuple):
    """Whether codes have a sign, and their zero point; that of a filter is None where it has scales per channel."""

    signed: bool
    zero_point: int | None

    @property
    def ends(self) -> tuple[int, int]:
        """The least code and the largest."""
        return (-128, 127) if self.signed else (0, 255)

    @property
    def weights(self) -> tuple[int, int]:
        """The least weight and the largest: codes less their zero point."""
        low, high = self.ends
        return low - (self.zero_point or 0), high - (self.zero_point or 0)


INPUTS = [Codified(False, 0), Codified(False, 117), Codified(False, 255), Codified(True, -128), Codified(True, 4)]
PATTERNS = ("random", "low", "high", "ends")


def filter_kind(input: Codified, zero_point: int | None) -> Codified:
    """Return the kind of a filter for `input`, with a `zero_point` as of codes without sign, or PER_CHANNEL."""
    return Codified(True, None) if zero_point is None else Codified(input.signed, zero_point - 128 * input.signed)


def codes(kind: Codified, shape: Sequence[int], pattern: str, random: np.random.Generator) -> Array:
    """Return codes of any kind, of one end, or of both ends."""
    low, high = kind.ends
    ends = {"low": [low], "high": [high], "ends": [low, high]}.get(pattern)
    made = random.integers(low, high + 1, shape) if ends is None else random.choice(ends, shape)
    return made.astype("i1" if kind.signed else "u1")


def weight_codes(kind: Codified, weights: Array) -> Array:
    """Return the codes of `weights`, all of which the kind must be able to have."""
    low, high = kind.weights
    assert low <= weights.min() and weights.max() <= high
    return (weights + (kind.zero_point or 0)).astype("i1" if kind.signed else "u1")


def constants_of(kind: Codified, data: Array) -> list[Any]:
    """Return a filter of these codes (channels first) and a bias, as constants."""
    random, channels = np.random.default_rng(1), data.shape[:1]
    bias = random.integers(-20000, 20000, channels).astype("<i4")
    if kind.zero_point is None:
        scales = tuple(map(float, random.uniform(0.005, 0.01, channels).astype(np.float32)))
        filter = Operand(PC, data.shape, channel_quant=ChannelQuant(scales, 0))
        return [(filter, data.tobytes()), (Operand(I32, channels), bias.tobytes())]
    filter = Operand(Q8S if kind.signed else Q8, data.shape, WEIGHT_SCALE, kind.zero_point)
    return [(filter, data.tobytes()), (Operand(I32, channels, SCALE * WEIGHT_SCALE), bias.tobytes())]


def image(kind: Codified, shape: tuple[int, ...], scale: float) -> Operand:
    """Return an operand of codes of this kind."""
    assert kind.zero_point is not None
    return Operand(Q8S if kind.signed else Q8, shape, scale, kind.zero_point)


def result_of(input: Codified, shape: tuple[int, ...], scale: float) -> Operand:
    """Return what codes like `input` become, with a zero point in the middle."""
    return image(Codified(input.signed, 120 - 128 * input.signed), shape, scale)


def convolution(
    input: Codified, constants: Sequence[Any], size: tuple[int, ...], moves: tuple[int, int, int], scale: float
) -> Model:
    """Return a CONV_2D over images of `size`; `moves` are stride, dilation and padding, `scale` is the result's."""
    (batch, height, width, _), (stride, dilation, padding) = size, moves
    out = (batch, -(-height // stride), -(-width // stride), constants[0][0].dimensions[0])
    arguments = [image(input, size, SCALE), *constants, padding, stride, stride, 0, False, dilation, dilation]
    return one_operation(OperationType.CONV_2D, arguments, result_of(input, out, scale))


def connected(input: Codified, constants: Sequence[Any], batch: int, scale: float) -> Model:
    """Return a FULLY_CONNECTED over `batch` rows."""
    units, length = constants[0][0].dimensions
    arguments = [image(input, (batch, length), SCALE), *constants, 0]
    return one_operation(OperationType.FULLY_CONNECTED, arguments, result_of(input, (batch, units), scale))


def inputs_of(model: Model, kind: Codified, patterns: Sequence[str]) -> list[list[Array]]:
    """Return inputs of each of the PATTERNS that are asked for."""
    shape = model.main.operands[model.main.input_indexes[0]].dimensions
    return [[codes(kind, shape, pattern, np.random.default_rng(7))] for pattern in patterns]


def assert_weights_are_restored(model: Model) -> None:
    """Assert that packed weights, and biases that depend on them, come back from a cache: nothing looks at weights."""
    first = prepare(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_matmul_rules, "_without_zero_point", lambda filter: pytest.fail("weights are looked at"))
        second = prepare(model, first.prepacked)
    assert second.compiled_ops == first.compiled_ops == {0}
    inputs = random_inputs(model, 3)
    (expected,) = outputs_of(interpreter.prepare(model), model, inputs)
    for program in (first, second):
        (found,) = outputs_of(program, model, inputs)
        np.testing.assert_array_equal(found, expected)
