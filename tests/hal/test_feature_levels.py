"""Feature levels, extension codes and result codes, as in docs/contributing/requirements.md, sections 0 and 2."""

from __future__ import annotations

import pytest

from nnfmq.hal import errors
from nnfmq.hal.capabilities import ResultCode, result_code_for_error, result_code_for_status, status_for_result_code
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extensions import extension_code, extension_prefix, extension_type, is_extension
from nnfmq.hal.feature_levels import (
    FeatureLevel,
    api_level,
    interface_name,
    introduced_in,
    is_aidl,
    prefix_bits,
)
from nnfmq.hal.types import LifeTime, OperandType, OperationType, Priority, element_bytes, is_scalar
from nnfmq.operations import HAL_DECLARATIONS

L = FeatureLevel


def test_VAL_2_every_declaration_has_the_level_that_introduced_its_code() -> None:
    assert {code: int(introduced_in(code)) for code in HAL_DECLARATIONS} == {
        c: d.since for c, d in HAL_DECLARATIONS.items()
    }


def test_DEV_9_levels_have_their_names_and_api_levels() -> None:
    assert [interface_name(level) for level in L] == [
        "HIDL 1.0", "HIDL 1.1", "HIDL 1.2", "HIDL 1.3", "AIDL v1", "AIDL v2", "AIDL v3", "AIDL v4",
    ]  # fmt: skip
    assert [api_level(level) for level in L] == [27, 28, 29, 30, 31, 1000006, 1000007, 1000008]
    assert [is_aidl(level) for level in L] == [False] * 4 + [True] * 4


def test_MOD_3_operand_types_have_the_level_that_introduced_them() -> None:
    assert [int(introduced_in(OperandType(code))) for code in range(16)] == [1] * 6 + [3] * 8 + [4] * 2
    assert introduced_in(OperandType.OEM) == introduced_in(OperandType.TENSOR_OEM_BYTE) == L.V1_0
    assert introduced_in(OperationType.OEM_OPERATION) == L.V1_0


def test_MOD_4_lifetimes_have_the_level_that_introduced_them() -> None:
    assert (introduced_in(LifeTime.SUBGRAPH), introduced_in(LifeTime.NO_VALUE), introduced_in(Priority.LOW)) == (
        L.V1_3,
        L.V1_0,
        L.V1_3,
    )


def test_a_status_of_no_interface_has_no_level() -> None:
    with pytest.raises(KeyError, match="DEAD_OBJECT"):
        introduced_in(ErrorStatus.DEAD_OBJECT)


@pytest.mark.parametrize("kind", [OperandType, OperationType])
def test_MOD_15_codes_above_0xFFFF_are_an_extensions(kind: type[OperandType] | type[OperationType]) -> None:
    code = kind(0x0007_0002)

    assert (extension_prefix(code), extension_type(code), introduced_in(code)) == (7, 2, L.V1_2)
    assert is_extension(code)
    assert not any(is_extension(member) for member in kind)
    for wrong in (-1, 9999, 0xFFFF, 1 << 32):
        with pytest.raises(ValueError, match="is not a valid"):
            kind(wrong)


def test_MOD_15_an_extensions_type_has_no_size() -> None:
    unknown = OperandType(999 << 16)
    assert element_bytes(unknown) == 0
    assert not is_scalar(unknown)


def test_MOD_15_prefixes_have_15_bits_in_AIDL_and_16_in_HIDL() -> None:
    assert [prefix_bits(level) for level in L] == [16] * 4 + [15] * 4
    assert extension_code(7, 2) == 0x0007_0002
    assert extension_code(0xFFFF, 0, prefix_bits=16) == 0xFFFF_0000


@pytest.mark.parametrize(("prefix", "number"), [(0, 0), (-1, 0), (0x8000, 0), (1, 0x10000), (1, -1)])
def test_MOD_15_numbers_out_of_range_are_rejected(prefix: int, number: int) -> None:
    with pytest.raises(InvalidArgument, match="allowed are"):
        extension_code(prefix, number)


def test_API_13_result_codes_become_statuses() -> None:
    assert [int(status_for_result_code(ResultCode(code))) for code in range(15)] == [
        0,
        2,
        2,
        4,
        4,
        2,
        2,
        2,
        3,
        1,
        5,
        6,
        7,
        8,
        2,
    ]


def test_API_14_each_status_of_a_driver_has_a_result_code() -> None:
    named = {
        ErrorStatus.NONE: 0,
        ErrorStatus.DEVICE_UNAVAILABLE: 9,
        ErrorStatus.GENERAL_FAILURE: 5,
        ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: 8,
        ErrorStatus.INVALID_ARGUMENT: 4,
        ErrorStatus.MISSED_DEADLINE_TRANSIENT: 10,
        ErrorStatus.MISSED_DEADLINE_PERSISTENT: 11,
        ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: 12,
        ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: 13,
        ErrorStatus.DEAD_OBJECT: 14,
    }
    assert {status: int(result_code_for_status(status)) for status in ErrorStatus} == named


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BadState("x"), "BAD_STATE"),
        (errors.InvalidArgument("x"), "BAD_DATA"),
        (errors.DeadObject("x"), "DEAD_OBJECT"),
        (errors.ProtocolError("x"), "OP_FAILED"),
        (errors.MissedDeadlinePersistent("x"), "MISSED_DEADLINE_PERSISTENT"),
        (MemoryError(), "OUT_OF_MEMORY"),
        (KeyError("x"), "OP_FAILED"),
    ],
)
def test_API_13_API_14_each_error_has_a_result_code(error: BaseException, code: str) -> None:
    assert result_code_for_error(error).name == code
