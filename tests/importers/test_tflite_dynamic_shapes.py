"""Operators whose result's shape depends on values, and arithmetic on shapes that is folded at import."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs
from support.tflite_files import Operator, Tensor, floats, ints, writer

from nnfmq.engines import interpreter
from nnfmq.hal.errors import GeneralFailure, UnsupportedModel
from nnfmq.importers import LoadedModel, load

Array = npt.NDArray[Any]


def outputs_of(loaded: LoadedModel, *inputs: Array) -> list[Array]:
    """Execute a model whose outputs may have any shape."""
    sinks = [np.empty(1 << 12, info.dtype if info.dtype != "bool" else np.uint8) for info in loaded.outputs]
    shapes = interpreter.prepare(loaded.model).execute(inputs, [memoryview(sink).cast("B") for sink in sinks])
    return [sink[: int(np.prod(s.dimensions))].reshape(s.dimensions) for sink, s in zip(sinks, shapes, strict=True)]


def agrees(tensors: list[Any], operators: list[Any], outputs: list[int], *inputs: Array) -> None:
    """Require LiteRT's results; the first tensors are the inputs."""
    content = writer.write(tensors, operators, range(len(inputs)), outputs)
    for found, expected in zip(outputs_of(load(content), *inputs), Theirs(content)(list(inputs)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_where_returns_the_indexes_of_true_elements() -> None:
    tensors = [Tensor("x", (2, 3), "BOOL"), Tensor("y", (0, 2), "INT64", extra={})]
    truths = np.array([[1, 0, 1], [0, 0, 1]], np.uint8)
    agrees(tensors, [Operator("WHERE", (0,), (1,))], [1], truths)


def test_unique_returns_values_in_their_order_and_the_index_of_each() -> None:
    tensors = [Tensor("x", (6,), "INT32"), Tensor("y", (0,), "INT32"), Tensor("z", (6,), "INT32")]
    operator = Operator("UNIQUE", (0,), (1, 2), "UniqueOptions", {"IdxOutType": 2})
    agrees(tensors, [operator], [1, 2], np.int32([5, 2, 5, -1, 2, 9]))


@pytest.mark.parametrize(("kind", "values"), [("INT32", (2, 11, 3)), ("INT32", (5, -5, -4)), ("FLOAT32", (0, 1, 0.3))])
def test_range_takes_its_numbers_from_the_inputs(kind: str, values: tuple[float, ...]) -> None:
    tensors = [*(Tensor(f"x{index}", (), kind) for index in range(3)), Tensor("y", (0,), kind)]
    given = [np.array([value], {"INT32": np.int32, "FLOAT32": np.float32}[kind]) for value in values]
    content = writer.write(tensors, [Operator("RANGE", (0, 1, 2), (3,))], (0, 1, 2), (3,))
    (found,) = outputs_of(load(content), *given)
    (expected,) = Theirs(content)([value.reshape(()) for value in given])
    np.testing.assert_array_equal(found, expected)


X = np.arange(6, dtype=np.float32).reshape(2, 3)
IDS = np.int32([0, 0, 1])
DIAGONAL = np.int32([[0], [2]])
INT = {np.dtype(np.int32): "INT32", np.dtype(np.float32): "FLOAT32", np.dtype(bool): "BOOL"}
OTHER_SIZES: dict[str, tuple[list[Any], list[Any], str, dict[str, Any]]] = {
    "WHERE": ([np.array([1, 0, 1, 0], bool)], [Tensor("y", (4, 1), "INT64")], "", {}),
    "UNIQUE": ([np.int32([1, 2, 1, 3])], [Tensor("y", (4,), "INT32"), Tensor("z", (4,), "INT32")], "UniqueOptions",
               {"IdxOutType": 2}),
    "RANGE": ([np.int32(0), np.int32(3), np.int32(1)], [Tensor("y", (5,), "INT32")], "", {}),
    "PAD": ([X, np.int32([[1, 1], [0, 1]])], [Tensor("y", (3, 3))], "PadOptions", {}),
    "MIRROR_PAD": ([X, np.int32([[1, 1], [0, 1]])], [Tensor("y", (3, 3))], "MirrorPadOptions", {"Mode": 1}),
    "TILE": ([X, np.int32([2, 2])], [Tensor("y", (2, 3))], "TileOptions", {}),
    "TRANSPOSE": ([X, np.int32([0, 1])], [Tensor("y", (3, 2))], "TransposeOptions", {}),
    "SUM": ([X, np.int32([0])], [Tensor("y", (2,))], "ReducerOptions", {"KeepDims": False}),
    "SCATTER_ND": ([DIAGONAL, np.float32([1, 2]), np.int32([5])], [Tensor("y", (4,))], "ScatterNdOptions", {}),
    "UNSORTED_SEGMENT_SUM": ([X.reshape(3, 2), IDS, np.int32(2)], [Tensor("y", (3, 2))], "", {}),
    "SPACE_TO_BATCH_ND": ([X[:, :2].reshape(1, 2, 2, 1), np.int32([1, 2]), np.zeros((2, 2), np.int32)],
                          [Tensor("y", (4, 1, 1, 1))], "", {}),
    "RFFT2D": ([np.ones((1, 4, 4), np.float32), np.int32([2, 2])], [Tensor("y", (1, 4, 3), "COMPLEX64")],
               "Rfft2dOptions", {}),
    "RESHAPE": ([X, np.int32([3, -1])], [Tensor("y", (2, 3))], "ReshapeOptions", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_data_decide_the_size_of_a_result_whatever_the_file_states(name: str) -> None:
    inputs, results, table, options = OTHER_SIZES[name]
    tensors = [Tensor(f"x{place}", array.shape, INT[array.dtype]) for place, array in enumerate(inputs)]
    outputs = tuple(range(len(inputs), len(inputs) + len(results)))
    operator = Operator(name, range(len(inputs)), outputs, table, options)
    content = writer.write([*tensors, *results], [operator], range(len(inputs)), outputs)
    loaded = load(content)
    assert 0 in loaded.outputs[0].shape  # unknown
    given = [array.view(np.uint8) if array.dtype == bool else array.reshape(array.shape or (1,)) for array in inputs]
    for found, expected in zip(outputs_of(loaded, *given), Theirs(content)(inputs), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.shape == expected.shape


def test_FILL_takes_dimensions_that_are_an_input() -> None:
    tensors = [Tensor("dimensions", (2,), "INT32"), Tensor("v", (), data=floats(1)), Tensor("y", (1, 1))]
    agrees(tensors, [Operator("FILL", (0, 1), (2,), "FillOptions")], [2], np.int32([2, 3]))


def test_a_begin_or_an_axis_that_is_an_input_leaves_the_size_known() -> None:
    sizes = Tensor("sizes", (2,), "INT32", ints(1, 2))
    begin = [Tensor("x", (2, 3)), Tensor("begin", (2,), "INT32"), sizes, Tensor("y", (1, 2))]
    agrees(begin, [Operator("SLICE", (0, 1, 2), (3,), "SliceOptions")], [3], X, np.int32([1, 1]))
    axis = [Tensor("x", (2, 3)), Tensor("axis", (1,), "INT32"), Tensor("y", (2, 3))]
    reverse = Operator("REVERSE_V2", (0, 1), (2,), "ReverseV2Options")
    agrees(axis, [reverse], [2], X, np.int32([1]))
    assert load(writer.write(axis, [reverse], (0, 1), (2,))).outputs[0].shape == (2, 3)


def chosen(count: int, gathered: int) -> bytes:
    """Return a model that returns the true elements of x, and states their count."""
    tensors = [Tensor("x", (4,), "BOOL"), Tensor("values", (4,), data=floats(4)),
               Tensor("places", (count, 1), "INT64"), Tensor("y", (gathered,))]  # fmt: skip
    operators = [Operator("WHERE", (0,), (2,)), Operator("GATHER_ND", (1, 2), (3,))]
    content: bytes = writer.write(tensors, operators, (0,), (3,))
    return content


def test_a_stated_size_that_follows_from_one_that_data_decide_is_refused_by_the_import() -> None:
    with pytest.raises(UnsupportedModel, match=r"GATHER_ND\): the shape of an input depends on the data") as caught:
        load(chosen(2, 2))
    assert [problem.operator for problem in caught.value.problems] == ["GATHER_ND"]
    (found,) = outputs_of(load(chosen(0, 0)), np.uint8([0, 1, 1, 1]))
    assert found.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["TILE", "SUM", "RESHAPE", "PAD"])
@pytest.mark.parametrize("stated", [(2, 3), ()], ids=["stated", "of unknown rank"])
def test_a_result_that_data_decide_may_have_an_unknown_rank(name: str, stated: tuple[int, ...]) -> None:
    inputs, _, table, options = OTHER_SIZES[name]
    count = len(inputs)
    tensors = [Tensor(f"x{place}", array.shape, INT[array.dtype]) for place, array in enumerate(inputs)]
    tensors += [Tensor("y", ()), Tensor("z", stated)]
    operators = [Operator(name, range(count), (count,), table, options), Operator("ABS", (count,), (count + 1,))]
    if not stated:
        agrees(tensors, operators, [count + 1], *inputs)
        return
    content = writer.write(tensors, operators, range(count), [count + 1])
    with pytest.raises(UnsupportedModel, match=r"ABS\): the shape of an input depends on the data"):
        load(content)


@pytest.mark.parametrize(("name", "shape", "size"), [
    ("BROADCAST_TO", (1,), [3]), ("RESIZE_BILINEAR", (1, 2, 2, 1), [3, 3]),
    ("RESIZE_NEAREST_NEIGHBOR", (1, 2, 2, 1), [3, 3]),
])  # fmt: skip
def test_a_size_that_is_an_input_is_refused_and_not_replaced_by_that_which_the_file_states(
    name: str, shape: tuple[int, ...], size: list[int]
) -> None:
    stated = (2,) if len(size) == 1 else (1, 4, 4, 1)
    tensors = [Tensor("x", shape), Tensor("size", (len(size),), "INT32"), Tensor("y", stated)]
    table = "" if len(size) == 1 else f"{name.title().replace('_', '')}Options"
    content = writer.write(tensors, [Operator(name, (0, 1), (2,), table, {})], (0, 1), (2,))
    assert Theirs(content)([np.ones(shape, np.float32), np.int32(size)])[0].shape != stated
    with pytest.raises(UnsupportedModel, match=r"'size'\) must be a constant"):
        load(content)


def test_a_size_that_follows_from_the_shape_of_an_input_is_that_which_the_file_states() -> None:
    """SHAPE of x gives the size of a repetition; but not that of a result whose count data decide."""
    kept = [Tensor("x", (3,)), Tensor("shape", (1,), "INT32"), Tensor("one", (1,), data=floats(1)), Tensor("y", (3,))]
    shape = Operator("SHAPE", (0,), (1,), "ShapeOptions", {"OutType": 2})
    agrees(kept, [shape, Operator("BROADCAST_TO", (2, 1), (3,))], [3], np.zeros(3, np.float32))
    tensors = [Tensor("x", (4,), "BOOL"), Tensor("places", (2, 1), "INT64"), Tensor("shape", (2,), "INT32"),
               Tensor("one", (1,), data=floats(1)), Tensor("y", (2, 1))]  # fmt: skip
    operators = [Operator("WHERE", (0,), (1,)), Operator("SHAPE", (1,), (2,), "ShapeOptions", {"OutType": 2}),
                 Operator("BROADCAST_TO", (3, 2), (4,))]  # fmt: skip
    with pytest.raises(UnsupportedModel, match=r"\(SHAPE\): the shape of an input depends on the data"):
        load(writer.write(tensors, operators, (0,), (4,)))


def test_range_rejects_a_step_of_0() -> None:
    tensors = [
        Tensor("x", (), "INT32"),
        *(Tensor(str(n), (), "INT32", ints(n)) for n in (9, 0)),
        Tensor("y", (0,), "INT32"),
    ]
    loaded = load(writer.write(tensors, [Operator("RANGE", (0, 1, 2), (3,))], (0,), (3,)))
    with pytest.raises(GeneralFailure, match=r"in steps of 0 \(C1\)"):
        outputs_of(loaded, np.int32([1]))


def test_segment_sum_adds_the_rows_of_each_segment() -> None:
    tensors = [Tensor("x", (4, 2)), Tensor("ids", (4,), "INT32", ints(0, 0, 2, 2)), Tensor("y", (3, 2))]
    loaded = load(writer.write(tensors, [Operator("SEGMENT_SUM", (0, 1), (2,))], (0,), (2,)))
    (found,) = outputs_of(loaded, np.float32([[1, 2], [3, 4], [5, 6], [7, 8]]))
    assert found.tolist() == [[4, 6], [0, 0], [12, 14]]


def test_the_arithmetic_on_a_static_shape_is_folded() -> None:
    """SHAPE → STRIDED_SLICE → PACK gives the target of a RESHAPE, whose own shape the file does not state."""
    tensors = [
        Tensor("x", (2, 3, 4)), Tensor("shape", (3,), "INT32"), Tensor("begin", (1,), "INT32", ints(0)),
        Tensor("end", (1,), "INT32", ints(1)), Tensor("step", (1,), "INT32", ints(1)), Tensor("batch", (), "INT32"),
        Tensor("rest", (), "INT32", ints(-1)), Tensor("target", (2,), "INT32"), Tensor("y", ()),
    ]  # fmt: skip
    operators = [
        Operator("SHAPE", (0,), (1,), "ShapeOptions", {"OutType": 2}),
        Operator("STRIDED_SLICE", (1, 2, 3, 4), (5,), "StridedSliceOptions", {"ShrinkAxisMask": 1}),
        Operator("PACK", (5, 6), (7,), "PackOptions", {"ValuesCount": 2}),
        Operator("RESHAPE", (0, 7), (8,)),
    ]
    loaded = load(writer.write(tensors, operators, (0,), (8,)))
    assert [operation.type.name for operation in loaded.model.main.operations] == ["RESHAPE"]
    (found,) = outputs_of(loaded, np.zeros((2, 3, 4), np.float32))
    assert found.shape == (2, 12)


def test_a_shape_that_is_an_output_is_computed() -> None:
    operator = Operator("SHAPE", (0,), (1,), "ShapeOptions", {"OutType": 2})
    agrees([Tensor("x", (2, 3)), Tensor("y", (2,), "INT32")], [operator], [1], np.zeros((2, 3), np.float32))


def test_a_rank_that_is_an_output_is_a_constant() -> None:
    agrees([Tensor("x", (2, 3)), Tensor("y", (), "INT32")], [Operator("RANK", (0,), (1,))], [1],
        np.zeros((2, 3), np.float32))  # fmt: skip


def test_the_broadcast_of_two_constant_shapes_is_folded() -> None:
    tensors = [
        Tensor("x", (1, 3)), *(Tensor(str(n), (2,), "INT32", ints(n, 3)) for n in (1, 4)),
        Tensor("shape", (2,), "INT32"), Tensor("y", (4, 3)),
    ]  # fmt: skip
    operators = [Operator("BROADCAST_ARGS", (1, 2), (3,)), Operator("BROADCAST_TO", (0, 3), (4,))]
    agrees(tensors, operators, [4], np.float32([[1, 2, 3]]))


def test_constants_that_an_operator_rejects_are_a_problem_of_it() -> None:
    tensors = [
        Tensor("x", (3,), "INT32"), *(Tensor(str(n), (3,), "INT32", ints(n, n, n)) for n in (7, 0)),
        Tensor("q", (3,), "INT32"), Tensor("y", (3,), "INT32"),
    ]  # fmt: skip
    operators = [Operator("FLOOR_MOD", (1, 2), (3,)), Operator("ADD", (0, 3), (4,))]
    with pytest.raises(UnsupportedModel, match=r"FLOOR_MOD\): its constant inputs are rejected: a divisor is 0"):
        load(writer.write(tensors, operators, (0,), (4,)))


def test_folding_does_not_make_more_than_the_file_allows() -> None:
    """A FILL of 2^28 elements from a file of few bytes stays an operation."""
    tensors = [
        Tensor("x", (1,)), Tensor("dimensions", (1,), "INT32", ints(1 << 28)), Tensor("value", (), data=floats(1)),
        Tensor("filled", (1 << 28,)), Tensor("y", (1 << 28,)),
    ]  # fmt: skip
    operators = [Operator("FILL", (1, 2), (3,)), Operator("ADD", (0, 3), (4,), "AddOptions")]
    loaded = load(writer.write(tensors, operators, (0,), (4,)))
    assert [operation.type.name for operation in loaded.model.main.operations] == ["FILL", "ADD"]
    assert len(loaded.model.operand_values) < 1000


def test_sizes_that_follow_from_the_inputs_replace_those_in_the_file() -> None:
    """The model cuts x to a multiple of 3 columns, which become rows of 3.

    The sizes are computed from the shape of x, which is split with an empty part, as TFLite's converter does. The file
    states 1 for the dimensions that it does not know.
    """
    tensors = [
        Tensor("x", (2, 7)), Tensor("shape", (2,), "INT32"), Tensor("sizes", (3,), "INT32", ints(1, -1, 0)),
        Tensor("axis", (), "INT32", ints(0)), Tensor("rows", (1,), "INT32"), Tensor("columns", (1,), "INT32"),
        Tensor("none", (0,), "INT32"), Tensor("scalar", (0,), "INT32"), Tensor("n", (), "INT32"),
        Tensor("three", (), "INT32", ints(3)), Tensor("count", (), "INT32"), Tensor("pair", (2,), "INT32"),
        Tensor("used", (), "INT32"), Tensor("one", (1,), "INT32", ints(1)), Tensor("vector", (1,), "INT32"),
        Tensor("end", (2,), "INT32"), Tensor("target", (3,), "INT32"), Tensor("begin", (2,), "INT32", ints(0, 0)),
        Tensor("strides", (2,), "INT32", ints(1, 1)),
        Tensor("cut", (1, 1), signature=(-1, -1)), Tensor("y", (1, 1, 1), signature=(-1, -1, 3)),
    ]  # fmt: skip
    operators = [
        Operator("SHAPE", (0,), (1,), "ShapeOptions", {"OutType": 2}),
        Operator("SPLIT_V", (1, 2, 3), (4, 5, 6), "SplitVOptions", {"NumSplits": 3}),
        Operator("RESHAPE", (5, 7), (8,)),
        Operator("FLOOR_DIV", (8, 9), (10,)),
        Operator("PACK", (10, 9), (11,), "PackOptions", {"ValuesCount": 2}),
        Operator("MUL", (10, 9), (12,), "MulOptions"),
        Operator("RESHAPE", (12, 13), (14,)),
        Operator("CONCATENATION", (4, 14), (15,), "ConcatenationOptions"),
        Operator("CONCATENATION", (4, 11), (16,), "ConcatenationOptions"),
        Operator("STRIDED_SLICE", (0, 17, 15, 18), (19,), "StridedSliceOptions"),
        Operator("RESHAPE", (19, 16), (20,)),
    ]
    agrees(tensors, operators, [20], np.arange(14, dtype=np.float32).reshape(2, 7))


def test_the_condition_of_a_selection_may_be_smaller_than_its_result() -> None:
    tensors = [Tensor("c", (2, 1), "BOOL"), Tensor("x", (2, 3)), Tensor("y", (3,)), Tensor("z", (2, 3))]
    truths, x, y = np.array([[1], [0]], np.uint8), np.ones((2, 3), np.float32), np.arange(3, dtype=np.float32)
    agrees(tensors, [Operator("SELECT_V2", (0, 1, 2), (3,))], [3], truths, x, y)


def test_the_real_parts_of_a_spectrum_are_what_a_CAST_leaves() -> None:
    lengths, spectrum = Tensor("n", (2,), "INT32", ints(1, 8)), Tensor("s", (1, 1, 5), "COMPLEX64")
    tensors = [Tensor("x", (1, 1, 8)), lengths, spectrum, Tensor("t", (5,), "COMPLEX64"), Tensor("y", (5,))]
    operators = [
        Operator("RFFT2D", (0, 1), (2,), "Rfft2dOptions"),
        Operator("SQUEEZE", (2,), (3,), "SqueezeOptions"),
        Operator("CAST", (3,), (4,)),
    ]
    content = writer.write(tensors, operators, (0,), (4,))
    x = np.random.default_rng(3).uniform(-1, 1, (1, 1, 8)).astype(np.float32)
    np.testing.assert_allclose(outputs_of(load(content), x)[0], Theirs(content)([x])[0], atol=1e-5)
