"""Constraints of operations that move, find, resize, hash and draw: each is violated once, as in `test_constraints`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support.one_result import result_of, tensor
from support.small_models import graph, scalar, vector

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType
from nnfmq.validation import validate_model

F32, Q8, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_INT32
HUGE = 1 << 30
NONE, NO_VECTOR = (Operand(kind, (1,), lifetime=LifeTime.NO_VALUE) for kind in (F32, I32))
OMITTED = (NONE, NO_VECTOR)


def f(*dimensions: int) -> Operand:
    return Operand(F32, dimensions)


def q(*dimensions: int, scale: float = 1.0, zero_point: int = 0) -> Operand:
    return Operand(Q8, dimensions, scale, zero_point)


def n(*dimensions: int) -> Operand:
    return Operand(I32, dimensions)


def i(*values: int) -> tuple[Operand, bytes]:
    return vector(values)


def pairs(*values: int) -> tuple[Operand, bytes]:
    return Operand(I32, (len(values) // 2, 2)), struct.pack(f"<{len(values)}i", *values)


IMAGE = f(1, 4, 4, 4)
RANGES = {"begin": i(0, 0), "end": i(2, 2), "strides": i(1, 1), "begin_mask": 0, "end_mask": 0, "shrink_mask": 0}


def strided(**changes: Any) -> list[Any]:
    return [f(2, 2), *(RANGES | changes).values()]


VIOLATIONS: list[tuple[str, str, list[Any], list[Operand]]] = [
    ("SQUEEZE", "C4", [f(1, 2), (n(1, 1), bytes(4))], [f(2)]),
    ("EXPAND_DIMS", "A1", [f(2), 2], [f(2, 1)]),
    ("EXPAND_DIMS", "A1", [f(2), -3], [f(1, 2)]),
    ("PACK", "C6", [0, f(2), f(3)], [f(2, 2)]),
    ("PACK", "C7", [2, f(2)], [f(2, 1)]),
    ("PACK", "C7", [-1, f(2)], [f(2, 1)]),
    ("PACK", "Q7", [0, q(2), q(2, scale=2.0)], [q(2, 2)]),
    ("PAD", "C1", [f(2), pairs(0, -1)], [f(1)]),
    ("PAD", "R1", [f(1, 1, 1, 1, 1), pairs(*(0,) * 10)], [f(1, 1, 1, 1, 1)]),
    ("PAD_V2", "C1", [f(2), pairs(1, 1, 1, 1), 0.0], [f(4)]),
    ("PAD_V2", "C4", [q(2), pairs(1, 1), 256], [q(4)]),
    ("PAD_V2", "C4", [q(2), pairs(1, 1), -1], [q(4)]),
    ("PAD_V2", "Q7", [q(2), pairs(1, 1), 0], [q(4, zero_point=1)]),
    ("MIRROR_PAD", "C1", [f(2), i(1, 1), 0], [f(4)]),
    ("MIRROR_PAD", "C1", [f(2), pairs(-1, 1), 0], [f(2)]),
    ("MIRROR_PAD", "C2", [f(2), pairs(2, 0), 0], [f(4)]),
    ("MIRROR_PAD", "C2", [f(2), pairs(0, 3), 1], [f(5)]),
    ("MIRROR_PAD", "C3", [f(2), pairs(1, 0), 2], [f(3)]),
    ("DEPTH_TO_SPACE", "C1", [f(4, 4, 4), 2], [f(8, 8, 1)]),
    ("DEPTH_TO_SPACE", "C2", [IMAGE, 0], [IMAGE]),
    ("DEPTH_TO_SPACE", "C2", [IMAGE, -2], [IMAGE]),
    ("DEPTH_TO_SPACE", "C3", [IMAGE, 3], [IMAGE]),
    ("SPACE_TO_DEPTH", "C1", [f(4, 4), 2], [f(2, 2)]),
    ("SPACE_TO_DEPTH", "C2", [IMAGE, 0], [IMAGE]),
    ("SPACE_TO_DEPTH", "C4", [f(1, 4, 3, 1), 2], [f(1, 2, 1, 4)]),
    ("SPACE_TO_DEPTH", "C4", [f(1, 3, 4, 1), 2], [f(1, 1, 2, 4)]),
    ("BATCH_TO_SPACE_ND", "C1", [f(4), i(2, 2)], [f(1)]),
    ("BATCH_TO_SPACE_ND", "C2", [f(4, 1, 1, 1), i(2, 0)], [f(1, 2, 2, 1)]),
    ("BATCH_TO_SPACE_ND", "C2", [f(4, 1, 1, 1), i(-2, -2)], [f(1, 2, 2, 1)]),
    ("BATCH_TO_SPACE_ND", "C2", [f(4, 1, 1, 1), i(4)], [f(1, 2, 2, 1)]),
    ("BATCH_TO_SPACE_ND", "C5", [f(3, 1, 1, 1), i(2, 2)], [f(1, 2, 2, 1)]),
    ("BATCH_TO_SPACE_ND", "C5", [f(3, 1, 1, 1), i(HUGE, HUGE)], [f(1, 2, 2, 1)]),
    ("SPACE_TO_BATCH_ND", "C1", [f(4), i(2, 2), pairs(0, 0, 0, 0)], [f(1)]),
    ("SPACE_TO_BATCH_ND", "C2", [IMAGE, i(0, 1), pairs(0, 0, 0, 0)], [IMAGE]),
    ("SPACE_TO_BATCH_ND", "C4", [IMAGE, i(2, 2), pairs(0, 0, 0, 1)], [IMAGE]),
    ("SPACE_TO_BATCH_ND", "C6", [IMAGE, i(2, 2), pairs(-2, 0, 0, 0)], [IMAGE]),
    ("SPACE_TO_BATCH_ND", "C6", [IMAGE, i(2, 2), pairs(0, 0)], [IMAGE]),
    ("SLICE", "C1", [f(2, 2), i(0), i(1, 1)], [f(1, 1)]),
    ("SLICE", "C1", [f(2, 2), i(0, 0), i(1, 1, 1)], [f(1, 1)]),
    ("SLICE", "C2", [f(4), i(-1), i(1)], [f(1)]),
    ("SLICE", "C2", [f(4), i(5), i(-1)], [f(0)]),
    ("SLICE", "C2", [f(4), i(2), i(3)], [f(3)]),
    ("SLICE", "C2", [f(4), i(2), i(-2)], [f(1)]),
    ("SLICE", "C2", [f(4), i((1 << 31) - 1), i((1 << 31) - 1)], [f(1)]),
    ("STRIDED_SLICE", "C1", strided(begin=i(0)), [f(2, 2)]),
    ("STRIDED_SLICE", "C1", strided(strides=i(1, 1, 1)), [f(2, 2)]),
    ("STRIDED_SLICE", "C3", strided(strides=i(1, 0)), [f(2, 2)]),
    ("STRIDED_SLICE", "C4", strided(shrink_mask=2), [f(2)]),
    ("STRIDED_SLICE", "C4", strided(begin=i(0, 1), end=i(2, 0), strides=i(1, -1), shrink_mask=2), [f(2)]),
    ("STRIDED_SLICE", "C4", strided(begin=i(2, 0), shrink_mask=1), [f(2)]),
    ("STRIDED_SLICE", "R1", [f(1, 1, 1, 1, 1), *(i(1, 1, 1, 1, 1),) * 3, 0, 0, 0], [f(1)]),
    ("SPLIT", "A1", [f(4), 1, 2], [f(2), f(2)]),
    ("SPLIT", "C5", [f(4), 0, 4], [f(2), f(2)]),
    ("SPLIT", "C5", [f(4), 0, 0], [f(2)]),
    ("SPLIT", "C6", [f(5), 0, 2], [f(2), f(2)]),
    ("SPLIT", "Q7", [q(4), 0, 2], [q(2), q(2, scale=2.0)]),
    ("TRANSPOSE", "C1", [f(2, 3), i(0, 0)], [f(2, 2)]),
    ("TRANSPOSE", "C1", [f(2, 3), i(0, -1)], [f(2, 3)]),
    ("TRANSPOSE", "C1", [f(2, 3), i(1)], [f(3)]),
    ("TRANSPOSE", "C1", [f(2, 3, 1), NO_VECTOR], [f(1, 3, 2)]),
    ("TRANSPOSE", "R1", [f(1, 1, 1, 1, 1), i(0, 1, 2, 3, 4)], [f(1, 1, 1, 1, 1)]),
    ("REVERSE", "C2", [f(2), i(1)], [f(2)]),
    ("REVERSE", "C2", [f(2), i(-1)], [f(2)]),
    ("REVERSE", "C2", [f(2, 2), i(0, 1)], [f(2, 2)]),
    ("REVERSE", "R1", [f(*(1,) * 9), i(0)], [f(*(1,) * 9)]),
    ("TILE", "C3", [f(2), i(-1)], [f(2)]),
    ("TILE", "C3", [f(2), i(1, 1)], [f(2)]),
    ("TILE", "R2", [f(2), i(HUGE)], [f(0)]),
    ("CHANNEL_SHUFFLE", "A1", [f(4), 2, 1], [f(4)]),
    ("CHANNEL_SHUFFLE", "R1", [f(1, 1, 1, 1, 4), 2, 4], [f(1, 1, 1, 1, 4)]),
    ("CHANNEL_SHUFFLE", "C4", [f(4), 3, 0], [f(4)]),
    ("CHANNEL_SHUFFLE", "C4", [f(4), 0, 0], [f(4)]),
    ("CHANNEL_SHUFFLE", "C4", [f(4), -2, 0], [f(4)]),
    ("GATHER", "A1", [f(4), 1, i(0)], [f(1)]),
    ("GATHER", "C1", [f(4), 0, i(4)], [f(1)]),
    ("GATHER", "C1", [f(4), 0, i(-1)], [f(1)]),
    ("EMBEDDING_LOOKUP", "C1", [i(0, 2), f(2, 2)], [f(2, 2)]),
    ("EMBEDDING_LOOKUP", "C1", [i(-1), f(2, 2)], [f(1, 2)]),
    ("EMBEDDING_LOOKUP", "C2", [i(0), f(2)], [f(1)]),
    ("EMBEDDING_LOOKUP", "C2", [pairs(0, 0), f(2, 2)], [f(1, 2)]),
    ("HASHTABLE_LOOKUP", "C2", [pairs(0, 0), i(0, 1), f(2, 2)], [f(2, 2), q(2)]),
    ("HASHTABLE_LOOKUP", "C2", [pairs(0, 0), pairs(0, 0), f(1, 2)], [f(1, 2), q(1)]),
    ("HASHTABLE_LOOKUP", "C3", [i(0), i(0, 1, 2), f(2, 2)], [f(1, 2), q(1)]),
    ("HASHTABLE_LOOKUP", "Q6", [i(0), i(0, 1), f(2, 2)], [f(1, 2), q(1, scale=2.0)]),
    ("HASHTABLE_LOOKUP", "Q7", [i(0), i(0, 1), q(2, 2)], [q(1, 2, scale=2.0), q(1)]),
    ("TOPK_V2", "C4", [f(4), 0], [f(1), n(1)]),
    ("TOPK_V2", "C4", [f(4), 5], [f(5), n(5)]),
    ("TOPK_V2", "Q7", [q(4), 1], [q(1, zero_point=1), n(1)]),
    ("LSH_PROJECTION", "C1", [f(1, 33), f(2), NONE, 1], [n(1)]),
    ("LSH_PROJECTION", "C1", [f(4), f(2), NONE, 1], [n(1)]),
    ("LSH_PROJECTION", "C2", [f(1, 4), f(2), NONE, 0], [n(1)]),
    ("LSH_PROJECTION", "C2", [f(1, 4), f(2), NONE, 4], [n(1)]),
    ("LSH_PROJECTION", "C3", [f(1, 4), f(2), NONE, 2], [n(4)]),
    ("LSH_PROJECTION", "C3", [f(1, 4), f(2), (f(3), bytes(12)), 2], [n(4)]),
    ("LSH_PROJECTION", "C3", [f(1, 4), f(2), (f(2), bytes(8)), 1], [n(1)]),
    ("LSH_PROJECTION", "C3", [f(1, 4), f(2), (f(2), bytes(8)), 3], [n(1)]),
    ("RANDOM_MULTINOMIAL", "C1", [f(4), 1, i(1, 2)], [n(1)]),
    ("RANDOM_MULTINOMIAL", "C1", [f(1, 4), 1, i(1)], [n(1, 1)]),
    ("RANDOM_MULTINOMIAL", "C2", [f(1, 4), 0, i(1, 2)], [n(1, 1)]),
    ("RANDOM_MULTINOMIAL", "C2", [f(1, 4), -1, i(1, 2)], [n(1, 1)]),
    ("RANDOM_MULTINOMIAL", "R2", [f(1, 4), HUGE, i(1, 2)], [n(1, 0)]),
    ("RESIZE_BILINEAR", "C1", [f(4, 4), 2, 2], [f(2, 2)]),
    ("RESIZE_BILINEAR", "C2", [IMAGE, 0, 2], [IMAGE]),
    ("RESIZE_BILINEAR", "C2", [IMAGE, 2, -1], [IMAGE]),
    ("RESIZE_BILINEAR", "C2", [IMAGE, 0.1, 1.0], [IMAGE]),
    ("RESIZE_BILINEAR", "C2", [IMAGE, 1.0, float("nan")], [IMAGE]),
    ("RESIZE_BILINEAR", "C4", [IMAGE, 1.0, float("inf")], [IMAGE]),
    ("RESIZE_BILINEAR", "C4", [IMAGE, 1e30, 1.0], [f(0, 0, 0, 0)]),
    ("RESIZE_BILINEAR", "C4", [IMAGE, (1 << 24) + 1, 1], [f(0, 0, 0, 0)]),
    ("RESIZE_BILINEAR", "C3", [IMAGE, 2, 2, False, True, True], [IMAGE]),
    ("RESIZE_BILINEAR", "R2", [IMAGE, 1 << 24, 1 << 10], [f(0, 0, 0, 0)]),
    ("RESIZE_NEAREST_NEIGHBOR", "C4", [IMAGE, 1, (1 << 24) + 1, False], [f(0, 0, 0, 0)]),
    ("RESIZE_BILINEAR", "Q7", [q(1, 4, 4, 4), 2, 2], [q(1, 2, 2, 4, scale=2.0)]),
    ("RESIZE_NEAREST_NEIGHBOR", "C1", [f(4, 4), 2, 2, False], [f(2, 2)]),
    ("RESIZE_NEAREST_NEIGHBOR", "C2", [IMAGE, 2, 0, False], [IMAGE]),
    ("RESIZE_NEAREST_NEIGHBOR", "C3", [IMAGE, 2, 2, False, True, True], [IMAGE]),
]


def model_of(code: OperationType, arguments: Sequence[Any], outputs: Sequence[Operand]) -> Model:
    """Return a model of one operation: operands are inputs or omitted, anything else is a constant."""
    operands, constants = [], {}
    for index, argument in enumerate(arguments):
        if isinstance(argument, Operand):
            operands.append(argument if argument in OMITTED else replace(argument, lifetime=LifeTime.SUBGRAPH_INPUT))
        else:
            operand, constants[index] = argument if isinstance(argument, tuple) else scalar(argument)
            operands.append(operand)
    operands += [replace(output, lifetime=LifeTime.SUBGRAPH_OUTPUT) for output in outputs]
    count = len(arguments)
    places = tuple(range(count)), tuple(range(count, len(operands)))
    return graph(operands, [Operation(code, *places)], constants)


def violation_id(violation: Any) -> str:
    return f"{violation[0].lower()}_{violation[1].lower()}"


@pytest.mark.parametrize("violation", VIOLATIONS, ids=violation_id)
def test_N_OPF_a_violated_constraint_is_named_when_the_model_is_prepared(violation: Any) -> None:
    code, constraint, arguments, outputs = violation
    model = model_of(OperationType[code], arguments, outputs)
    validate_model(model)

    with pytest.raises(GeneralFailure, match=rf"operation 0 \({code}\): .*\({constraint}\)$"):
        interpreter.prepare(model)


@pytest.mark.parametrize("image", [f(4, 4, 4), f(1, 4, 4, 4, 1)])
def test_N_OPF_an_image_of_another_rank_cannot_be_in_nchw(image: Operand) -> None:
    model = model_of(OperationType.SPACE_TO_DEPTH, [image, 2, True], [f()])

    with pytest.raises(GeneralFailure, match=r"operation 0 \(SPACE_TO_DEPTH\): image has rank .*\(R1\)$"):
        interpreter.prepare(model)


@pytest.mark.parametrize(("code", "constraint"), [("TRANSPOSE", "C1"), ("RESHAPE", "C2")])
@pytest.mark.parametrize("given", [1, [[0, 1]]])
def test_N_OPF_a_vector_that_comes_with_another_rank_is_rejected(code: str, constraint: str, given: Any) -> None:
    with pytest.raises(GeneralFailure, match=rf"operation 0 \({code}\): .*\({constraint}\)$"):
        result_of(OperationType[code], [tensor([[1, 2]]), tensor(given, "int32")], f(), known=False)


@pytest.mark.parametrize(
    ("code", "rule", "arguments", "outputs"),
    [
        ("PACK", "S1", [0], [f(1)]),
        ("SPLIT", "S4", [f(4), 0, 2], [f(2), n(2)]),
        ("SPLIT", "S1", [f(4), 0], [f(2), f(2)]),
        ("TOPK_V2", "S3", [f(4), 1], [f(1)]),
        ("TOPK_V2", "S4", [f(4), 1], [f(1), f(1)]),
        ("HASHTABLE_LOOKUP", "S2", [i(0), i(0), Operand(OperandType.TENSOR_FLOAT16, (1, 1))], [f(1), q(1)]),
        ("PAD_V2", "S2", [q(2), pairs(1, 1), 1.0], [q(4)]),
        ("RESIZE_BILINEAR", "S2", [IMAGE, 2, 2.0], [IMAGE]),
        ("RESIZE_BILINEAR", "S1", [IMAGE, 2], [IMAGE]),
        ("RESIZE_NEAREST_NEIGHBOR", "S1", [IMAGE, 2, 2], [IMAGE]),
        (
            "LSH_PROJECTION",
            "S2",
            [f(1, 4), Operand(OperandType.TENSOR_QUANT8_ASYMM_SIGNED, (2,), 1.0), NONE, 1],
            [n(1)],
        ),
        ("PAD", "S5", [f(2), NO_VECTOR], [f(2)]),
    ],
)
def test_VAL_1_arguments_that_fit_no_overload_are_rejected(
    code: str, rule: str, arguments: list[Any], outputs: list[Operand]
) -> None:
    with pytest.raises(InvalidArgument, match=rf"\({code}\): .*\({rule}\)$"):
        validate_model(model_of(OperationType[code], arguments, outputs))
