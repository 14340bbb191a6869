"""Corner cases of operations that move or find elements: omitted arguments, masks, empty results, equal values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.executed import executed
from support.one_result import result_of, tensor
from support.small_models import graph, one_operation, vector

from nnfmq.engines import interpreter
from nnfmq.engines.program import Program
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import LifeTime, Operand, OperandType, Operation, OperationType
from nnfmq.operations import REGISTRY
from nnfmq.operations.declaration import V1_0, V1_1, V1_2, V1_3, match
from nnfmq.operations.space_depth_batch import batch_to_space

Array = npt.NDArray[Any]

F32, F16, I32, UINT8, INT8 = (
    OperandType.TENSOR_FLOAT32,
    OperandType.TENSOR_FLOAT16,
    OperandType.TENSOR_INT32,
    OperandType.TENSOR_QUANT8_ASYMM,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED,
)
ANY_F32, ANY_I32 = Operand(F32), Operand(I32)
IMAGE = Operand(F32, (1, 2, 2, 4))


def flat(code: str, *arguments: Any, output: Operand = ANY_F32) -> Array:
    return result_of(OperationType[code], arguments, output)


def matrix(values: list[list[int]]) -> tuple[Operand, bytes]:
    array = np.array(values, np.int32)
    return Operand(I32, array.shape), array.tobytes()


def with_second_omitted(code: str, array: Array) -> Array:
    """Return the result of an operation of two arguments, the second of which has no value."""
    operands = [
        Operand(F32, array.shape, lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(I32, (1,), lifetime=LifeTime.NO_VALUE),
        Operand(F32, lifetime=LifeTime.SUBGRAPH_OUTPUT),
    ]
    model, found = graph(operands, [Operation(OperationType[code], (0, 1), (2,))]), np.empty(array.size, np.float32)
    (shape,) = interpreter.prepare(model).execute([array], [found])
    return found.reshape(shape.dimensions)


COUNTED = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_a_matrix_is_transposed_without_a_permutation() -> None:
    np.testing.assert_array_equal(with_second_omitted("TRANSPOSE", COUNTED[0]), COUNTED[0].T)


def test_all_dimensions_of_1_are_squeezed_without_axes() -> None:
    assert with_second_omitted("SQUEEZE", COUNTED.reshape(1, 6, 1, 4)).shape == (6, 4)


def test_squeezing_everything_leaves_a_vector_of_one() -> None:
    assert flat("SQUEEZE", tensor([[5.0]]), vector([0, 1, 0])).tolist() == [5.0]


def strided(array: Array, begin: Any, end: Any, strides: Any, masks: tuple[int, int, int] = (0, 0, 0)) -> Array:
    return flat("STRIDED_SLICE", tensor(array), vector(begin), vector(end), vector(strides), *masks)


@pytest.mark.parametrize("seed", range(100))
def test_a_strided_slice_is_pythons(seed: int) -> None:
    rng = np.random.default_rng(seed)
    begin, end = rng.integers(-6, 7, (2, 3)).tolist()
    strides = rng.choice([-3, -2, -1, 1, 2, 3], 3).tolist()
    masks = rng.integers(0, 8, 2).tolist()

    taken = tuple(
        slice(None if masks[0] >> axis & 1 else begin[axis], None if masks[1] >> axis & 1 else end[axis], strides[axis])
        for axis in range(3)
    )
    np.testing.assert_array_equal(strided(COUNTED, begin, end, strides, (*masks, 0)), COUNTED[taken])


def test_shrinking_every_axis_leaves_a_vector_of_one() -> None:
    assert strided(COUNTED, [1, 2, -1], [2, 3, 4], [1, 5, 1], (0, 0, 7)).tolist() == [23.0]


def test_a_mask_bit_beyond_the_rank_means_nothing() -> None:
    np.testing.assert_array_equal(strided(COUNTED, [0] * 3, [9] * 3, [1] * 3, (8, 8, -8)), COUNTED)


def test_an_empty_range_gives_an_empty_array() -> None:
    assert strided(COUNTED, [1, 0, 0], [1, 3, 4], [1, 1, 1]).shape == (0, 3, 4)
    assert flat("SLICE", tensor(COUNTED), vector([2, 0, 1]), vector([-1, 3, 0])).shape == (0, 3, 0)


@pytest.mark.parametrize(
    ("code", "attributes", "shape"),
    [
        ("SLICE", [vector([0, 1]), vector([-1, 2])], (0, 2)),
        ("TRANSPOSE", [vector([1, 0])], (3, 0)),
        ("CONCATENATION", [tensor(np.zeros((2, 3))), 0], (2, 3)),
    ],
)
def test_an_empty_array_is_moved_as_any_other(code: str, attributes: list[Any], shape: tuple[int, ...]) -> None:
    arguments = [tensor(np.empty((0, 3))), *attributes]

    assert result_of(OperationType[code], arguments, ANY_F32, known=False).shape == shape


def test_tiling_no_times_leaves_nothing() -> None:
    assert flat("TILE", tensor(COUNTED), vector([2, 0, 1])).shape == (4, 0, 4)


def test_gather_may_lower_no_rank_and_takes_an_index_twice() -> None:
    assert flat("GATHER", tensor([5.0, 6.0, 7.0]), -1, vector([2, 2, 0])).tolist() == [7.0, 7.0, 5.0]


def gather_by_request(axis: Any) -> Program:
    """Return the program of a GATHER whose indices are an input, and so is the axis if it is an Operand."""
    arguments = [Operand(F32, (2, 3)), axis, Operand(I32, (2,))]
    return interpreter.prepare(one_operation(OperationType.GATHER, arguments, Operand(F32, (0, 0))))


def test_indices_of_gather_that_come_with_the_request_are_used_and_checked_each_time() -> None:
    program, values, out = gather_by_request(1), np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((2, 2), "f4")
    frame = program.bind([values, indices := np.array([0, 2], np.int32)], [out])

    for first in (0, 2, 1):
        indices[0] = first
        frame.run()
        assert out.tolist() == [[first, 2], [first + 3, 5]]
    for outside in (-1, 3):
        indices[0] = outside
        with pytest.raises(GeneralFailure, match=r"operation 0 \(GATHER\): .*\(C1\)$"):
            frame.run()


def test_an_axis_of_gather_that_comes_with_the_request_decides_the_shape() -> None:
    program, values = gather_by_request(Operand(OperandType.INT32)), np.arange(6, dtype=np.float32).reshape(2, 3)
    indices = np.array([1, 0], np.int32)

    shapes = [program.execute([values, np.array(axis, np.int32), indices], [None]) for axis in (0, 1, -2)]

    assert [found[0].dimensions for found in shapes] == [(2, 3), (2, 2), (2, 3)]
    with pytest.raises(GeneralFailure, match=r"\(A1\)$"):
        program.execute([values, np.array(2, np.int32), indices], [None])


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [
        ("GATHER", [tensor(COUNTED), 0], []),
        ("EMBEDDING_LOOKUP", [], [tensor(COUNTED)]),
    ],
)
def test_N_OPF_10_no_index_at_all_is_an_empty_input(code: str, before: list[Any], after: list[Any]) -> None:
    with pytest.raises(GeneralFailure, match=r"an input has a dimension of 0 \(R3\)$"):
        result_of(OperationType[code], [*before, tensor([], "int32"), *after], ANY_F32, known=False)


@pytest.mark.parametrize(("shape", "block"), [((4, 2, 1, 1), [1, 4]), ((4, 1, 3, 1), [2, 1]), ((4, 1, 1, 2), [1, 2])])
def test_elements_of_a_result_lie_in_order_whatever_dimensions_are_1(shape: tuple[int, ...], block: list[int]) -> None:
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    assert batch_to_space(image, block=np.array(block)).flags.c_contiguous


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("scale", "zero_point"), [(0.25, 130), (0.7, 3), (3.5, 255), (0.013, 77)])
def test_codes_of_another_scale_are_requantized_when_they_are_joined(dtype: str, scale: float, zero_point: int) -> None:
    shift, kind = (0, UINT8) if dtype == "uint8" else (128, INT8)
    codes = np.arange(256) - shift
    inputs = [tensor(codes, dtype, scale, zero_point - shift), tensor(codes, dtype, 0.5, 128 - shift)]

    found = result_of(OperationType.CONCATENATION, [*inputs, 0], Operand(kind, (), 0.5, 128 - shift))

    factor = np.float32(scale) * (np.float32(1) / np.float32(0.5))
    reals = np.arange(256, dtype=np.float32) * factor + np.float32(-zero_point) * factor
    rounded = [int(np.sign(real)) * math.floor(abs(float(real)) + 0.5) + 128 for real in reals]
    np.testing.assert_array_equal(found, [*(np.clip(rounded, 0, 255) - shift), *codes])


def topk(values: Array, k: int, output: Operand = ANY_F32) -> list[list[Any]]:
    kind = Operand(output.type, values.shape, output.scale, output.zero_point)
    count = Operand(OperandType.INT32), np.array(k, np.int32)
    found = executed(OperationType.TOPK_V2, [(kind, values), count], [output, ANY_I32])
    return [array.tolist() for array in found]


def test_of_equal_values_the_last_is_the_first_of_the_largest() -> None:
    assert topk(np.array([1, 3, 3, 2, 3], np.float32), 4) == [[3, 3, 3, 2], [4, 2, 1, 3]]
    assert topk(np.array([0.0, -0.0], np.float32), 2)[1] == [1, 0]
    assert topk(np.array([-(2**31), 2**31 - 1, 0], np.int32), 3, ANY_I32)[1] == [1, 2, 0]


def test_the_largest_codes_are_those_of_the_type() -> None:
    assert topk(np.array([200, 100], np.uint8), 1, Operand(UINT8, (), 1.0, 0))[0] == [200]
    assert topk(np.array([-56, 100], np.int8), 1, Operand(INT8, (), 1.0, 0))[0] == [100]


def test_topk_of_more_rows_than_are_sorted_together() -> None:
    rows = np.random.default_rng(0).integers(0, 1000, (4, 100_000)).astype(np.int32)
    values, indices = topk(rows, 2, ANY_I32)

    for row, found, places in zip(rows.tolist(), values, indices, strict=True):
        expected = sorted(range(len(row)), key=lambda i, row=row: (row[i], i), reverse=True)[:2]
        assert (places, found) == (expected, [row[i] for i in expected])


def test_a_missing_key_gives_bytes_of_0_whatever_the_zero_point() -> None:
    values = Operand(UINT8, (2, 2), 0.5, 128), np.array([[1, 2], [3, 4]], np.uint8)
    lookups, keys = tensor([7, 6, -1], "int32"), tensor([-1, 7], "int32")

    found = executed(
        OperationType.HASHTABLE_LOOKUP,
        [lookups, keys, values],
        [Operand(UINT8, (), 0.5, 128), Operand(UINT8, (), 1.0, 0)],
    )

    assert [array.tolist() for array in found] == [[[3, 4], [0, 0], [1, 2]], [1, 0, 1]]


def test_PAD_V2_takes_a_code_as_it_is_for_int8_too() -> None:
    output, paddings = Operand(INT8, (), 0.5, 3), matrix([[1, 0]])

    assert flat("PAD_V2", tensor([5], "int8", 0.5, 3), paddings, -128, output=output).tolist() == [-128, 5]


def test_a_mirrored_border_may_be_as_wide_as_the_array() -> None:
    assert flat("MIRROR_PAD", tensor([1.0, 2.0]), matrix([[2, 2]]), 1).tolist() == [2, 1, 1, 2, 2, 1]
    assert flat("MIRROR_PAD", tensor([1.0, 2.0]), matrix([[1, 1]]), 0).tolist() == [2, 1, 2, 1]


def test_a_split_may_have_a_single_part() -> None:
    found = executed(OperationType.SPLIT, [tensor(COUNTED), *(number(value) for value in (1, 1))], [ANY_F32])

    np.testing.assert_array_equal(found[0], COUNTED)


def number(value: int) -> tuple[Operand, Array]:
    return Operand(OperandType.INT32), np.array(value, np.int32)


SIZES = (Operand(OperandType.INT32),) * 2
FLAG = Operand(OperandType.BOOL)
FACTORS = (Operand(OperandType.FLOAT32),) * 2


@pytest.mark.parametrize(
    ("code", "arguments", "level"),
    [
        ("DEPTH_TO_SPACE", (IMAGE, SIZES[0]), V1_0),
        ("DEPTH_TO_SPACE", (IMAGE, SIZES[0], FLAG), V1_2),
        ("SPACE_TO_DEPTH", (Operand(F16, (1, 2, 2, 4)), SIZES[0]), V1_2),
        ("BATCH_TO_SPACE_ND", (IMAGE, Operand(I32, (2,))), V1_1),
        ("BATCH_TO_SPACE_ND", (IMAGE, Operand(I32, (2,)), FLAG), V1_2),
        ("SPACE_TO_BATCH_ND", (Operand(UINT8, (1,), 1.0, 0), Operand(I32, (2,)), Operand(I32, (2, 2))), V1_1),
        ("SPACE_TO_BATCH_ND", (Operand(UINT8, (1,), 1.0, 1), Operand(I32, (2,)), Operand(I32, (2, 2))), V1_2),
        ("PAD", (Operand(UINT8, (1,), 1.0, 0), Operand(I32, (1, 2))), V1_1),
        ("PAD", (Operand(UINT8, (1,), 1.0, 1), Operand(I32, (1, 2))), V1_2),
        ("EMBEDDING_LOOKUP", (Operand(I32, (1,)), Operand(F32, (1, 1))), V1_0),
        ("EMBEDDING_LOOKUP", (Operand(I32, (1,)), Operand(I32, (1, 1))), V1_2),
        ("EMBEDDING_LOOKUP", (Operand(I32, (1,)), Operand(F16, (1, 1))), V1_3),
        ("RESIZE_BILINEAR", (IMAGE, *SIZES), V1_0),
        ("RESIZE_BILINEAR", (IMAGE, *FACTORS), V1_2),
        ("RESIZE_BILINEAR", (IMAGE, *SIZES, FLAG), V1_2),
        ("RESIZE_BILINEAR", (IMAGE, *SIZES, FLAG, FLAG), V1_3),
        ("RESIZE_BILINEAR", (IMAGE, *FACTORS, FLAG, FLAG, FLAG), V1_3),
        ("RESIZE_NEAREST_NEIGHBOR", (IMAGE, *FACTORS, FLAG), V1_2),
        ("RESIZE_NEAREST_NEIGHBOR", (IMAGE, *SIZES, FLAG, FLAG), V1_3),
    ],
)
def test_VAL_2_types_forms_and_zero_points_need_their_level(code: str, arguments: Any, level: int) -> None:
    like = (
        next(a for a in arguments[::-1] if a.type in (F32, F16, UINT8)) if code != "EMBEDDING_LOOKUP" else arguments[1]
    )

    assert match(REGISTRY[OperationType[code]], arguments, [like]).level == level
