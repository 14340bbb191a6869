"""Kernels of products and LSTMs whose inputs are quantized at run time have the interpreter's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree_on
from support.small_models import one_operation, with_operand

from nnfmq.hal.extensions import NAME, PREFIX, TfliteOperation, operation_code
from nnfmq.hal.types import ChannelQuant, ExtensionNameAndPrefix, Model, Operand, OperandType

pytestmark = pytest.mark.instruction_sets

F32 = OperandType.TENSOR_FLOAT32
WEIGHTS: dict[str, tuple[OperandType, float, int]] = {
    "uint8 around the middle": (OperandType.TENSOR_QUANT8_ASYMM, 0.02, 128),
    "uint8 beyond int8": (OperandType.TENSOR_QUANT8_ASYMM, 0.02, 90),
    "int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, 0.02, -7),
    "scales of channels": (OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, 0.0, 0),
}
SYMMETRIC: dict[str, tuple[OperandType, float, int]] = {
    "symmetric int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, 0.02, 0),
    "scales of channels": WEIGHTS["scales of channels"],
}
"""Weights of the operations that compute as TFLite does."""
SPECIAL = np.float32([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, 0, -0.0, 1, -2])
"""Numbers that each replace an element of an input in a run of their own."""


def model(name: str, arguments: list[Any], shape: tuple[int, ...]) -> Model:
    found = one_operation(operation_code(TfliteOperation[name]), arguments, Operand(F32, shape))
    for index, argument in enumerate(arguments):
        found = with_operand(found, index, type=F32) if argument is None else found
    return replace(found, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))


def floats(random: np.random.Generator, *shape: int) -> Any:
    array = random.normal(0, 1, shape).astype(np.float32)
    return Operand(F32, shape), array.tobytes()


def weights(random: np.random.Generator, kind: str, *shape: int) -> Any:
    """Return constant weights, output channels first."""
    type, scale, zero_point = (WEIGHTS | SYMMETRIC)[kind]
    array, quant = random.integers(0, 256, shape).astype(np.uint8), None
    if type == OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL:
        array[array == 128] = 129  # no -128
        quant = ChannelQuant(tuple(map(float, np.float32(random.uniform(0.01, 0.03, shape[0])))), 0)
    return Operand(type, shape, scale, zero_point, channel_quant=quant), array.tobytes()


def inputs(random: np.random.Generator, *shape: int) -> list[list[Any]]:
    """Return usual inputs, all zeros, and one with each special number."""
    found = [random.normal(0, 2, shape).astype(np.float32) for _ in range(2 + len(SPECIAL))]
    found[1][...] = 0
    for array, number in zip(found[2:], SPECIAL, strict=True):
        array.reshape(-1)[array.size // 2] = number
    return [[array] for array in found]


@pytest.mark.parametrize("size", [(1, 64, 32), (7, 33, 5), (40, 130, 70), (2, 1, 1)])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_match_the_interpreter(kind: str, size: tuple[int, int, int]) -> None:
    random, (rows, k, units) = np.random.default_rng(1), size
    arguments = [Operand(F32, (rows, k)), weights(random, kind, units, k), floats(random, units), rows % 2]
    found = model("DYNAMIC_FULLY_CONNECTED", arguments, (rows, units))
    assert_kernels_agree_on(found, inputs(random, rows, k), tolerance=0)


@pytest.mark.parametrize("rounds_bias", [False, True])
@pytest.mark.parametrize("filter", [(3, 3, 1), (1, 1, 2), (2, 5, 1)])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_convolutions_match_the_interpreter(kind: str, filter: tuple[int, int, int], rounds_bias: bool) -> None:
    random, (height, width, stride) = np.random.default_rng(2), filter
    channels, pads = 5 if width == 5 else 12, (width // 2, 0, height // 2, 0)
    arguments = [Operand(F32, (2, 9, 11, channels)), weights(random, kind, 21, height, width, channels)]
    arguments += [floats(random, 21), *pads, stride, stride, 1, False, 1, 1, rounds_bias]
    counts = [
        (size + pad - window) // stride + 1 for size, pad, window in ((9, height // 2, height), (11, width // 2, width))
    ]
    found = model("DYNAMIC_CONV_2D", arguments, (2, *counts, 21))
    assert_kernels_agree_on(found, inputs(random, 2, 9, 11, channels), tolerance=0)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("size", [(1, 64, 32), (7, 33, 5), (40, 130, 70), (2, 1, 1), (1, 3, 17)])
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_products_of_rows_with_own_scales_match_the_interpreter(
    kind: str, size: tuple[int, int, int], asymmetric: bool
) -> None:
    random, (rows, k, units) = np.random.default_rng(4), size
    arguments = [Operand(F32, (rows, k)), weights(random, kind, units, k), floats(random, units), rows % 2, asymmetric]
    found = model("HYBRID_FULLY_CONNECTED", arguments, (rows, units))
    assert_kernels_agree_on(found, inputs(random, rows, k), tolerance=0)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("filter", [(3, 3, 1), (1, 1, 2), (2, 5, 1)])
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_convolutions_of_an_image_with_its_own_scale_match_the_interpreter(
    kind: str, filter: tuple[int, int, int], asymmetric: bool
) -> None:
    random, (height, width, stride) = np.random.default_rng(5), filter
    channels = 5 if width == 5 else 12
    arguments = [Operand(F32, (1, 9, 11, channels)), weights(random, kind, 21, height, width, channels)]
    arguments += [floats(random, 21), 1, stride, stride, 1, False, 1, 1, asymmetric]
    found = model("HYBRID_CONV_2D", arguments, (1, -(-9 // stride), -(-11 // stride), 21))
    assert_kernels_agree_on(found, inputs(random, 1, 9, 11, channels), tolerance=0)


@pytest.mark.parametrize("size", [(1, 5, 20, 24), (3, 2, 33, 70)])
@pytest.mark.parametrize("has_peepholes", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_lstms_match_the_interpreter(kind: str, has_peepholes: bool, size: tuple[int, int, int, int]) -> None:
    """Activations differ in their last bits, and so may a byte of a hidden state: few steps are compared."""
    random, (batch, time, elements, units) = np.random.default_rng(3), size
    gates = [weights(random, kind, units, elements) for _ in range(4)]
    gates += [weights(random, kind, units, units) for _ in range(4)]
    none = [None] * 3
    peepholes = [floats(random, units) for _ in range(3)] if has_peepholes else none
    biases = [floats(random, units) for _ in range(4)]
    states = [Operand(F32, (batch, units))] * 2
    tail = [4, 0.0, 0.0, True, *[None] * 4]
    arguments: list[Any] = [
        Operand(F32, (time, batch, elements)),
        *gates,
        *peepholes,
        *biases,
        None,
        None,
        *states,
        *tail,
    ]

    found = model("DYNAMIC_UNIDIRECTIONAL_SEQUENCE_LSTM", arguments, (time, batch, units))
    shapes = ((time, batch, elements), *[(batch, units)] * 2)
    given = [random.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]
    assert_kernels_agree_on(found, [given], tolerance=2e-3)
