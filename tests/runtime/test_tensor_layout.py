"""Layout of arguments in memory, checks of arrays and reported shapes, and their error messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, RequestArgument
from nnfmq.memory import Memory
from nnfmq.runtime import array_checks, result_validation, tensor_layout

IMAGE = TensorInfo("image", (1, 2, 3), "float32")
PIXELS = TensorInfo("pixels", (5,), "uint8")
OPEN = TensorInfo("open", (0, 3), "float32")
SCALAR = TensorInfo("factor", (), "float32")


def test_every_argument_starts_at_a_multiple_of_64_and_ends_with_its_last_element() -> None:
    placed, size_bytes = tensor_layout.layout([IMAGE, PIXELS, PIXELS], [(1, 2, 3), (5,), (5,)], 3)
    assert [argument.location for argument in placed] == [
        DataLocation(3, 0, 24),
        DataLocation(3, 64, 5),
        DataLocation(3, 128, 5),
    ]
    assert size_bytes == 128 + 5


def test_arguments_of_exactly_64_bytes_leave_no_gap() -> None:
    block = TensorInfo("block", (16,), "float32")
    placed, size_bytes = tensor_layout.layout([block, block], [(16,), (16,)], 0)
    assert [argument.location.offset for argument in placed] == [0, 64]
    assert size_bytes == 128


def test_a_layout_without_arguments_has_a_pool() -> None:
    assert tensor_layout.layout([], [], 0) == ((), 1)


def test_dimensions_are_given_only_if_the_model_does_not_specify_them() -> None:
    placed, _ = tensor_layout.layout([IMAGE, OPEN], [(1, 2, 3), (7, 3)], 0)
    assert [argument.dimensions for argument in placed] == [(), (7, 3)]


def test_an_output_of_unknown_size_has_a_positive_length() -> None:
    """A length of 0 would be an invalid argument (N-RQX-4) rather than an insufficient one."""
    placed, size_bytes = tensor_layout.layout([OPEN], [OPEN.shape], 0)
    assert placed[0].location.length > 0
    assert size_bytes == placed[0].location.length


def test_a_view_is_the_memory_itself() -> None:
    argument = RequestArgument(location=DataLocation(0, 64, 24))
    with Memory.create(88) as memory:
        array = tensor_layout.view(memory, argument, IMAGE, (1, 2, 3))
        array[0, 1, 2] = 1.0
        assert bytes(memory.view[84:88]) == np.float32(1.0).tobytes()


@pytest.mark.parametrize(
    ("info", "value"),
    [
        (IMAGE, np.zeros((1, 2, 3), np.float32)),
        (IMAGE, np.zeros((1, 2, 3), np.float64)),
        (IMAGE, np.zeros((1, 2, 3), np.float16)),
        (IMAGE, [[[1, 2, 3], [4, 5, 6]]]),
        (IMAGE, np.zeros((1, 2, 6), np.float32)[:, :, ::2]),
        (PIXELS, np.zeros(5, np.uint8)),
        (OPEN, np.zeros((9, 3), np.float32)),
        (SCALAR, 2.5),
    ],
    ids=["float32", "float64", "float16", "list", "strided", "uint8", "open extent", "scalar"],
)
def test_an_array_that_fits_is_accepted(info: TensorInfo, value: Any) -> None:
    np.testing.assert_array_equal(array_checks.checked_array(info, value), np.asarray(value))


@pytest.mark.parametrize(
    ("info", "value", "said"),
    [
        (IMAGE, np.zeros((1, 3, 2), np.float32), "input 'image' has shape 1x2x3; the given array has 1x3x2"),
        (IMAGE, np.zeros(6, np.float32), "input 'image' has shape 1x2x3; the given array has 6"),
        (OPEN, np.zeros((9, 4), np.float32), r"input 'open' has shape \?x3; the given array has 9x4"),
        (PIXELS, np.float32(1), "input 'pixels' has shape 5; the given array has scalar or unknown rank"),
        (PIXELS, np.zeros(5, np.float32), "input 'pixels' holds uint8; the given array is float32"),
        (PIXELS, np.zeros(5, np.int8), "input 'pixels' holds uint8; the given array is int8"),
        (IMAGE, np.zeros((1, 2, 3), np.complex64), "input 'image' holds float32; the given array is complex64"),
        (IMAGE, np.full((1, 2, 3), "x"), "input 'image' holds float32; the given array is <U1"),
        (IMAGE, [[[1, 2, 3], [4, 5]]], "input 'image' is no array: "),
    ],
)
def test_an_array_that_does_not_fit_is_rejected_with_both_shapes_and_types(
    info: TensorInfo, value: Any, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        array_checks.checked_array(info, value)


@pytest.mark.parametrize("given", [0, 1, 3])
def test_another_number_of_arrays_is_rejected_with_the_names(given: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"2 inputs \('image', 'pixels'\); {given} were given"):
        array_checks.check_count("input", [IMAGE, PIXELS], given)


@pytest.mark.parametrize("info", [OPEN, TensorInfo("rankless", (), "float32")])
def test_a_shape_that_is_not_fully_known_is_rejected_for_a_burst(info: TensorInfo) -> None:
    with pytest.raises(InvalidArgument, match=f"output '{info.name}'.*use PreparedModel.execute"):
        array_checks.require_fixed_shapes("output", [IMAGE, info])


def test_results_are_copied_into_the_given_arrays() -> None:
    target, result = np.zeros(3, np.float32), np.arange(3, dtype=np.float32)
    returned = array_checks.copy_out([target], [result])
    assert returned[0] is target
    assert target.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "the model has 1 outputs, `out` has 0 arrays"),
        ([np.zeros(4, np.float32)], "output 'scores' is float32 of shape 3, `out` has float32 of shape 4"),
        ([np.zeros(3, np.float64)], "`out` has float64 of shape 3"),
        ([[0.0, 0.0, 0.0]], "`out` must be a sequence of numpy arrays"),
        (np.zeros(3, np.float32), "`out` must be a sequence of numpy arrays"),
        (5, "`out` must be a sequence of numpy arrays"),
        ([np.broadcast_to(np.float32(0), (3,))], "'scores' is read-only"),
    ],
)
def test_arrays_that_outputs_do_not_fit_are_rejected(targets: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        array_checks.check_out([TensorInfo("scores", (3,), "float32")], targets)


def test_an_unknown_output_shape_is_checked_when_it_is_reported() -> None:
    target = np.zeros(4, np.float32)
    array_checks.check_out([TensorInfo("open", (0,), "float32")], [target])
    with pytest.raises(InvalidArgument, match=r"output 0 has shape \(3,\), `out` has \(4,\)"):
        array_checks.copy_out([target], [np.arange(3, dtype=np.float32)])


def test_the_bytes_of_a_huge_shape_do_not_overflow() -> None:
    assert tensor_layout.size_bytes(IMAGE, (2**32, 2**32)) == 2**66


@pytest.mark.parametrize("shapes", [[(1, 2, 3), (0, 3)], [(1, 2, 3), (9, 3)]])
def test_possible_shapes_of_the_outputs_are_accepted(shapes: list[tuple[int, ...]]) -> None:
    result_validation.check_reported_shapes([IMAGE, OPEN], shapes)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([], "the shapes of 0 outputs, the model has 2"),
        ([(1, 2, 3)] * 3, "the shapes of 3 outputs, the model has 2"),
        ([(1, 2, 4), (9, 3)], "the shape 1x2x4 for output 'image' of shape 1x2x3"),
        ([(1, 2, 3), (9,)], r"the shape 9 for output 'open' of shape \?x3"),
        ([(1, 2, 3), (9, 4)], r"the shape 9x4 for output 'open' of shape \?x3"),
        ([(1, 2, 3), (2**32 - 1, 3)], "the shape 4294967295x3 for output 'open'"),
    ],
)
def test_impossible_shapes_of_the_outputs_are_rejected(shapes: list[tuple[int, ...]], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        result_validation.check_reported_shapes([IMAGE, OPEN], shapes)


def test_a_result_larger_than_its_argument_is_rejected() -> None:
    places, _ = tensor_layout.layout([OPEN], [(2, 3)], 0)
    result_validation.check_fits([OPEN], places, [(2, 3)])
    with pytest.raises(ProtocolError, match="reports 3x3 for output 'open', whose location has 24 bytes"):
        result_validation.check_fits([OPEN], places, [(3, 3)])


SCALAR = TensorInfo("n", (), "int64", is_scalar=True)


def test_a_scalar_is_fully_known() -> None:
    array_checks.require_fixed_shapes("input", [SCALAR])


@pytest.mark.parametrize("value", [3, np.int64(3), np.int8(3), np.array(3)])
def test_a_scalar_accepts_a_number(value: Any) -> None:
    assert array_checks.checked_array(SCALAR, value).shape == ()


@pytest.mark.parametrize("value", [[3], np.int64([[3]]), []])
def test_a_scalar_rejects_an_array(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="'n' has shape scalar"):
        array_checks.checked_array(SCALAR, value)
