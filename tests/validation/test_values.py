"""validate_* of every value that is neither a model nor a request (REQUIREMENTS VAL-4 and the rows it names)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.small_models import two_adds

from nnfmq.hal import capabilities
from nnfmq.hal.capabilities import BufferDesc, BufferRole, OperandPerformance, PerformanceInfo
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.extensions import Extension, ExtensionOperandTypeInformation
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import (
    DeviceStatus,
    DeviceType,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    MeasureTiming,
    OperandType,
    OutputShape,
    Priority,
    TokenValuePair,
)
from nnfmq.lab.conformance.testmodels import BytesPool
from nnfmq.validation import values

GOOD = capabilities.uniform_capabilities(PerformanceInfo(0.5, 0.25))


def rejected(rule: str, check: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"\({rule}\)$"):
        check(*arguments)


@pytest.mark.parametrize(
    ("check", "kind", "rule", "level"),
    [
        (values.validate_execution_preference, ExecutionPreference, "N-MOD-21", 2),
        (values.validate_priority, Priority, "N-MOD-22", 4),
        (values.validate_device_type, DeviceType, "DEV-3", 3),
        (values.validate_device_status, DeviceStatus, "DEV-2", 1),
        (values.validate_measure_timing, MeasureTiming, "VAL-4", 3),
    ],
)
def test_VAL_4_UTL_4_N_MOD_21_N_MOD_22_codes_next_to_the_range_are_rejected(
    check: Callable[[Any], int], kind: Any, rule: str, level: int
) -> None:
    rejected(rule, check, min(kind) - 1)
    rejected(rule, check, max(kind) + 1)
    assert {int(check(value)) for value in kind} == {level}


@pytest.mark.parametrize("code", [-1, 9, 10000])
def test_VAL_4_UTL_4_a_status_that_no_interface_has_is_rejected(code: int) -> None:
    rejected("VAL-4", values.validate_error_status, code)


def test_VAL_4_UTL_4_statuses_above_4_need_1_3() -> None:
    levels = {int(s): int(values.validate_error_status(s)) for s in ErrorStatus if s != ErrorStatus.DEAD_OBJECT}

    assert levels == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 4, 6: 4, 7: 4, 8: 4}


@pytest.mark.parametrize(("device_ns", "driver_ns", "rule"), [(-2, 5, "VAL-4"), (5, -2, "VAL-4"), (6, 5, "TIM-4")])
def test_VAL_4_UTL_4_TIM_4_impossible_times_are_rejected(device_ns: int, driver_ns: int, rule: str) -> None:
    rejected(rule, values.validate_timing, Timing(device_ns, driver_ns))


@pytest.mark.parametrize("timing", [Timing(), Timing(5, 5), Timing(7, -1), Timing(-1, 0)])
def test_TIM_3_either_time_may_be_unavailable(timing: Timing) -> None:
    assert values.validate_timing(timing) == 3


def test_N_VAL_23_a_duration_below_minus_1_or_over_63_bits_is_rejected() -> None:
    rejected("N-VAL-23", values.validate_duration, -2)
    rejected("N-VAL-23", values.validate_duration, 1 << 63)
    assert [int(values.validate_duration(ns)) for ns in (-1, 0, (1 << 63) - 1)] == [4, 4, 4]


@pytest.mark.parametrize("size", [0, 31, 33])
def test_N_VAL_23_a_cache_token_of_another_length_is_rejected(size: int) -> None:
    rejected("N-VAL-23", values.validate_cache_token, bytes(size))
    assert values.validate_cache_token(bytes(32)) == 3


def test_N_RQX_14_a_loop_timeout_above_15_seconds_is_rejected() -> None:
    rejected("N-RQX-14", values.validate_loop_timeout, 15_000_000_001)
    rejected("N-RQX-14", values.validate_loop_timeout, -2)
    assert values.validate_loop_timeout(15_000_000_000) == 4


@pytest.mark.parametrize("extent", [-1, 1 << 32])
def test_VAL_4_UTL_4_dimensions_that_are_no_counts_are_rejected(extent: int) -> None:
    rejected("VAL-4", values.validate_output_shapes, [OutputShape((1,)), OutputShape((extent,))])
    rejected("VAL-4", values.validate_buffer_desc, BufferDesc((extent,)))
    assert values.validate_output_shapes([OutputShape((0, 3), False)]) == 3
    assert values.validate_buffer_desc(BufferDesc((0, 3))) == 4


def test_N_VAL_13_a_pool_of_no_bytes_is_rejected() -> None:
    rejected("N-VAL-13", values.validate_memory_pool, BytesPool(b""))
    assert values.validate_memory_pool(BytesPool(b"x")) == 1


@pytest.mark.parametrize("counts", [(1, 1, 2, 1, 1), (1, 1, 2, 1, 0, 0), (0, 1, 2, 1, 0)])
def test_N_MOD_8_other_numbers_of_consumers_are_rejected(counts: tuple[int, ...]) -> None:
    rejected("N-MOD-8", values.validate_consumers, two_adds().main, counts)


def test_N_MOD_8_UTL_8_numbers_of_consumers_count_every_reading() -> None:
    main = two_adds().main
    readings = [index for operation in main.operations for index in operation.inputs]

    assert values.validate_consumers(main, [readings.count(i) for i in range(len(main.operands))]) == 1


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [10.0, 0.0, -0.5, float("nan")])
def test_N_DOM_6_a_probability_outside_0_to_1_is_rejected(probability: float) -> None:
    rejected("N-DOM-6", values.validate_buffer_roles, [BufferRole(0, 0, probability)], [])


def test_N_DOM_7_a_role_given_twice_is_rejected() -> None:
    rejected("N-DOM-7", values.validate_buffer_roles, [], [BufferRole(0, 1, 0.5), BufferRole(0, 1, 1.0)])


@pytest.mark.parametrize("roles", [([], []), ([BufferRole(-1, 0)], []), ([], [BufferRole(0, -1)])])
def test_DOM_3_no_role_or_an_index_below_0_is_rejected(roles: tuple[list[BufferRole], list[BufferRole]]) -> None:
    rejected("DOM-3", values.validate_buffer_roles, *roles)


def test_DOM_3_input_and_output_of_one_number_are_two_roles() -> None:
    assert values.validate_buffer_roles([BufferRole(0, 0)], [BufferRole(0, 0, 0.1)]) == 4


# -- capabilities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["if_performance", "while_performance", "relaxed_float32_to_float16_scalar"])
def test_CAP_1_a_figure_that_is_not_positive_is_rejected(field: str, figure: float) -> None:
    rejected("CAP-1", values.validate_capabilities, replace(GOOD, **cast(Any, {field: PerformanceInfo(1.0, figure)})))


@pytest.mark.parametrize("types", [(3, 0), (3, 3), (15,), (0x10000,)])
def test_CAP_3_a_list_of_types_out_of_order_or_with_a_type_that_has_no_figure_is_rejected(
    types: tuple[int, ...],
) -> None:
    entries = tuple(OperandPerformance(OperandType(t), PerformanceInfo(1.0, 1.0)) for t in types)

    rejected("CAP-3", values.validate_capabilities, replace(GOOD, operand_performance=entries))


def test_CAP_3_a_code_that_is_no_type_is_rejected() -> None:
    entries = (OperandPerformance(cast(OperandType, 99), PerformanceInfo(1.0, 1.0)),)

    with pytest.raises(InvalidArgument, match=r"operand type 99 \(CAP-3\)"):
        values.validate_capabilities(replace(GOOD, operand_performance=entries))


def test_CAP_6_every_type_gets_a_figure_and_the_newest_needs_1_3() -> None:
    assert [int(e.type) for e in GOOD.operand_performance] == [*range(15), 10000, 10001]
    assert values.validate_capabilities(GOOD) == 4


def test_CAP_6_a_type_that_is_not_listed_is_as_slow_as_float32_can_say() -> None:
    fast = PerformanceInfo(0.1, 0.1)
    some = capabilities.with_performance(
        capabilities.Capabilities(), [OperandType.TENSOR_FLOAT32, OperandType.FLOAT32], fast
    )

    assert [int(e.type) for e in some.operand_performance] == [0, 3]
    assert capabilities.performance_of(some, OperandType.FLOAT32) == fast
    assert capabilities.performance_of(some, OperandType.BOOL).exec_time == pytest.approx(
        3.4028234663852886e38, rel=1e-15
    )


@pytest.mark.parametrize("counts", [(33, 0), (0, 33), (-1, 0)])
def test_DEV_6_more_than_32_cache_files_are_rejected(counts: tuple[int, int]) -> None:
    rejected("DEV-6", values.validate_cache_counts, *counts)
    assert values.validate_cache_counts(32, 0) == 3


# -- extensions -------------------------------------------------------------------------------------------------------

BAD_NAMES = ["", "fibonacci", "com.Example", "com..x", ".com.x", "com.x.", "com.exa-mple", "com.x\n"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_EXT_1_N_VAL_12_a_malformed_name_is_rejected(name: str) -> None:
    rejected("EXT-1", values.validate_extension, Extension(name))
    rejected("N-VAL-12", values.validate_extensions, [ExtensionNameAndPrefix(name, 1)])


@pytest.mark.parametrize("types", [((0, 0),), ((-1, 8),), ((0x10000, 8),), ((1, 8), (1, 4))])
def test_EXT_1_a_bad_operand_type_of_an_extension_is_rejected(types: tuple[tuple[int, int], ...]) -> None:
    listed = tuple(ExtensionOperandTypeInformation(number, True, size) for number, size in types)

    rejected("EXT-1", values.validate_extension, Extension("com.example.fibonacci", listed))


@pytest.mark.parametrize(
    "entries",
    [(("com.a", 1), ("com.a", 2)), (("com.a", 1), ("com.b", 1)), (("com.a", 0),), (("com.a", 1 << 16),)],
)
def test_N_VAL_12_names_and_prefixes_are_one_to_one_and_never_0(entries: Any) -> None:
    rejected("N-VAL-12", values.validate_extensions, [ExtensionNameAndPrefix(*cast(Any, e)) for e in entries])


def test_EXT_1_a_good_extension_needs_1_2() -> None:
    int64 = ExtensionOperandTypeInformation(0, False, 8)

    assert values.validate_extension(Extension("com.example.fibonacci", (int64,))) == 3
    assert values.validate_extensions([ExtensionNameAndPrefix("com.example.fibonacci", 7)]) == 3
    assert values.validate_extensions([]) == 1


NAMED = ExtensionNameAndPrefix("com.example.fibonacci", 7)


@pytest.mark.parametrize(
    ("tokens", "extensions"),
    [
        ((0x70001, 0x70001), [NAMED]),
        ((0x80001,), [NAMED]),
        ((1,), [NAMED]),
        ((), [ExtensionNameAndPrefix("Fibonacci", 7)]),
        ((), [NAMED, NAMED]),
    ],
)
def test_N_VAL_22_a_hint_given_twice_or_of_no_named_extension_is_rejected(tokens: Any, extensions: Any) -> None:
    rejected("N-VAL-22", values.validate_hints, [TokenValuePair(token) for token in tokens], extensions)


def test_PREP_10_hints_need_AIDL_v4() -> None:
    assert values.validate_hints([TokenValuePair(0x70001, b"x"), TokenValuePair(0x70002)], [NAMED]) == 8
    assert values.validate_hints([], []) == 1
