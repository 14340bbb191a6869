"""What a driver answers is held against the model and the request before it is used (VAL-7)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nnfmq.hal.errors import ErrorStatus, ProtocolError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import (
    NO_TIMING,
    DataLocation,
    DeviceStatus,
    DeviceType,
    OutputShape,
    RequestArgument,
    Timing,
)
from nnfmq.runtime.results import check_result, possible_devices
from nnfmq.serialize.messages import DeviceInfo, ExtensionData, OperandTypeData

NONE, SHORT = ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
KNOWN, OPEN, ANY, SCALAR = (
    TensorInfo("known", (2, 3), "float32"),
    TensorInfo("open", (0, 3), "float32"),
    TensorInfo("any", (), "float32"),
    TensorInfo("scalar", (), "float32", is_scalar=True),
)
PLACE = RequestArgument(location=DataLocation(0, 0, 24))
ASKED = RequestArgument(location=DataLocation(0, 0, 24), dimensions=(2, 3))
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
        (OPEN, ASKED, NONE, ()),
        (ANY, ASKED, NONE, (shape(2, 3),)),
        (ANY, ASKED, NONE, ()),
        (SCALAR, PLACE, NONE, ()),
        (ANY, PLACE, NONE, (shape(6),)),
        (OPEN, OMITTED, NONE, (shape(1000, 3),)),
        (OPEN, PLACE, SHORT, (shape(9, 3, short=True),)),
        (OPEN, PLACE, SHORT, (shape(0, 3, short=True),)),
        (KNOWN, PLACE, ErrorStatus.GENERAL_FAILURE, (shape(7), shape(7))),
    ],
)
def test_answers_that_can_be_true_are_believed(
    info: TensorInfo, place: RequestArgument, status: ErrorStatus, shapes: tuple[OutputShape, ...]
) -> None:
    check_result([info], [place], status, shapes, NO_TIMING, False)


@pytest.mark.parametrize(
    ("info", "place", "status", "shapes", "said"),
    [
        (KNOWN, PLACE, NONE, (shape(2, 3), shape(2, 3)), "shapes of 2 outputs"),
        (KNOWN, PLACE, NONE, (shape(3, 2),), "states the shape 3x2"),
        (KNOWN, PLACE, NONE, (shape(6),), "states the shape 6"),
        (KNOWN, PLACE, NONE, (shape(2, 3, short=True),), "SHP-2"),
        (OPEN, PLACE, NONE, (), "SHP-2"),
        (ANY, PLACE, NONE, (), "SHP-2"),
        (OPEN, PLACE, NONE, (shape(3, 3),), "which had 24 bytes"),
        (OPEN, ASKED, NONE, (shape(1, 3),), "states the shape 1x3"),
        (ANY, ASKED, NONE, (shape(6),), "states the shape 6"),
        (KNOWN, RequestArgument(location=PLACE.location, dimensions=(6,)), NONE, (), "executed output 'known'"),
        (OPEN, PLACE, SHORT, (), "shapes of 0 outputs"),
        (OPEN, PLACE, SHORT, (shape(9, 3),), "SHP-4"),
        (OPEN, PLACE, SHORT, (shape(9, 4, short=True),), "states the shape 9x4"),
        (OPEN, PLACE, SHORT, (shape(2**31, 3, short=True),), "states the shape"),
    ],
)
def test_VAL_7_answers_that_cannot_be_true_break_the_protocol(
    info: TensorInfo, place: RequestArgument, status: ErrorStatus, shapes: tuple[OutputShape, ...], said: str
) -> None:
    with pytest.raises(ProtocolError, match=said):
        check_result([info], [place], status, shapes, NO_TIMING, False)


def test_VAL_7_a_request_with_another_number_of_outputs_cannot_have_been_executed() -> None:
    with pytest.raises(ProtocolError, match="2 outputs of a model that has 1"):
        check_result([KNOWN], [PLACE, PLACE], NONE, (), NO_TIMING, False)


@pytest.mark.parametrize("times", [(-1, -1), (3, 3), (3, 9), (-1, 9), (9, -1)])
def test_TIM_4_times_that_can_be_true_are_believed(times: Any) -> None:
    check_result([KNOWN], [PLACE], NONE, (), Timing(*times), True)


@pytest.mark.parametrize("times", [(9, 3), (-2, 3), (3, -2)])
def test_VAL_7_TIM_4_times_that_cannot_be_true_break_the_protocol(times: Any) -> None:
    with pytest.raises(ProtocolError, match="impossible times"):
        check_result([KNOWN], [PLACE], NONE, (), Timing(*times), True)


def test_VAL_7_TIM_3_times_that_were_not_asked_for_break_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="not asked for"):
        check_result([KNOWN], [PLACE], NONE, (), Timing(1, 2), False)


# ------------------------------------------------------------------------------------------------ devices

GOOD = DeviceInfo("good", DeviceType.CPU, "1", 8, DeviceStatus.AVAILABLE, (), 32, 0)
ELEMENT = OperandTypeData(0, True, 4, "float32")


def extended(name: str, *elements: OperandTypeData) -> DeviceInfo:
    return replace(GOOD, extensions=(ExtensionData(name, elements),))


def test_N_BAS_3_devices_that_can_be_are_kept_in_their_order() -> None:
    kept = [GOOD, extended("com.example.a", ELEMENT), replace(GOOD, status=DeviceStatus.OFFLINE)]
    assert possible_devices(kept) == kept


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (replace(GOOD, name="bad", version=""), "DEV-4"),
        (replace(GOOD, name="bad", model_cache_files=33), "33 cache files"),
        (replace(GOOD, name="bad", data_cache_files=2**32 - 1), "DEV-6"),
        (extended("noperiod", ELEMENT), "'noperiod'"),
        (extended("com.example.a", ELEMENT, ELEMENT), "EXT-1"),
        (extended("com.example.a", replace(ELEMENT, byte_size=0)), "EXT-1"),
    ],
    ids=["version", "model files", "data files", "extension's name", "type twice", "no bytes"],
)
def test_N_BAS_3_DEV_10_VAL_7_a_device_that_cannot_be_is_left_out_with_a_log_line(
    bad: DeviceInfo, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert possible_devices([GOOD, bad, GOOD]) == [GOOD, GOOD]
    (record,) = caplog.records
    assert said in record.message and repr(bad.name) in record.message
