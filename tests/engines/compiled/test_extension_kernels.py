"""Kernels of the built-in extension's operations, compared with the interpreter, whose results they have bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace
from support.compiled import assert_kernels_agree, assert_kernels_agree_on, outputs_of
from support.small_models import one_operation, vector

from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.extensions import NAME, PREFIX, Scheme, TfliteOperation, extended_code, operation_code
from nnfmq.hal.types import ChannelQuant, ExtensionNameAndPrefix, Model, Operand, OperandType, OperationType
from nnfmq.operations.declaration import NUMPY_TYPES

pytestmark = pytest.mark.instruction_sets

F32 = OperandType.TENSOR_FLOAT32
SHAPES = [((1, 512), 512), ((3, 2), 2), ((5, 33), 33), ((2, 7, 5, 3), 0), ((4, 6), 3), ((1, 1), 1), ((2, 5000), 0)]


def declared(model: Model) -> Model:
    """Return a model that may use the extension."""
    return replace(model, extensions=(ExtensionNameAndPrefix(NAME, PREFIX),))


def quantization(shape: tuple[int, ...], row_length: int, asymmetric: bool) -> Model:
    code = operation_code(TfliteOperation.DYNAMIC_QUANTIZE)
    return declared(one_operation(code, [Operand(F32, shape), row_length, asymmetric], Operand(F32, shape)))


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("shape", "row_length"), SHAPES)
def test_dynamic_quantization_matches_the_interpreter(
    shape: tuple[int, ...], row_length: int, asymmetric: bool
) -> None:
    assert_kernels_agree(quantization(shape, row_length, asymmetric), tolerance=0.0)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_rows_of_zeros_positive_negative_and_halfway_values_are_the_interpreter_s(asymmetric: bool) -> None:
    rows = np.zeros((5, 40), np.float32)
    rows[1], rows[2] = np.linspace(0.5, 9, 40), -np.linspace(0.01, 3, 40)
    rows[3], rows[4, 7] = np.arange(-20, 20) * 0.5 * 2, np.nan
    rows[3, 0] = 127
    assert_kernels_agree_on(quantization((5, 40), 40, asymmetric), [[rows]], tolerance=0.0)


@pytest.mark.parametrize(
    ("code", "shape", "arguments", "result"),
    [
        (OperationType.REVERSE, (4, 6), [vector([1])], (4, 6)),
        (OperationType.TRANSPOSE, (5, 7, 3), [vector([2, 0, 1])], (3, 5, 7)),
        (OperationType.SLICE, (9, 33), [vector([1, 2]), vector([4, 31])], (4, 31)),
        (OperationType.CONCATENATION, (3, 8), [Operand(OperandType.TENSOR_QUANT16_SYMM, (3, 5), 0.1), 1], (3, 13)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_16_bits_are_moved_by_kernels(
    code: OperationType, shape: tuple[int, ...], arguments: list[object], result: tuple[int, ...]
) -> None:
    given, out = (Operand(OperandType.TENSOR_QUANT16_SYMM, extents, 0.1) for extents in (shape, result))
    assert_kernels_agree(declared(one_operation(extended_code(code, Scheme.SIXTEEN_BITS), [given, *arguments], out)))


@pytest.mark.parametrize("kind", [OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED])
@pytest.mark.parametrize(
    ("name", "attributes"),
    [(f"Q8_{name}", []) for name in ("ABS", "NEG", "SQRT", "RSQRT", "LOG", "EXP", "ELU")] + [("Q8_CLAMP", [-1.0, 1.0])],
)
def test_functions_of_8_bits_are_tables(name: str, attributes: list[float], kind: OperandType) -> None:
    given, out = Operand(kind, (7, 300), 0.05, 9), Operand(kind, (7, 300), 0.02, 100)
    code = operation_code(TfliteOperation[name])
    assert_kernels_agree(declared(one_operation(code, [given, *attributes], out)))


@pytest.mark.parametrize(
    "kind",
    [F32, OperandType.TENSOR_FLOAT16, OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("depth", [1, 3, 8, 257])
@pytest.mark.parametrize("axis", [-1, 2])
def test_one_hot_rows_have_one_value_at_an_index_that_is_inside(kind: OperandType, depth: int, axis: int) -> None:
    indices = np.array([[0, depth - 1, depth, -1], [2, 1, (1 << 31) - 1, -(1 << 31)]], np.int32)
    on, off = (np.array([value], NUMPY_TYPES[kind]) for value in (1, 0))
    arguments = [Operand(OperandType.TENSOR_INT32, indices.shape), vector([depth]), *[Operand(kind, (1,))] * 2, axis]
    model = one_operation(operation_code(TfliteOperation.ONE_HOT), arguments, Operand(kind, (2, 4, depth)))
    assert_kernels_agree_on(declared(model), [[indices, on, off], [indices, off, on]])


@pytest.mark.parametrize("scales", [(0.05, 9, 0.05, -119), (0.02, -128, 0.05, 3), (3.0, 7, 0.001, 0)])
@pytest.mark.parametrize("result", [OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED])
@pytest.mark.parametrize("kind", [OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED])
def test_requantization_of_8_bits_is_a_table(
    kind: OperandType, result: OperandType, scales: tuple[float, int, float, int]
) -> None:
    code = operation_code(TfliteOperation.REQUANTIZE)
    operands = [Operand(kind, (3, 100), 1.0), Operand(result, (3, 100), 1.0)]
    values = np.resize(np.arange(256), (3, 100)).astype(NUMPY_TYPES[kind])
    model = declared(one_operation(code, [operands[0], *scales], operands[1]))
    assert_kernels_agree_on(model, [[values]])


@pytest.mark.parametrize("scales", [(0.05, 0.02), (0.05, 0.05), (0.01, 0.9), (3.0, 0.001)])
@pytest.mark.parametrize("shape", [(1, 7, 7, 33), (2, 40, 5, 3), (1, 1, 1, 4), (3, 30, 30, 1)])
@pytest.mark.parametrize("kind", [OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED])
@pytest.mark.parametrize("name", ["Q8_MEAN", "Q8_REDUCE_SUM"])
def test_means_and_sums_between_scales_are_compiled(
    name: str, kind: OperandType, shape: tuple[int, ...], scales: tuple[float, float]
) -> None:
    given, out = Operand(kind, shape, scales[0], 9), Operand(kind, (shape[0], shape[3]), scales[1], 100)
    code = operation_code(TfliteOperation[name])
    assert_kernels_agree(declared(one_operation(code, [given, vector([1, 2]), False], out)))


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize(
    ("shape", "padding", "filter", "result"),
    [
        ((2, 9, 7, 33), 1, (3, 3), (2, 9, 7, 33)),
        ((1, 7, 7, 65), 2, (7, 7), (1, 1, 1, 65)),
        ((1, 5, 8, 3), 1, (2, 4), (1, 5, 8, 3)),
        ((1, 300, 300, 1), 2, (300, 300), (1, 1, 1, 1)),
    ],
)
def test_tflite_s_averages_are_compiled(
    shape: tuple[int, ...], padding: int, filter: tuple[int, int], result: tuple[int, ...], activation: int
) -> None:
    given, out = (Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, extents, 0.05, -9) for extents in (shape, result))
    code = operation_code(TfliteOperation.Q8_AVERAGE_POOL_2D)
    assert_kernels_agree(declared(one_operation(code, [given, padding, 1, 1, *filter[::-1], activation], out)))


@pytest.mark.parametrize("kind", [OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED])
@pytest.mark.parametrize(("rows", "length", "units"), [(1, 33, 70), (9, 64, 16), (3, 5, 1), (1, 1, 130)])
@pytest.mark.parametrize("scale", [0.75, 2.0**-9, 0.0113])
def test_tflite_s_products_are_compiled(kind: OperandType, rows: int, length: int, units: int, scale: float) -> None:
    rng = np.random.default_rng(rows + units)
    info = np.iinfo(NUMPY_TYPES[kind])
    weights = rng.integers(info.min, info.max + 1, (units, length)).astype(info.dtype)
    zero_points = (3, 200 if kind == OperandType.TENSOR_QUANT8_ASYMM else 0, 11)
    operands = [
        Operand(kind, (rows, length), 1.0, zero_points[0]),
        (Operand(kind, (units, length), scale, zero_points[1]), weights.tobytes()),
        (Operand(OperandType.TENSOR_INT32, (units,), scale), rng.integers(-500, 500, units).astype(np.int32).tobytes()),
    ]
    code, result = operation_code(TfliteOperation.Q8_FULLY_CONNECTED), Operand(kind, (rows, units), 1.0, zero_points[2])
    assert_kernels_agree(declared(one_operation(code, [*operands, 0], result)))


def test_tflite_s_products_with_a_scale_for_each_unit_are_compiled() -> None:
    rng = np.random.default_rng(5)
    weights = rng.integers(-127, 128, (70, 33)).astype(np.int8)
    scales = ChannelQuant(tuple(map(float, rng.uniform(0.001, 0.02, 70).astype(np.float32))), 0)
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    operands = [
        Operand(kind, (9, 33), 1.0, 3),
        (Operand(OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, (70, 33), channel_quant=scales), weights.tobytes()),
        (Operand(OperandType.TENSOR_INT32, (70,)), rng.integers(-500, 500, 70).astype(np.int32).tobytes()),
    ]
    code = operation_code(TfliteOperation.Q8_FULLY_CONNECTED)
    assert_kernels_agree(declared(one_operation(code, [*operands, 1], Operand(kind, (9, 70), 0.5, -40))))


def function(name: str, values: np.ndarray, *attributes: object) -> Model:
    arguments = [Operand(F32, values.shape), *attributes]
    return declared(one_operation(operation_code(TfliteOperation[name]), arguments, Operand(F32, values.shape)))


@pytest.mark.parametrize("name", ["ERF", "GELU", "GELU approximate"])
def test_the_error_function_and_gelu_are_those_of_the_c_library(name: str) -> None:
    values = np.concatenate([np.linspace(-9, 9, 3001), [0.0, -0.0, np.inf, 2e-38, 1e30]]).astype(np.float32)
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        if name == "GELU approximate":
            expected = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        else:
            erf = np.array([math.erf(x if name == "ERF" else x / math.sqrt(2)) for x in wide])
            expected = erf if name == "ERF" else 0.5 * wide * (1 + erf)
    model = function(name.split()[0], values, *([] if name == "ERF" else [name != "GELU"]))
    program = prepare(model)

    assert program.compiled_ops == {0}
    np.testing.assert_allclose(outputs_of(program, model, [values])[0], expected, rtol=3e-7, atol=1e-6)


def test_round_goes_to_the_nearest_even_integer() -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4999998, 1e9, -3.7, np.inf, np.nan], np.float32)
    assert_kernels_agree_on(function("ROUND", values), [[values]], tolerance=0.0)


I32 = OperandType.TENSOR_INT32
DIVIDENDS = np.array([-(2**31), 2**31 - 1, -7, -1, 0, 1, 7, 1 << 30], np.int32)
DIVISORS = np.array([-1, 1, 3, -3, 2**31 - 1, -(2**31), 7], np.int32)


def division(name: str, *shapes: tuple[int, ...]) -> Model:
    arguments, out = [Operand(I32, shape) for shape in shapes], Operand(I32, np.broadcast_shapes(*shapes))
    return declared(one_operation(operation_code(TfliteOperation[name]), arguments, out))


@pytest.mark.parametrize("count", [1, 5, 64, 9000])
@pytest.mark.parametrize("name", ["FLOOR_MOD", "TRUNCATED_DIV"])
def test_divisions_of_integers_match_the_interpreter(name: str, count: int) -> None:
    rng = np.random.default_rng(count)
    dividends = rng.integers(-1000, 1000, (9, count), dtype=np.int32)
    divisors = np.where(rng.random(count) < 0.5, -1, 1).astype(np.int32) * rng.integers(1, 99, count, dtype=np.int32)
    assert_kernels_agree_on(division(name, (9, count), (count,)), [[dividends, divisors]])
    if count == 1:
        ends = [DIVIDENDS, DIVISORS.reshape(-1, 1)]
        assert_kernels_agree_on(division(name, *(array.shape for array in ends)), [ends])


@pytest.mark.parametrize("name", ["FLOOR_MOD", "TRUNCATED_DIV"])
def test_a_division_by_0_is_an_error(name: str) -> None:
    model, divisors = division(name, (2, 9000), (9000,)), np.ones(9000, np.int32)
    program, inputs = prepare(model), [np.ones((2, 9000), np.int32), divisors]
    assert program.compiled_ops == {0}
    for place in (0, 4096, 8999):
        divisors[place] = 0
        with pytest.raises(GeneralFailure, match=r"operation 0 .*a divisor is 0 \(C1\)"):
            outputs_of(program, model, inputs)
        divisors[place] = 1
    np.testing.assert_array_equal(outputs_of(program, model, inputs)[0], name == "TRUNCATED_DIV")
