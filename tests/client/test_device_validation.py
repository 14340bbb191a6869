"""The driver's device list is validated before an application gets it (DEV-10)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nnfmq.client.connection.client import valid_devices
from nnfmq.hal.types import DeviceStatus, DeviceType
from nnfmq.serialize.messages import DeviceInfo, ExtensionData, OperandTypeData

GOOD = DeviceInfo("good", DeviceType.CPU, "1", 8, DeviceStatus.AVAILABLE, (), 32, 0)
ELEMENT = OperandTypeData(0, True, 4, "float32")


def extended(name: str, *elements: OperandTypeData) -> DeviceInfo:
    return replace(GOOD, extensions=(ExtensionData(name, elements),))


def test_N_BAS_3_valid_devices_are_kept_in_order() -> None:
    kept = [GOOD, extended("com.example.a", ELEMENT), replace(GOOD, status=DeviceStatus.OFFLINE)]
    assert valid_devices(kept) == kept


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (replace(GOOD, name="bad", version=""), "DEV-4"),
        (replace(GOOD, name="bad", feature_level=0), "feature level is 0"),
        (replace(GOOD, name="bad", model_cache_files=33), "33 cache files"),
        (replace(GOOD, name="bad", data_cache_files=2**32 - 1), "DEV-6"),
        (extended("noperiod", ELEMENT), "'noperiod'"),
        (extended("com.example.a", ELEMENT, ELEMENT), "EXT-1"),
        (extended("com.example.a", replace(ELEMENT, byte_size=0)), "EXT-1"),
    ],
    ids=[
        "DEV-4 version",
        "feature level",
        "DEV-6 model files",
        "DEV-6 data files",
        "extension's name",
        "type twice",
        "no bytes",
    ],
)
def test_N_BAS_3_DEV_10_VAL_7_an_invalid_device_is_omitted_and_logged(
    bad: DeviceInfo, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert valid_devices([GOOD, bad, GOOD]) == [GOOD, GOOD]
    (record,) = caplog.records
    assert said in record.message and repr(bad.name) in record.message
