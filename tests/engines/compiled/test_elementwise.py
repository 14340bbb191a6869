"""Elementwise kernels, compared with the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.compiled import assert_kernels_agree, outputs_of
from support.small_models import one_operation

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import CLAMPS, Model, Operand, OperandType, OperationType

pytestmark = pytest.mark.instruction_sets

F32, Q8, Q8S = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED
I32, B8 = OperandType.TENSOR_INT32, OperandType.TENSOR_BOOL8
KINDS = {"float": F32, "int32": I32, "uint8": Q8, "int8": Q8S, "bool": B8}
CODES = ("uint8", "int8")

PAIRS = [  # two shapes
    ((2, 3, 5, 7), (2, 3, 5, 7)),
    ((1, 56, 56, 24), (1, 56, 56, 24)),
    ((4, 9, 33), (33,)),
    ((33, 1), (1, 70)),
    ((2, 5, 4, 1), (2, 1, 4, 19)),
    ((1,), (3, 5)),
    ((3, 1, 2, 1), (1, 5, 1, 3)),
    ((1,), (1, 1)),
    ((20000,), (1,)),
    ((2, 30, 20, 3), (3,)),
    ((1, 5), (77, 5)),
    ((1, 4, 1, 6), (3, 4, 8, 6)),
    ((3,), (2, 30, 20, 1)),
]
SCALES = [  # first, second, output, and zero points of uint8
    ((0.5, 0.5, 1.0), (128, 0, 3)),
    ((0.0312, 0.0917, 0.11), (12, 200, 131)),
    ((1.7, 0.003, 0.9), (255, 128, 0)),
    ((0.02, 0.02, 0.0007), (100, 128, 128)),
]


def tensor(kind: str, shape: tuple[int, ...], scale: float = 0.0, zero_point: int = 0) -> Operand:
    if kind in CODES:
        return Operand(KINDS[kind], shape, scale or 0.0473, zero_point - 128 * (kind == "int8"))
    return Operand(KINDS[kind], shape)


def pair(
    code: str, kind: str, shapes: tuple[tuple[int, ...], ...], *rest: int, out: str = "", scales: int = 1
) -> Model:
    real, zero_points = SCALES[scales]
    one, other = (
        tensor(kind, shape, *q) for shape, q in zip(shapes, zip(real, zero_points, strict=True), strict=False)
    )
    result = tensor(out or kind, np.broadcast_shapes(*shapes), real[2], zero_points[2])
    return one_operation(OperationType[code], [one, other, *rest], result)


@pytest.mark.parametrize("shapes", PAIRS)
@pytest.mark.parametrize(
    ("code", "kind"),
    [*product(("ADD", "SUB", "MUL"), ("float", "int32", *CODES)), ("DIV", "float")],
)
def test_arithmetic_matches_the_interpreter(code: str, kind: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    activation = 0 if kind == "int32" else (PAIRS.index(shapes) % 4)
    assert_kernels_agree(pair(code, kind, shapes, activation))


def every_pair(model: Model) -> list[np.ndarray]:
    """Return operands of shapes (256, 1) and (1, 256) with every quantized value."""
    dtype = np.uint8 if model.main.operands[0].type == Q8 else np.int8
    ones = np.arange(256, dtype=np.uint8).view(dtype)
    return [ones.reshape(256, 1), ones.reshape(1, 256)]


@pytest.mark.parametrize("scales", range(len(SCALES)))
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(
    ("code", "rest"),
    [
        *product(("ADD", "SUB", "MUL"), ([0], [1])),
        *product(("MAXIMUM", "MINIMUM", "PRELU", "LESS", "EQUAL"), ([],)),
    ],
)
def test_every_pair_of_quantized_values_matches_the_interpreter(
    code: str, rest: list[int], kind: str, scales: int
) -> None:
    out = "bool" if code in ("LESS", "EQUAL") else kind
    model = pair(code, kind, ((256, 1), (1, 256)), *rest, out=out, scales=scales)
    compiled, reference = prepare(model), interpreter.prepare(model)

    assert compiled.compiled_ops == {0}
    np.testing.assert_array_equal(
        outputs_of(compiled, model, every_pair(model))[0], outputs_of(reference, model, every_pair(model))[0]
    )


@pytest.mark.parametrize("shapes", PAIRS)
@pytest.mark.parametrize(
    ("code", "kind"),
    [*product(("MAXIMUM", "MINIMUM"), ("float", "int32", *CODES)), *product(("PRELU",), ("float", *CODES))],
)
def test_min_max_and_prelu_match_the_interpreter(code: str, kind: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert_kernels_agree(pair(code, kind, shapes))


@pytest.mark.parametrize("shapes", PAIRS[2:5])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *product(
            ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), ("float", "int32", "bool", *CODES)
        ),
        *product(("LOGICAL_AND", "LOGICAL_OR"), ("bool",)),
    ],
)
def test_comparisons_match_the_interpreter(code: str, kind: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert_kernels_agree(pair(code, kind, shapes, out="bool"))


def test_int32_quotients_match_the_interpreter() -> None:
    least, most = -(2**31), 2**31 - 1
    values = np.array([0, 1, -1, 2, -2, 7, -7, 3, least, least + 1, most, most - 1, 12345, -46341], np.int32)
    model = pair("DIV", "int32", ((14, 1), (1, 14)), 0)
    inputs = [values.reshape(14, 1), values.reshape(1, 14)]
    compiled, reference = prepare(model), interpreter.prepare(model)
    with np.errstate(all="ignore"):
        found, expected = (outputs_of(program, model, inputs)[0] for program in (compiled, reference))

    assert compiled.compiled_ops == {0}
    np.testing.assert_array_equal(found, expected)


def test_powers_match_the_interpreter() -> None:
    model = pair("POW", "float", ((300, 1), (1, 9)))
    bases = np.random.default_rng(5).uniform(0.01, 50, (300, 1)).astype(np.float32)
    exponents = np.float32([[0, 1, -1, 0.5, 2, -3.3, 7, 1e-3, -0.0]])
    found, expected = (
        outputs_of(engine(model), model, [bases, exponents])[0] for engine in (prepare, interpreter.prepare)
    )

    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (3, 41), (2, 9000)])
@pytest.mark.parametrize("kind", ["float", "int32", *CODES])
def test_select_matches_the_interpreter(kind: str, shape: tuple[int, ...]) -> None:
    operands = [tensor("bool", shape), tensor(kind, shape, 0.02, 9), tensor(kind, shape, 0.07, 200)]
    assert_kernels_agree(one_operation(OperationType.SELECT, operands, tensor(kind, shape, 0.07, 200)))


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 41), (2, 9000)])
@pytest.mark.parametrize(
    ("code", "source", "out"),
    [
        *product(["QUANTIZE"], ["float"], CODES),
        *product(["DEQUANTIZE"], CODES, ["float"]),
        *[("CAST", a, b) for a, b in product(("float", "int32", "uint8"), repeat=2) if a != b],
        ("LOGICAL_NOT", "bool", "bool"),
    ],
)
def test_conversions_match_the_interpreter(code: str, source: str, out: str, shape: tuple[int, ...]) -> None:
    model = one_operation(OperationType[code], [tensor(source, shape, 0.031, 77)], tensor(out, shape, 0.017, 120))
    assert_kernels_agree(model)


# Subnormal numbers are 0 in a pool's threads, not in an emulator: see test_thread_pool.
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 2e-38, -2e-38, 3e38, -3e38, 88.8, -88.8, -104.5, 0.5, -0.5, 1e-5, -1e-5]
NEAR = 3 * 2.0**-23  # three units in the last place
RIGHT: dict[str, Callable[[Any], Any]] = {  # in float64
    "ELU": lambda x: np.where(x < 0, 0.75 * np.expm1(x), x),
    "EXP": np.exp,
    "LOG": np.log,
    "LOGISTIC": lambda x: 1 / (1 + np.exp(-x)),
    "SIN": np.sin,
    "TANH": np.tanh,
}
CLAMP_NAMES = [code.name for code in CLAMPS]
EXACT = ("ABS", "FLOOR", "HARD_SWISH", "NEG", *CLAMP_NAMES, "RSQRT", "SQRT")


def special_and_random() -> Any:
    random = np.random.default_rng(3)
    return np.concatenate([SPECIAL, random.normal(size=6000), random.uniform(-110, 110, 6000)]).astype(np.float32)


def of_floats(code: str, values: Any) -> Model:
    arguments = [tensor("float", values.shape), *([0.75] if code == "ELU" else [])]
    return one_operation(OperationType[code], arguments, tensor("float", values.shape))


@pytest.mark.parametrize("code", RIGHT)
def test_float_functions_are_within_three_units_in_the_last_place(code: str) -> None:
    values = special_and_random()
    model = of_floats(code, values)
    program = prepare(model)
    with np.errstate(all="ignore"):
        right = RIGHT[code](values.astype(np.float64)).astype(np.float32)

    assert program.compiled_ops == {0}
    smallest = np.finfo(np.float32).tiny
    np.testing.assert_allclose(outputs_of(program, model, [values])[0], right, rtol=NEAR, atol=smallest)


@pytest.mark.parametrize(
    "code", ["MAXIMUM", "MINIMUM", "ADD", "MUL", "DIV", "PRELU", "EQUAL", "NOT_EQUAL", "LESS_EQUAL"]
)
def test_pairs_of_special_floats_match_the_interpreter(code: str) -> None:
    values = np.float32(SPECIAL)
    rest, out = ([3] if code in ("ADD", "MUL", "DIV") else []), ("bool" if "EQUAL" in code else "float")
    model = pair(code, "float", ((16, 1), (1, 16)), *rest, out=out)
    inputs = [values.reshape(16, 1), values.reshape(1, 16)]
    with np.errstate(all="ignore"):
        found, expected = (outputs_of(engine(model), model, inputs)[0] for engine in (prepare, interpreter.prepare))

    np.testing.assert_array_equal(found, expected)


SUBNORMAL = np.float32([1e-40, -1e-40, 3e-39, 2e-38, 1.5e-45, -1.5e-45, 0.0, 1.2e-38] * 5)


OF_ONE: dict[str, Callable[[Any], Any]] = {
    "ABS": np.abs,
    "ELU": lambda x: np.where(x < 0, 0.75 * x, x),
    "FLOOR": np.floor,
    "LOG": np.log,
    "NEG": np.negative,
    "RELU": lambda x: np.maximum(x, 0),
    "RELU6": lambda x: np.clip(x, 0, 6),
    "RSQRT": lambda x: 1 / np.sqrt(x),
    "SQRT": np.sqrt,
    "TANH": np.tanh,
}
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "ADD": np.add,
    "DIV": np.divide,
    "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum,
    "MUL": np.multiply,
    "SUB": np.subtract,
}


@pytest.mark.parametrize("code", OF_ONE)
def test_functions_of_subnormal_numbers_are_those_of_ieee_754(code: str) -> None:
    values = abs(SUBNORMAL) if code in ("SQRT", "RSQRT", "LOG") else SUBNORMAL
    model = of_floats(code, values)
    with np.errstate(all="ignore"):
        expected = OF_ONE[code](values.astype(np.float64)).astype(np.float32)
        found = outputs_of(prepare(model), model, [values])[0]
    np.testing.assert_allclose(found, expected, rtol=NEAR, atol=3e-45)  # two units of the smallest number


@pytest.mark.parametrize("code", OF_TWO)
def test_pairs_of_subnormal_numbers_are_computed_as_ieee_754_says(code: str) -> None:
    others = np.float32([2, 0.25, -0.5, 1e-40, 3e-39])
    model = pair(code, "float", ((40, 1), (1, 5)), *([0] if code in ("ADD", "SUB", "MUL", "DIV") else []))
    inputs = [SUBNORMAL.reshape(40, 1), others.reshape(1, 5)]
    found = outputs_of(prepare(model), model, inputs)[0]
    with np.errstate(all="ignore"):
        expected = OF_TWO[code](*(array.astype(np.float64) for array in inputs)).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_exponentials_are_subnormal_where_they_are_less_than_the_least_normal_number() -> None:
    values = np.concatenate([np.linspace(-104.5, -86, 4001), [-np.inf, np.nan, -np.nan]]).astype(np.float32)
    model = of_floats("EXP", values)
    found = outputs_of(prepare(model), model, [values])[0]
    expected = np.exp(values.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=NEAR, atol=1.5e-45)
    assert (found[expected == 0] == 0).all() and np.isnan(found[-2:]).all()


@pytest.mark.parametrize("code", EXACT)
def test_exact_float_functions_match_the_interpreter(code: str) -> None:
    values = special_and_random()
    model = of_floats(code, values)
    compiled, reference = prepare(model), interpreter.prepare(model)
    with np.errstate(all="ignore"):
        found, expected = (outputs_of(program, model, [values])[0] for program in (compiled, reference))

    assert compiled.compiled_ops == {0}
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("quantize", [(0.031, 77), (1.3, 0), (0.0009, 255)])
@pytest.mark.parametrize("kind", CODES)
def test_quantization_of_floats_matches_the_interpreter(kind: str, quantize: tuple[float, int]) -> None:
    """Special values, all ties and their neighbours."""
    scale = np.float32(quantize[0])
    ties = (np.arange(-600, 600) / 2).astype(np.float32) * scale
    values = np.concatenate(
        [np.float32(SPECIAL), ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    )
    source, out = tensor("float", values.shape), tensor(kind, values.shape, *quantize)
    model = one_operation(OperationType.QUANTIZE, [source], out)
    with np.errstate(all="ignore"):
        found, expected = (outputs_of(engine(model), model, [values])[0] for engine in (prepare, interpreter.prepare))

    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("out", ["int32", "uint8"])
def test_casts_of_floats_match_the_interpreter(out: str) -> None:
    values = np.float32([*SPECIAL, 255.5, 256, -0.99, 2**31, -(2**31), 2147483520, -3e9])
    model = one_operation(OperationType.CAST, [tensor("float", values.shape)], tensor(out, values.shape))
    found, expected = (outputs_of(engine(model), model, [values])[0] for engine in (prepare, interpreter.prepare))

    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(256,), (3, 1001), (7,), (1, 130, 130, 1)])
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("code", ["HARD_SWISH", "LOGISTIC", *CLAMP_NAMES, "RSQRT", "TANH"])
def test_functions_of_quantized_values_match_the_interpreter(code: str, kind: str, shape: tuple[int, ...]) -> None:
    fixed = {"LOGISTIC": (1 / 256, 0), "TANH": (1 / 128, 128), "HARD_SWISH": (0.05, 10), "RSQRT": (0.02, 3)}
    out = fixed.get(code, (0.0473, 101))
    model = one_operation(OperationType[code], [tensor(kind, shape, 0.0473, 101)], tensor(kind, shape, *out))

    assert_kernels_agree(model)


@pytest.mark.parametrize("code", ["ABS", "NEG"])
def test_int32_functions_wrap_around_as_the_interpreter_does(code: str) -> None:
    values = np.array([0, 1, -1, 2**31 - 1, -(2**31), 12345, -9], np.int32)
    model = one_operation(OperationType[code], [tensor("int32", (7,))], tensor("int32", (7,)))
    found, expected = (outputs_of(engine(model), model, [values])[0] for engine in (prepare, interpreter.prepare))

    np.testing.assert_array_equal(found, expected)
