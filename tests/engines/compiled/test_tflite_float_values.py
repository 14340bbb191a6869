"""Values of TFLite's operators over the whole range of float32, from both engines: float64's, or LiteRT's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.both_runners import Theirs
from support.compiled import outputs_of
from support.float_values import FUNCTIONS, assert_right, range_of_floats
from support.oracles import Array
from support.tflite_cases import Case, integers, x

import nnfmq
from nnfmq.engines import interpreter
from nnfmq.engines.compiled import partition

ENGINES = pytest.mark.parametrize("engine", ["reference", "compiled"])
OF_ONNX = {
    "ABS": "Abs", "CEIL": "Ceil", "COS": "Cos", "ELU": "Elu", "EXP": "Exp", "FLOOR": "Floor", "HARD_SWISH": "HardSwish",
    "LOG": "Log", "LOGISTIC": "Sigmoid", "NEG": "Neg", "RELU": "Relu", "ROUND": "Round", "SIGN": "Sign", "SIN": "Sin",
    "SQRT": "Sqrt", "TANH": "Tanh",
}  # fmt: skip
REAL: dict[str, Callable[[Array], Array]] = {
    **{name: FUNCTIONS[other] for name, other in OF_ONNX.items()},
    "RELU6": lambda x: np.clip(x, 0, 6),
    "RELU_N1_TO_1": lambda x: np.clip(x, -1, 1),
    "RSQRT": lambda x: 1 / np.sqrt(x),
    "SQUARE": np.square,
}
WITHOUT_KERNEL = {"REDUCE_PROD"}
SPECIAL = [0, 1, 2, 3, 0.5, 1.5, 2.5, 7, 0.1, 1 / 3, 300, 1e30, np.inf, 3.4e38, 1e-38]
ROWS = np.array(
    [
        [300, 1, -1, 1, -1, 1, -1, 0], [np.inf, *[1] * 7], [np.inf] * 8, [-np.inf, *[1] * 7], [-np.inf] * 8,
        [np.nan, *[1] * 7], [*[1] * 7, np.nan], [0] * 8, [np.inf, 0, *[1] * 6], [1e30, -1e30] * 4, [1e-30, 2e-30] * 4,
        [3e38] * 8, [88, 89, 90, 120, -100, 0, 1, 2], [1e-8] * 8,
    ],
    np.float32,
)  # fmt: skip


def computed(content: bytes, given: list[Array], engine: str) -> Array:
    """Return the output of a model; by kernels alone if the engine is the compiling one and there are any."""
    model = nnfmq.load(content).model
    program = (interpreter if engine == "reference" else partition).prepare(model)
    names = {operation.type.name for operation in model.main.operations}
    if engine == "compiled" and not names & WITHOUT_KERNEL:
        assert program.compiled_ops == frozenset(range(len(model.main.operations)))
    (found,) = outputs_of(program, model, given)
    return found


@ENGINES
@pytest.mark.parametrize("operator", REAL)
def test_a_function_of_one_number_is_right_over_the_whole_range(operator: str, engine: str) -> None:
    values = range_of_floats()
    with np.errstate(all="ignore"):
        real = REAL[operator](values.astype(np.float64))
    content = Case(operator, [x(len(values))], [x(len(values))]).content()
    assert_right(values, computed(content, [values], engine), real)


@ENGINES
@pytest.mark.parametrize("approximate", [0, 1])
def test_gelu_keeps_its_digits_where_it_is_small(approximate: int, engine: str) -> None:
    values = range_of_floats()
    content = Case("GELU", [x(len(values))], [x(len(values))], "GeluOptions", {"Approximate": approximate}).content()
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        exponent = -2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        real = wide / (1 + np.exp(exponent)) if approximate else FUNCTIONS["Gelu"](wide)
    assert_right(values, computed(content, [values], engine), real)


def cases() -> list[tuple[Case, list[Any]]]:
    numbers = np.array([*SPECIAL, *np.negative(SPECIAL), np.nan], np.float32)
    first, second = (np.ascontiguousarray(grid.reshape(-1)) for grid in np.meshgrid(numbers, numbers))
    two, rows = [x(len(first)), x(len(first), name="other")], x(*ROWS.shape)
    reduced: Any = ([rows, integers(1)], [x(len(ROWS))], "ReducerOptions", {"KeepDims": False})
    return [
        *((Case(name, two, [x(len(first))]), [first, second]) for name in ("POW", "SQUARED_DIFFERENCE")),
        (Case("SOFTMAX", [rows], [rows], "SoftmaxOptions", {"Beta": 1.0}), [ROWS]),
        (Case("LOG_SOFTMAX", [rows], [rows]), [ROWS]),
        (Case("L2_NORMALIZATION", [rows], [rows], "L2NormOptions"), [ROWS]),
        *((Case(name, *reduced), [ROWS]) for name in ("SUM", "MEAN", "REDUCE_PROD")),
    ]


@ENGINES
@pytest.mark.parametrize(("case", "given"), cases(), ids=lambda value: str(value) if isinstance(value, Case) else "")
def test_infinite_undefined_and_extreme_numbers_give_what_litert_s_reference_kernels_give(
    case: Case, given: list[Array], engine: str
) -> None:
    content = case.content()
    (theirs,) = Theirs(content)(given)
    assert_right(np.broadcast_to(given[0].reshape(-1)[0], theirs.shape), computed(content, given, engine), theirs)
