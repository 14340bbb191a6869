"""Checks of the application's arrays, and their error messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nnfmq.client.model import arrays
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo

IMAGE = TensorInfo("image", (1, 2, 3), "float32")
PIXELS = TensorInfo("pixels", (5,), "uint8")
OPEN = TensorInfo("open", (0, 3), "float32")
FACTOR = TensorInfo("factor", (), "float32")
SCALAR = TensorInfo("n", (), "int64", is_scalar=True)
TOKENS = TensorInfo("tokens", (2,), "int32")


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
        (SCALAR, 2),
        (TOKENS, np.array([-(2**31), 2**31 - 1], np.int64)),
        (TOKENS, np.array([0, 65535], np.uint16)),
    ],
    ids=["float32", "float64", "float16", "list", "strided", "uint8", "open extent", "scalar", "int64", "uint16"],
)
def test_an_array_that_fits_is_accepted(info: TensorInfo, value: Any) -> None:
    np.testing.assert_array_equal(arrays.checked_array(info, value), np.asarray(value))


BATCH = TensorInfo("batch", (0, 2, 3), "float32")


@pytest.mark.parametrize(
    ("info", "shape", "expected"),
    [(IMAGE, (2, 3), (1, 2, 3)), (BATCH, (2, 3), (1, 2, 3)), (BATCH, (4, 2, 3), (4, 2, 3)), (FACTOR, (3,), (3,))],
)
def test_a_missing_batch_dimension_is_added_without_a_copy(
    info: TensorInfo, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    given = np.zeros(shape, np.float32)
    checked = arrays.checked_array(info, given)
    assert checked.shape == expected
    assert np.shares_memory(checked, given)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 2), (1, 1, 2, 3), (2, 2, 3)])
def test_no_other_dimension_is_added(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="input 'image' has shape 1x2x3"):
        arrays.checked_array(IMAGE, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("info", "value", "said"),
    [
        (IMAGE, np.zeros((1, 3, 2), np.float32), "input 'image' has shape 1x2x3; the given array has 1x3x2"),
        (IMAGE, np.zeros(6, np.float32), "input 'image' has shape 1x2x3; the given array has 6"),
        (IMAGE, np.zeros((1, 1, 2, 3), np.float32), "has 1x1x2x3: give the array itself, without another dimension"),
        (IMAGE, [np.zeros((1, 2, 3))], "has 1x1x2x3: give the array itself, without another dimension around it"),
        (
            IMAGE,
            np.zeros((4, 2, 3), np.float32),
            r"has 4x2x3: call the model for each row, or prepare its file with shapes=\{'image': \(4, 2, 3\)\}",
        ),
        (IMAGE, np.zeros((1, 3, 2), np.float32), "dimensions are in another order, so use array.transpose"),
        (IMAGE, np.zeros((3, 2), np.float32), r"has 3x2: use array\.reshape\(1, 2, 3\)"),
        (IMAGE, np.zeros((1, 2, 4), np.float32), "the given array has 1x2x4$"),
        (IMAGE, "photo.jpg", "shape 1x2x3; nnfmq.read_photo and nnfmq.read_audio read files"),
        (replace(PIXELS, scale=0.5, zero_point=-3), np.zeros(5), r"convert it, as by round\(value / 0\.5\) - 3"),
        (PIXELS, np.zeros(5), r"convert it, as by array\.astype\('uint8'\)"),
        (OPEN, np.zeros((9, 4), np.float32), r"input 'open' has shape any x 3; the given array has 9x4"),
        (PIXELS, np.float32(1), "input 'pixels' has shape 5; the given array has scalar"),
        (PIXELS, np.zeros(5, np.float32), "input 'pixels' holds uint8; the given array is float32"),
        (PIXELS, np.zeros(5, np.int8), "input 'pixels' holds uint8; the given array is int8"),
        (IMAGE, np.zeros((1, 2, 3), np.complex64), "input 'image' holds float32; the given array is complex64"),
        (IMAGE, np.full((1, 2, 3), "x"), "input 'image' holds float32; the given array is <U1"),
        (IMAGE, [[[1, 2, 3], [4, 5]]], "input 'image' is no array: "),
        (
            TOKENS,
            [2**31, 0],
            r"'tokens' holds int32 \(-2147483648 to 2147483647\); the given int64 array contains 2147483648",
        ),
        (TOKENS, [0, -(2**31) - 1], "the given int64 array contains -2147483649"),
    ],
)
def test_an_array_that_does_not_fit_is_rejected_with_both_shapes_and_types(
    info: TensorInfo, value: Any, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        arrays.checked_array(info, value)


@pytest.mark.parametrize(("given", "said"), [(0, "0 were"), (1, "1 was"), (3, "3 were")])
def test_another_number_of_arrays_is_rejected_with_the_names(given: int, said: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"2 inputs \('image', 'pixels'\); {said} given"):
        arrays.check_count("input", [IMAGE, PIXELS], given)


@pytest.mark.parametrize("info", [OPEN, TensorInfo("rankless", (), "float32")])
def test_a_shape_that_is_not_fully_known_is_rejected_for_a_burst(info: TensorInfo) -> None:
    with pytest.raises(InvalidArgument, match=f"output '{info.name}'.*use model.execute"):
        arrays.require_fixed_shapes("output", [IMAGE, info])


def test_results_are_copied_into_the_given_arrays() -> None:
    target, result = np.zeros(3, np.float32), np.arange(3, dtype=np.float32)
    arrays.copy_out([target], [result])
    assert target.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "the model has 1 output, `out` has 0 arrays"),
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
        arrays.check_out([TensorInfo("scores", (3,), "float32")], targets)


def test_an_unknown_output_shape_is_checked_when_it_is_reported() -> None:
    target = np.zeros(4, np.float32)
    arrays.check_out([TensorInfo("open", (0,), "float32")], [target])
    with pytest.raises(InvalidArgument, match=r"output 0 has shape \(3,\), `out` has \(4,\)"):
        arrays.copy_out([target], [np.arange(3, dtype=np.float32)])


def test_a_scalar_is_fully_known() -> None:
    arrays.require_fixed_shapes("input", [SCALAR])


@pytest.mark.parametrize("value", [3, np.int64(3), np.int8(3), np.array(3)])
def test_a_scalar_accepts_a_number(value: Any) -> None:
    assert arrays.checked_array(SCALAR, value).shape == ()


@pytest.mark.parametrize("value", [[3], np.int64([[3]]), []])
def test_a_scalar_rejects_an_array(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="'n' has shape scalar"):
        arrays.checked_array(SCALAR, value)
