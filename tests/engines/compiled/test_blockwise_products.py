"""Kernels of products with weights in blocks have the interpreter's results, whose definition is computed here, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree_on
from support.small_models import one_operation, with_operand

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.extensions import NAME, PREFIX, TfliteOperation, operation_code
from nnfmq.hal.types import ExtensionNameAndPrefix, LifeTime, Model, Operand, OperandType

pytestmark = pytest.mark.instruction_sets

F32, Q8 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM
ZERO_POINTS = ("middle", "byte", "float")
SPECIAL = np.float32([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, 0, -0.0])
"""Numbers that each replace an element of an input in a run of their own."""


class Product:
    """A model of random weights, and what it computes, in float64."""

    def __init__(
        self, rows: int, length: int, units: int, bits: int, block: int, zero_points: str, rounds: bool = False
    ) -> None:
        random = np.random.default_rng(length + units)
        blocks = -(-length // block)
        packed = random.integers(0, 256, (units, blocks, block * bits // 8)).astype(np.uint8)
        scales = random.uniform(0.2, 1, (units, blocks)).astype(np.float32) / 2**bits
        zeros: Any = np.full((units, blocks), 1 << (bits - 1), np.float32)
        self.bias = random.normal(0, 1, units).astype(np.float32) if rows % 2 else np.zeros(units, np.float32)
        given: Any = None
        if zero_points == "byte":
            zeros = random.integers(0, 1 << bits, zeros.shape).astype(np.uint8)
            given = Operand(Q8, zeros.shape, 1.0), zeros.tobytes()
        if zero_points == "float":
            zeros = random.uniform(0, 1 << bits, zeros.shape).astype(np.float32)
            given = Operand(F32, zeros.shape), zeros.tobytes()
        numbers = (packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)
        steps = numbers.reshape(units, blocks, block) - zeros[..., None].astype(float)
        self.matrix = (steps * scales[..., None]).reshape(units, -1)[:, :length]
        self.inputs = [random.normal(0, 1, (rows, length)).astype(np.float32) for _ in range(1 + len(SPECIAL))]
        for array, number in zip(self.inputs[1:], SPECIAL, strict=True):
            array[rows // 2, length // 2] = number
        constants = [(Operand(Q8, packed.shape, 1.0), packed.tobytes()), (Operand(F32, scales.shape), scales.tobytes())]
        bias = (Operand(F32, (units,)), self.bias.tobytes()) if rows % 2 else None
        arguments = [Operand(F32, (rows, length)), *constants, given, bias, bits, rounds]
        self.model = model(arguments, (rows, units))

    def expected(self, input: Any) -> Any:
        return input.astype(float) @ self.matrix.T + self.bias


def model(arguments: list[Any], shape: tuple[int, ...]) -> Model:
    found = one_operation(operation_code(TfliteOperation.BLOCKWISE_MATMUL), arguments, Operand(F32, shape))
    for position, omitted in ((3, Operand(Q8, (), 1.0)), (4, Operand(F32))):
        if arguments[position] is None:
            found = with_operand(found, position, type=omitted.type, scale=omitted.scale, lifetime=LifeTime.NO_VALUE)
    return replace(found, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))


@pytest.mark.parametrize("size", [(1, 64, 40), (7, 75, 5), (13, 33, 70), (2, 1, 1), (1, 300, 130)])
@pytest.mark.parametrize("zero_points", ZERO_POINTS)
@pytest.mark.parametrize(("bits", "block"), [(2, 16), (4, 32), (8, 64)])
def test_kernels_match_the_interpreter(bits: int, block: int, zero_points: str, size: tuple[int, int, int]) -> None:
    product = Product(*size, bits, block, zero_points)
    assert_kernels_agree_on(product.model, [[array] for array in product.inputs], tolerance=5e-5)


@pytest.mark.parametrize("size", [(1, 64, 40), (7, 75, 5), (13, 33, 70), (2, 1, 1), (1, 600, 130)])
@pytest.mark.parametrize("zero_points", ["middle", "byte"])
@pytest.mark.parametrize(("bits", "block"), [(2, 64), (4, 16), (4, 128), (8, 32), (8, 256)])
def test_kernels_of_rounded_inputs_match_the_interpreter(
    bits: int, block: int, zero_points: str, size: tuple[int, int, int]
) -> None:
    product = Product(*size, bits, block, zero_points, rounds=True)
    assert_kernels_agree_on(product.model, [[array] for array in product.inputs], tolerance=2e-5)


@pytest.mark.parametrize(("bits", "block"), [(2, 256), (4, 32), (8, 256)])
def test_the_largest_sums_of_a_block_are_exact(bits: int, block: int) -> None:
    packed = np.full((3, 1, block * bits // 8), 255, np.uint8)
    constants = [
        (Operand(Q8, packed.shape, 1.0), packed.tobytes()),
        (Operand(F32, (3, 1)), np.ones(3, np.float32).tobytes()),
    ]
    zeros = Operand(Q8, (3, 1), 1.0), bytes(3)
    found = model([Operand(F32, (2, block)), *constants, zeros, None, bits, True], (2, 3))
    input = np.float32([[127], [-127]]) * np.ones(block, np.float32)
    assert_kernels_agree_on(found, [[input]], tolerance=0)
    program, output = prepare(found), np.empty((2, 3), np.float32)
    program.execute([input], [output])
    assert output.tolist() == [[127 * block * ((1 << bits) - 1)] * 3, [-127 * block * ((1 << bits) - 1)] * 3]


@pytest.mark.parametrize("zero_points", ["middle", "byte"])
@pytest.mark.parametrize(("bits", "block"), [(2, 64), (4, 16), (8, 32)])
def test_a_rounded_input_is_that_of_its_definition(bits: int, block: int, zero_points: str) -> None:
    product = Product(4, 75, 9, bits, block, zero_points, rounds=True)
    program, output, input = interpreter.prepare(product.model), np.empty((4, 9), np.float32), product.inputs[0]
    program.execute([input], [output])
    rounded = np.zeros_like(input)
    for begin in range(0, 75, block):
        part = input[:, begin : begin + block]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
        rounded[:, begin : begin + block] = np.round(part / scale) * scale
    assert np.abs(product.expected(input) - product.expected(rounded)).max() > 1e-3
    np.testing.assert_allclose(output, product.expected(rounded), rtol=0, atol=3e-5)


@pytest.mark.parametrize("zero_points", ZERO_POINTS)
@pytest.mark.parametrize(("bits", "block"), [(2, 128), (4, 16), (4, 512), (8, 32)])
def test_a_product_is_that_of_the_dequantized_weights(bits: int, block: int, zero_points: str) -> None:
    product = Product(3, 600, 9, bits, block, zero_points)
    program, output = interpreter.prepare(product.model), np.empty((3, 9), np.float32)
    program.execute(product.inputs[:1], [output])
    np.testing.assert_allclose(output, product.expected(product.inputs[0]), rtol=0, atol=3e-5)


def test_packed_weights_take_the_memory_of_the_file() -> None:
    product = Product(1, 512, 256, 4, 32, "byte")
    constants = prepare(product.model).prepacked[0][1]
    weights, scales, zero_points = 512 * 256 // 2, 512 // 32 * 256 * 4, 512 // 32 * 256
    assert constants.nbytes < 1.05 * (weights + scales + zero_points)
