"""Constraints of elementwise operations, reductions and their like: each is violated once, as in `test_constraints`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.one_result import result_of, tensor
from support.small_models import one_operation, vector

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import Operand, OperandType, OperationType
from nnfmq.operations import (
    activation,
    binary_arithmetic,
    comparison,
    fill_rank,
    min_max_select,
    quantize_cast,
    reduction,
    softmax,
    unary,
)
from nnfmq.validation import validate_model

F32, Q8, I32, B8 = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_BOOL8,
)


def f(*dimensions: int) -> Operand:
    return Operand(F32, dimensions)


def q(*dimensions: int, scale: float = 1.0, zero_point: int = 0) -> Operand:
    return Operand(Q8, dimensions, scale, zero_point)


def b(*dimensions: int) -> Operand:
    return Operand(B8, dimensions)


def n(*dimensions: int) -> Operand:
    return Operand(I32, dimensions)


MATRIX = (n(1, 1), bytes(4))

COMPARISONS = ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
REDUCTIONS = ("REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_SUM")

VIOLATIONS: list[tuple[str, str, list[Any], Operand]] = [
    ("SUB", "B1", [f(2), f(3), 0], f(3)),
    ("SUB", "B2", [f(1, 1, 1, 1, 2), f(2), 0], f(1, 1, 1, 1, 2)),
    ("SUB", "C1", [n(2), n(2), 1], n(2)),
    ("SUB", "Q2", [q(2), q(2), 0], q(2, scale=2.0**-20)),
    ("SUB", "Q5", [f(2), f(2), 4], f(2)),
    ("DIV", "B1", [f(2), f(3), 0], f(3)),
    ("DIV", "B2", [f(1, 1, 1, 1, 2), f(2), 0], f(1, 1, 1, 1, 2)),
    ("DIV", "C1", [n(2), n(2), 3], n(2)),
    ("DIV", "Q5", [f(2), f(2), -1], f(2)),
    ("POW", "B1", [f(2), f(3)], f(3)),
    ("PRELU", "B1", [f(2), f(3)], f(3)),
    ("PRELU", "Q1", [q(2, scale=2.0**31), q(2)], q(2)),
    *((code, "B1", [f(2), f(3)], f(3)) for code in ("MAXIMUM", "MINIMUM")),
    *((code, "B1", [f(2), f(3)], b(3)) for code in COMPARISONS),
    *((code, "B1", [b(2), b(3)], b(3)) for code in ("LOGICAL_AND", "LOGICAL_OR")),
    ("LOGICAL_NOT", "R4", [b(2)], b(3)),
    ("SELECT", "C1", [b(2), f(2), f(1)], f(2)),
    ("SELECT", "C1", [b(1), f(2), f(2)], f(2)),
    *((code, "R4", [f(2)], f(3)) for code in ("ABS", "NEG", "EXP", "LOG", "SIN", "SQRT", "RSQRT", "CAST")),
    ("FLOOR", "R1", [f(1, 1, 1, 1, 1)], f(1, 1, 1, 1, 1)),
    ("ELU", "R4", [f(2), 1.0], f(3)),
    ("TANH", "Q6", [q(2)], q(2, scale=1 / 256, zero_point=128)),
    ("TANH", "Q6", [q(2)], q(2, scale=1 / 128)),
    ("TANH", "R1", [f(1, 1, 1, 1, 1)], f(1, 1, 1, 1, 1)),
    ("HARD_SWISH", "C1", [q(2, scale=128.0)], q(2)),
    ("LOG_SOFTMAX", "A1", [f(1, 2), 1.0, 2], f(1, 2)),
    ("LOG_SOFTMAX", "C1", [f(1, 2), 0.0, 1], f(1, 2)),
    *((code, "A1", [f(2, 2), vector([2]), True], f(2, 1)) for code in REDUCTIONS),
    *((code, "A1", [b(2, 2), vector([-3]), True], b(2, 1)) for code in ("REDUCE_ALL", "REDUCE_ANY")),
    *((code, "C1", [f(2, 2), MATRIX, True], f(1, 2)) for code in REDUCTIONS),
    *((code, "R1", [f(1, 1, 1, 1, 2), vector([0]), True], f(1, 1, 1, 1, 2)) for code in REDUCTIONS),
    *((code, "Q7", [q(2, 2), vector([0]), True], q(1, 2, scale=2.0)) for code in ("REDUCE_MAX", "REDUCE_MIN")),
    *((code, "A1", [f(2, 2), 2], n(2)) for code in ("ARGMAX", "ARGMIN")),
    *((code, "A1", [f(2, 2), -3], n(2)) for code in ("ARGMAX", "ARGMIN")),
    ("FILL", "C1", [vector([2, -1]), 1.0], f(2, 1)),
    ("FILL", "C1", [MATRIX, 1.0], f(1)),
    ("FILL", "R5", [vector([1] * 33), 1.0], f(*[1] * 33)),
    ("FILL", "R2", [vector([0, *[(1 << 31) - 1] * 2]), 1.0], f(0, 0, 0)),
    ("FILL", "R2", [vector([1 << 16, 1 << 16]), 1.0], f(1 << 16, 0)),
]


def violation_id(code: str, constraint: str, *_: Any) -> str:
    return f"{code.lower()}_{constraint.lower()}"


@pytest.mark.parametrize(
    ("code", "constraint", "arguments", "output"), VIOLATIONS, ids=list(itertools.starmap(violation_id, VIOLATIONS))
)
def test_N_OPF_a_violated_constraint_is_named_when_the_model_is_prepared(
    code: str, constraint: str, arguments: list[Any], output: Operand
) -> None:
    model = one_operation(OperationType[code], arguments, output)

    with pytest.raises(GeneralFailure, match=rf"operation 0 \({code}\): .*\({constraint}\)$"):
        interpreter.prepare(model)


def test_every_constrained_operation_of_these_families_is_in_a_list() -> None:
    families = (
        activation,
        comparison,
        quantize_cast,
        binary_arithmetic,
        fill_rank,
        reduction,
        min_max_select,
        softmax,
        unary,
    )
    in_the_general_list = {"ADD", "MUL", "MEAN", "RELU", "RELU1", "RELU6", "LOGISTIC", "SOFTMAX", "DEQUANTIZE"}
    unconstrained = {"QUANTIZE", "RANK"}

    named = {d.name for family in families for d in family.DECLARATIONS}
    assert named - {code for code, *_ in VIOLATIONS} == in_the_general_list | unconstrained


@pytest.mark.parametrize("dimensions", [[], [-1], [2, -2]])
def test_fill_c1_dimensions_that_come_with_the_request_are_checked(dimensions: list[int]) -> None:
    with pytest.raises(GeneralFailure, match=r"operation 0 \(FILL\): .*\(C1\)$"):
        result_of(OperationType.FILL, [tensor(dimensions, "int32"), 1.0], f(), known=False)


@pytest.mark.parametrize("code", ["RELU1", "RELU6"])
def test_a_denormal_scale_leaves_the_full_range_to_an_activation(code: str) -> None:
    scale = 2.0**-149
    input = tensor([0, 100, 255], "uint8", scale, 100)

    found = result_of(OperationType[code], [input], q(scale=scale, zero_point=100))

    assert found.tolist() == ([0, 100, 255] if code == "RELU1" else [100, 100, 255])


@pytest.mark.parametrize("axis", [2, -3, 2**31 - 1, -(2**31)])
def test_argmax_a1_an_axis_that_comes_with_the_request_is_checked(axis: int) -> None:
    with pytest.raises(GeneralFailure, match=r"operation 0 \(ARGMAX\): .*\(A1\)$"):
        result_of(OperationType.ARGMAX, [tensor(np.zeros((2, 2))), axis], n(), known=False)


@pytest.mark.parametrize(
    ("code", "arguments", "output"),
    [
        ("DIV", [q(2), q(2), 0], q(2)),
        ("POW", [q(2), q(2)], q(2)),
        ("ABS", [q(2)], q(2)),
        ("REDUCE_SUM", [q(2), vector([0]), True], q(1)),
        ("LOGICAL_AND", [n(2), n(2)], b(2)),
        ("SELECT", [n(2), f(2), f(2)], f(2)),
        ("CAST", [b(2)], f(2)),
        ("FILL", [vector([2]), 1], f(2)),
        ("EQUAL", [f(2), n(2)], b(2)),
        ("GREATER", [f(2), f(2)], n(2)),
        ("RANK", [Operand(OperandType.INT32)], Operand(OperandType.INT32)),
    ],
)
def test_S_types_that_the_hal_does_not_have_are_rejected(code: str, arguments: list[Any], output: Operand) -> None:
    with pytest.raises(InvalidArgument, match=r"\(S[24]\)$"):
        validate_model(one_operation(OperationType[code], arguments, output))
