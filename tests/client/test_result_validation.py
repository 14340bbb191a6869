"""A driver's result is validated against the model and the request before it is used (VAL-7)."""

from __future__ import annotations

from typing import Any

import pytest

from nnfmq.client.execution.requests import validate_result
from nnfmq.client.model import arrays
from nnfmq.client.model.arrays import check_fits, check_reported_shapes
from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import NO_TIMING, Timing
from nnfmq.hal.types import DataLocation, OutputShape, RequestArgument

NONE, SHORT = ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
KNOWN, OPEN, ANY, SCALAR = (
    TensorInfo("known", (2, 3), "float32"),
    TensorInfo("open", (0, 3), "float32"),
    TensorInfo("any", (), "float32"),
    TensorInfo("scalar", (), "float32", is_scalar=True),
)
IMAGE = TensorInfo("image", (1, 2, 3), "float32")
PLACE = RequestArgument(location=DataLocation(0, 0, 24))
SPECIFIED = RequestArgument(location=DataLocation(0, 0, 24), dimensions=(2, 3))
OMITTED = RequestArgument(has_no_value=True)


def shape(*dimensions: int, short: bool = False) -> OutputShape:
    return OutputShape(dimensions, not short)


@pytest.mark.parametrize(
    ("info", "place", "status", "shapes"),
    [
        (KNOWN, PLACE, NONE, ()),
        (KNOWN, PLACE, NONE, (shape(2, 3),)),
        (OPEN, PLACE, NONE, (shape(1, 3),)),
        (OPEN, PLACE, NONE, (shape(0, 3),)),
        (OPEN, SPECIFIED, NONE, ()),
        (ANY, SPECIFIED, NONE, (shape(2, 3),)),
        (ANY, SPECIFIED, NONE, ()),
        (SCALAR, PLACE, NONE, ()),
        (ANY, PLACE, NONE, (shape(6),)),
        (OPEN, OMITTED, NONE, (shape(1000, 3),)),
        (OPEN, PLACE, SHORT, (shape(9, 3, short=True),)),
        (OPEN, PLACE, SHORT, (shape(0, 3, short=True),)),
        (KNOWN, PLACE, ErrorStatus.GENERAL_FAILURE, (shape(7), shape(7))),
    ],
)
def test_valid_results_are_accepted(
    info: TensorInfo, place: RequestArgument, status: ErrorStatus, shapes: tuple[OutputShape, ...]
) -> None:
    validate_result([info], [place], status, shapes, NO_TIMING, False)


@pytest.mark.parametrize(
    ("info", "place", "status", "shapes", "said"),
    [
        (KNOWN, PLACE, NONE, (shape(2, 3), shape(2, 3)), "shapes of 2 outputs"),
        (KNOWN, PLACE, NONE, (shape(3, 2),), "reports the shape 3x2"),
        (KNOWN, PLACE, NONE, (shape(6),), "reports the shape 6"),
        (KNOWN, PLACE, NONE, (shape(2, 3, short=True),), "SHP-2"),
        (OPEN, PLACE, NONE, (), "SHP-2"),
        (ANY, PLACE, NONE, (), "SHP-2"),
        (OPEN, PLACE, NONE, (shape(3, 3),), "whose location has 24 bytes"),
        (OPEN, SPECIFIED, NONE, (shape(1, 3),), "reports the shape 1x3"),
        (ANY, SPECIFIED, NONE, (shape(6),), "reports the shape 6"),
        (KNOWN, RequestArgument(location=PLACE.location, dimensions=(6,)), NONE, (), "executed output 'known'"),
        (OPEN, PLACE, SHORT, (), "shapes of 0 outputs"),
        (OPEN, PLACE, SHORT, (shape(9, 3),), "SHP-4"),
        (OPEN, PLACE, SHORT, (shape(9, 4, short=True),), "reports the shape 9x4"),
        (OPEN, PLACE, SHORT, (shape(2**31, 3, short=True),), "reports the shape"),
    ],
)
def test_VAL_7_invalid_results_are_protocol_errors(
    info: TensorInfo, place: RequestArgument, status: ErrorStatus, shapes: tuple[OutputShape, ...], said: str
) -> None:
    with pytest.raises(ProtocolError, match=said):
        validate_result([info], [place], status, shapes, NO_TIMING, False)


def test_VAL_7_success_of_a_request_with_another_number_of_outputs_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="2 outputs of a model that has 1"):
        validate_result([KNOWN], [PLACE, PLACE], NONE, (), NO_TIMING, False)


@pytest.mark.parametrize("times", [(-1, -1), (3, 3), (3, 9), (-1, 9), (9, -1)])
def test_TIM_4_valid_times_are_accepted(times: Any) -> None:
    validate_result([KNOWN], [PLACE], NONE, (), Timing(*times), True)


@pytest.mark.parametrize("times", [(9, 3), (-2, 3), (3, -2)])
def test_VAL_7_TIM_4_invalid_times_are_protocol_errors(times: Any) -> None:
    with pytest.raises(ProtocolError, match="invalid times"):
        validate_result([KNOWN], [PLACE], NONE, (), Timing(*times), True)


def test_VAL_7_TIM_3_times_that_were_not_requested_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError, match="not requested"):
        validate_result([KNOWN], [PLACE], NONE, (), Timing(1, 2), False)


@pytest.mark.parametrize("shapes", [[(1, 2, 3), (0, 3)], [(1, 2, 3), (9, 3)]])
def test_possible_shapes_of_the_outputs_are_accepted(shapes: list[tuple[int, ...]]) -> None:
    check_reported_shapes([IMAGE, OPEN], shapes)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([], "the shapes of 0 outputs, the model has 2"),
        ([(1, 2, 3)] * 3, "the shapes of 3 outputs, the model has 2"),
        ([(1, 2, 4), (9, 3)], "the shape 1x2x4 for output 'image' of shape 1x2x3"),
        ([(1, 2, 3), (9,)], r"the shape 9 for output 'open' of shape any x 3"),
        ([(1, 2, 3), (9, 4)], r"the shape 9x4 for output 'open' of shape any x 3"),
        ([(1, 2, 3), (2**32 - 1, 3)], "the shape 4294967295x3 for output 'open'"),
    ],
)
def test_impossible_shapes_of_the_outputs_are_rejected(shapes: list[tuple[int, ...]], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        check_reported_shapes([IMAGE, OPEN], shapes)


def test_a_result_larger_than_its_argument_is_rejected() -> None:
    places, _ = arrays.layout([OPEN], [(2, 3)], 0)
    check_fits([OPEN], places, [(2, 3)])
    with pytest.raises(ProtocolError, match="reports 3x3 for output 'open', whose location has 24 bytes"):
        check_fits([OPEN], places, [(3, 3)])
