"""The types of extensions that a driver reports are validated before arrays are created from them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.plugins import NAME, Fibonacci

from nnfmq.client.connection.device import extension_types
from nnfmq.hal.errors import GeneralFailure, ProtocolError
from nnfmq.hal.tensor_info import ElementInfo
from nnfmq.hal.types import DeviceStatus, DeviceType
from nnfmq.serialize.messages import DeviceInfo, ExtensionData, OperandTypeData

INT64, CODES = OperandTypeData(0, False, 8, "int64"), OperandTypeData(1, True, 8, "int64")


def device(*types: OperandTypeData) -> DeviceInfo:
    stated = (ExtensionData("com.example.other", (INT64,)), ExtensionData(NAME, types))
    return DeviceInfo("reference", DeviceType.CPU, "1", 8, DeviceStatus.AVAILABLE, stated)


def test_EXT_3_types_are_found_by_the_model_s_type_codes() -> None:
    build = Fibonacci()
    build.numbers.prefix("com.example.unused")
    kinds = build.int64, build.codes().type
    model = build.model()
    assert extension_types(model, [device(INT64, CODES)]) == {
        kinds[0]: ElementInfo("int64", True),
        kinds[1]: ElementInfo("int64", False),
    }


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("int64", 4), ("int32", 8), ("O", 8), ("object", 8), ("i4,i4", 8), ("(2,)i4", 8), ("S8", 8), ("V8", 8),
     ("<M8[s]", 8), ("no such", 8), ("", 8), ("{", 8), ("(99999999999999,)i8", 8)],
)  # fmt: skip
def test_N_an_invalid_type_is_an_error_of_the_driver(dtype: str, size: int) -> None:
    with pytest.raises(ProtocolError, match="the driver reports elements of"):
        extension_types(Fibonacci().model(), [device(replace_dtype(dtype, size), CODES)])


def replace_dtype(dtype: str, size: int) -> OperandTypeData:
    return OperandTypeData(0, False, size, dtype)


@pytest.mark.parametrize("types", [(), (CODES,), (INT64,)])
def test_EXT_5_the_error_names_a_type_that_the_device_does_not_have(types: tuple[OperandTypeData, ...]) -> None:
    with pytest.raises(GeneralFailure, match=rf"reference has no type [01] of extension {NAME}"):
        extension_types(Fibonacci().model(), [device(*types)])


def test_a_model_without_extension_names_is_validated_by_the_driver() -> None:
    assert extension_types(replace(Fibonacci().model(), extensions=()), [device(INT64, CODES)]) == {}
