"""Strided copies, transposes and gathers, compared with the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.compiled import assert_kernels_agree
from support.small_models import graph, one_operation, scalar, vector

from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType

pytestmark = pytest.mark.instruction_sets

I32 = OperandType.TENSOR_INT32
TYPES = {
    "float32": (OperandType.TENSOR_FLOAT32, 0.0, 0),
    "float16": (OperandType.TENSOR_FLOAT16, 0.0, 0),
    "uint8": (OperandType.TENSOR_QUANT8_ASYMM, 0.5, 100),
    "int8": (OperandType.TENSOR_QUANT8_ASYMM_SIGNED, 0.25, -7),
}


def tensor(kind: str, *shape: int) -> Operand:
    type, scale, zero_point = TYPES[kind]
    return Operand(type, shape, scale, zero_point)


def matrix(rows: Sequence[Sequence[int]]) -> tuple[Operand, bytes]:
    return Operand(I32, (len(rows), 2)), np.array(rows, "<i4").tobytes()


MOVES: dict[str, tuple[OperationType, tuple[int, ...], list[Any], tuple[int, ...]]] = {
    "slice of rows": (OperationType.SLICE, (3, 7, 5), [vector([1, 2, 0]), vector([2, 3, 5])], (2, 3, 5)),
    "slice of a row": (OperationType.SLICE, (100,), [vector([3]), vector([90])], (90,)),
    "slice of columns": (OperationType.SLICE, (9, 33), [vector([0, 31]), vector([-1, 2])], (9, 2)),
    "strided slice": (
        OperationType.STRIDED_SLICE,
        (8, 9, 4),
        [vector([7, 1, 0]), vector([0, 9, 4]), vector([-2, 3, 1]), 0, 0, 0],
        (4, 3, 4),
    ),
    "strided slice, one axis shrunk": (
        OperationType.STRIDED_SLICE,
        (4, 9, 5),
        [vector([1, 0, 4]), vector([2, 9, 0]), vector([1, 1, -1]), 2, 4, 1],
        (9, 5),
    ),
    "transpose of a matrix": (OperationType.TRANSPOSE, (37, 21), [None], (21, 37)),
    "transpose of a small matrix": (OperationType.TRANSPOSE, (5, 7), [None], (7, 5)),
    "transpose of a narrow matrix": (OperationType.TRANSPOSE, (1000, 3), [None], (3, 1000)),
    "two planes interleaved": (OperationType.TRANSPOSE, (2, 2, 77), [vector([0, 2, 1])], (2, 77, 2)),
    "three planes interleaved": (OperationType.TRANSPOSE, (3, 1111), [None], (1111, 3)),
    "three short planes": (OperationType.TRANSPOSE, (3, 7), [None], (7, 3)),
    "two planes taken apart": (OperationType.TRANSPOSE, (2, 300, 2), [vector([0, 2, 1])], (2, 2, 300)),
    "shuffle of two groups": (OperationType.CHANNEL_SHUFFLE, (2, 3, 5, 58), [2, 3], (2, 3, 5, 58)),
    "transpose of a large matrix": (OperationType.TRANSPOSE, (130, 260), [None], (260, 130)),
    "to planes": (OperationType.TRANSPOSE, (2, 5, 9, 24), [vector([0, 3, 1, 2])], (2, 24, 5, 9)),
    "from planes": (OperationType.TRANSPOSE, (2, 19, 5, 9), [vector([0, 2, 3, 1])], (2, 5, 9, 19)),
    "transpose of blocks": (OperationType.TRANSPOSE, (4, 3, 17), [vector([1, 0, 2])], (3, 4, 17)),
    "transpose backwards": (OperationType.TRANSPOSE, (6, 7, 8, 9), [vector([3, 2, 1, 0])], (9, 8, 7, 6)),
    "transpose outside": (OperationType.TRANSPOSE, (8, 16, 2, 8), [vector([3, 1, 2, 0])], (8, 16, 2, 8)),
    "reverse": (OperationType.REVERSE, (3, 50, 4), [vector([1])], (3, 50, 4)),
    "reverse of neighbours": (OperationType.REVERSE, (2, 50), [vector([1])], (2, 50)),
    "tile": (OperationType.TILE, (3, 4, 5), [vector([2, 3, 1])], (6, 12, 5)),
    "tile of all axes": (OperationType.TILE, (2, 3), [vector([40, 3])], (80, 9)),
    "channel shuffle": (OperationType.CHANNEL_SHUFFLE, (1, 4, 5, 240), [3, 3], (1, 4, 5, 240)),
    "channel shuffle of rows": (OperationType.CHANNEL_SHUFFLE, (2, 12, 5), [4, -2], (2, 12, 5)),
    "depth to space": (OperationType.DEPTH_TO_SPACE, (2, 3, 5, 12), [2], (2, 6, 10, 3)),
    "space to depth": (OperationType.SPACE_TO_DEPTH, (2, 9, 6, 5), [3], (2, 3, 2, 45)),
    "batch to space": (OperationType.BATCH_TO_SPACE_ND, (12, 3, 4, 5), [vector([2, 3])], (2, 6, 12, 5)),
    "space to batch": (
        OperationType.SPACE_TO_BATCH_ND,
        (2, 6, 8, 3),
        [vector([3, 2]), matrix([[0, 0], [0, 0]])],
        (12, 2, 4, 3),
    ),
    "space to batch, padded": (
        OperationType.SPACE_TO_BATCH_ND,
        (2, 5, 7, 3),
        [vector([3, 2]), matrix([[1, 3], [4, 1]])],
        (12, 3, 6, 3),
    ),
    "pad": (OperationType.PAD, (2, 3, 5, 4), [matrix([[1, 0], [0, 2], [3, 1], [0, 1]])], (3, 5, 9, 5)),
    "pad of an image": (OperationType.PAD, (1, 50, 40, 3), [matrix([[0, 0], [1, 1], [0, 1], [0, 0]])], (1, 52, 41, 3)),
    "pad by nothing": (OperationType.PAD, (100,), [matrix([[0, 0]])], (100,)),
    "mirror pad, reflected": (OperationType.MIRROR_PAD, (4, 9, 3), [matrix([[3, 1], [2, 8], [0, 0]]), 0], (8, 19, 3)),
    "mirror pad, symmetric": (OperationType.MIRROR_PAD, (4, 9, 3), [matrix([[4, 0], [0, 9], [3, 1]]), 1], (8, 18, 7)),
    "gather": (OperationType.GATHER, (4, 6, 5), [1, vector([5, 0, 0, 3, 2, 5, 1])], (4, 7, 5)),
    "gather of neighbours": (OperationType.GATHER, (4, 6), [-1, vector([5, 0])], (4, 2)),
    "gather by a matrix": (OperationType.GATHER, (6, 3), [0, (Operand(I32, (2, 2)), b"\1\0\0\0" * 4)], (2, 2, 3)),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", MOVES)
def test_data_movement_matches_the_interpreter(name: str, kind: str) -> None:
    code, shape, arguments, result = MOVES[name]

    assert_kernels_agree(one_operation(code, [tensor(kind, *shape), *arguments], tensor(kind, *result)))


@pytest.mark.parametrize("shape", [(4, 300), (1, 64, 64, 33)])
@pytest.mark.parametrize("kind", TYPES)
def test_pad_v2_fills_with_any_value(kind: str, shape: tuple[int, ...]) -> None:
    value = (
        1.25
        if kind == "float32"
        else (Operand(OperandType.FLOAT16), np.float16(1.25).tobytes())
        if "float" in kind
        else 77
    )
    paddings = [[0, 0]] * (len(shape) - 2) + [[2, 3], [1, 0]]
    result = tuple(extent + sum(pair) for extent, pair in zip(shape, paddings, strict=True))

    assert_kernels_agree(
        one_operation(OperationType.PAD_V2, [tensor(kind, *shape), matrix(paddings), value], tensor(kind, *result))
    )


@pytest.mark.parametrize("value", [0.0, 1.25, -3.0])
@pytest.mark.parametrize("type", [TYPES["float32"][0], TYPES["float16"][0], I32])
def test_fill_with_constants_is_compiled(type: OperandType, value: float) -> None:
    half = (Operand(OperandType.FLOAT16), np.float16(value).tobytes())
    scalar: Any = int(value) if type == I32 else value if type == TYPES["float32"][0] else half
    assert_kernels_agree(one_operation(OperationType.FILL, [vector([3, 1, 70]), scalar], Operand(type, (3, 1, 70))))


@pytest.mark.parametrize("kind", TYPES)
def test_embedding_lookup_matches_the_interpreter(kind: str) -> None:
    arguments = [vector([3, 3, 0, 6, 1]), tensor(kind, 7, 9)]

    assert_kernels_agree(one_operation(OperationType.EMBEDDING_LOOKUP, arguments, tensor(kind, 5, 9)))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", TYPES)
def test_concatenation_matches_the_interpreter(kind: str, axis: int) -> None:
    shapes = [[3, 40, 16], [3, 40, 16], [3, 40, 16]]
    for shape, extent in zip(shapes, (1, 5, 33), strict=True):
        shape[axis] = extent
    result = list(shapes[0])
    result[axis] = 39
    arguments = [*(tensor(kind, *shape) for shape in shapes), axis]

    assert_kernels_agree(one_operation(OperationType.CONCATENATION, arguments, tensor(kind, *result)))


@pytest.mark.parametrize("scales", [(0.25, 0.5, 1.0), (0.3, 0.7, 0.01)])
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_concatenation_requantizes_other_scales(kind: str, scales: tuple[float, ...]) -> None:
    type, shift = TYPES[kind][0], 128 if kind == "int8" else 0
    inputs = [Operand(type, (6, 77), scale, 3 + 60 * n - shift) for n, scale in enumerate(scales)]

    assert_kernels_agree(
        one_operation(OperationType.CONCATENATION, [*inputs, 1], Operand(type, (6, 231), 0.5, 120 - shift))
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", TYPES)
def test_pack_matches_the_interpreter(kind: str, axis: int) -> None:
    result = [4, 9]
    result.insert(axis, 3)

    assert_kernels_agree(one_operation(OperationType.PACK, [axis, *[tensor(kind, 4, 9)] * 3], tensor(kind, *result)))


def split_model(kind: str, axis: int, count: int) -> Model:
    shape = [4, 6, 20]
    part = list(shape)
    part[axis] //= count
    (axis_operand, axis_bytes), (count_operand, count_bytes) = scalar(axis), scalar(count)
    source = tensor(kind, *shape)
    outputs = [tensor(kind, *part) for _ in range(count)]
    operands = [placed(source, LifeTime.SUBGRAPH_INPUT), axis_operand, count_operand]
    operands += [placed(one, LifeTime.SUBGRAPH_OUTPUT) for one in outputs]
    operation = Operation(OperationType.SPLIT, (0, 1, 2), tuple(range(3, 3 + count)))
    return graph(operands, [operation], {1: axis_bytes, 2: count_bytes})


def placed(operand: Operand, lifetime: LifeTime) -> Operand:
    return Operand(operand.type, operand.dimensions, operand.scale, operand.zero_point, lifetime=lifetime)


@pytest.mark.parametrize(("axis", "count"), [(0, 2), (1, 1), (1, 3), (-1, 5)])
@pytest.mark.parametrize("kind", TYPES)
def test_split_matches_the_interpreter(kind: str, axis: int, count: int) -> None:
    assert_kernels_agree(split_model(kind, axis, count))


NEAREST = [  # old height and width, new ones, aligned corners, half pixels
    ((5, 7), (10, 14), False, False),
    ((9, 8), (4, 13), True, False),
    ((9, 8), (4, 13), False, True),
    ((1, 3), (6, 1), True, False),
]


@pytest.mark.parametrize("channels", [1, 3, 40])
@pytest.mark.parametrize(("old", "new", "aligned", "half"), NEAREST)
@pytest.mark.parametrize("kind", TYPES)
def test_resize_nearest_neighbor_matches_the_interpreter(
    kind: str, old: tuple[int, int], new: tuple[int, int], aligned: bool, half: bool, channels: int
) -> None:
    arguments = [tensor(kind, 2, *old, channels), new[1], new[0], False, aligned, half]

    assert_kernels_agree(
        one_operation(OperationType.RESIZE_NEAREST_NEIGHBOR, arguments, tensor(kind, 2, *new, channels))
    )
