"""compliant_with and convert_to between feature levels (REQUIREMENTS sections 0 and 2, N-VAL-21)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.small_models import F32, one_operation, two_adds, with_main

from nnfmq.hal.capabilities import UNKNOWN_PERFORMANCE, PerformanceInfo, uniform_capabilities
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    Operand,
    OperandType,
    OperationType,
    Priority,
    Request,
    RequestArgument,
)
from nnfmq.validation import validate_model
from nnfmq.validation.interface_versions import compliant_with, convert_to

L = FeatureLevel
INT64 = OperandType(7 << 16)
NAMED = (ExtensionNameAndPrefix("com.example.fibonacci", 7),)


def with_extension(prefix: int = 7, **fields: Any) -> Model:
    """Return two ADDs, and an unused input of an extension's type that the model names."""
    model, operand = two_adds(), Operand(OperandType(prefix << 16), lifetime=LifeTime.SUBGRAPH_INPUT, **fields)
    main = model.main
    grown = with_main(
        model, operands=(*main.operands, operand), input_indexes=(*main.input_indexes, len(main.operands))
    )
    return replace(grown, extensions=(ExtensionNameAndPrefix("com.example.fibonacci", prefix),))


def with_vendor_operation(model: Model) -> Model:
    first, *rest = model.main.operations
    return with_main(model, operations=(replace(first, type=OperationType(7 << 16)), *rest))


# -- extensions in a model --------------------------------------------------------------------------------------------


def test_MOD_15_VAL_5_extension_types_and_operations_are_let_through_and_need_1_2() -> None:
    assert validate_model(with_extension(extension_data=b"\1")) == 3
    assert validate_model(with_vendor_operation(with_extension())) == 3


@pytest.mark.parametrize("names", [(), (ExtensionNameAndPrefix("com.example.fibonacci", 8),)])
@pytest.mark.parametrize("model", [with_extension(), with_vendor_operation(two_adds())], ids=["operand", "operation"])
def test_N_VAL_11_an_extension_that_the_model_does_not_name_is_rejected(model: Model, names: Any) -> None:
    with pytest.raises(InvalidArgument, match="N-VAL-11"):
        validate_model(replace(model, extensions=names))


@pytest.mark.parametrize("fields", [{"scale": 1.0}, {"zero_point": 1}])
def test_N_VAL_10_quantization_of_an_extensions_type_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="N-VAL-10"):
        validate_model(with_extension(**fields))


def test_N_VAL_10_MOD_6_extension_data_on_a_base_type_is_rejected() -> None:
    main = two_adds().main
    first = replace(main.operands[0], extension_data=b"\0")

    with pytest.raises(InvalidArgument, match="N-VAL-10"):
        validate_model(with_main(two_adds(), operands=(first, *main.operands[1:])))


def test_N_VAL_12_a_model_that_names_an_extension_twice_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="N-VAL-12"):
        validate_model(replace(two_adds(), extensions=NAMED * 2))


def test_MOD_15_a_prefix_of_16_bits_goes_to_HIDL_only() -> None:
    model = with_extension(0x8000)

    assert compliant_with(model, L.V1_3)
    assert not compliant_with(model, L.AIDL_V1)


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "level"), [(OperationType.TANH, 1), (OperationType.ABS, 3), (OperationType.HARD_SWISH, 4)]
)
def test_N_VAL_21_UTL_1_a_model_is_rejected_below_the_level_of_its_operations(code: OperationType, level: int) -> None:
    model = one_operation(code, [Operand(F32, (2, 2))], Operand(F32, (2, 2)))

    assert [compliant_with(model, each) for each in L] == [each >= level for each in L]
    for older in range(1, level):
        with pytest.raises(InvalidArgument, match="N-VAL-21"):
            convert_to(model, L(older))


def test_VAL_2_UTL_1_UTL_2_optional_properties_of_a_model_are_dropped_and_reported() -> None:
    model = replace(two_adds(), relax_computation_float32_to_float16=True, extensions=NAMED)

    assert convert_to(model, L.V1_2).value == model
    assert convert_to(model, L.V1_1).value == replace(model, extensions=())
    assert convert_to(model, L.V1_0).value == two_adds()
    assert [len(convert_to(model, level).lost) for level in (L.V1_2, L.V1_1, L.V1_0)] == [0, 1, 2]


def test_MOD_13_UTL_1_UTL_2_a_relaxed_model_needs_1_1_and_becomes_strict_below() -> None:
    relaxed = replace(two_adds(), relax_computation_float32_to_float16=True)

    assert [compliant_with(relaxed, level) for level in L] == [level >= L.V1_1 for level in L]
    assert convert_to(relaxed, L.V1_0).value == two_adds()
    assert "float16" in convert_to(relaxed, L.V1_0).lost[0]
    assert compliant_with(two_adds(), L.V1_0)


def test_N_VAL_21_UTL_2_an_extension_that_is_used_cannot_be_dropped() -> None:
    with pytest.raises(InvalidArgument, match="N-VAL-21"):
        convert_to(with_extension(), L.V1_1)
    with pytest.raises(InvalidArgument, match="N-VAL-21"):
        convert_to(replace(with_vendor_operation(two_adds()), extensions=NAMED), L.V1_1)


def test_an_illegal_model_is_no_question_of_levels() -> None:
    with pytest.raises(InvalidArgument, match="N-MOD-1"):
        compliant_with(with_main(two_adds(), operations=two_adds().main.operations[::-1]), L.AIDL_V4)


# -- everything else --------------------------------------------------------------------------------------------------


def test_UTL_2_padding_of_an_argument_is_for_AIDL_only() -> None:
    padded = RequestArgument(location=DataLocation(0, 0, 4, 60))
    request = Request((padded,), (padded,))

    assert convert_to(request, L.AIDL_V1).value == request
    hidl = convert_to(request, L.V1_3)
    assert [a.location for a in (*hidl.value.inputs, *hidl.value.outputs)] == [DataLocation(0, 0, 4)] * 2
    assert len(hidl.lost) == 2
    assert convert_to(padded, L.V1_3).value == hidl.value.inputs[0]


@pytest.mark.parametrize("status", [s for s in ErrorStatus if s > 4])
def test_UTL_2_statuses_above_4_are_general_failures_before_1_3(status: ErrorStatus) -> None:
    assert convert_to(status, L.V1_2).value == ErrorStatus.GENERAL_FAILURE
    assert status.name in convert_to(status, L.V1_2).lost[0]
    assert compliant_with(status, L.V1_3) == (status != ErrorStatus.DEAD_OBJECT)
    assert all(compliant_with(ErrorStatus(code), L.V1_0) for code in range(5))


@pytest.mark.parametrize(
    ("timing", "level", "arrives", "loses"),
    [
        (Timing(1999, 2000), L.AIDL_V1, Timing(1999, 2000), False),
        (Timing(1999, 2000), L.V1_3, Timing(1000, 2000), True),
        (Timing(-1, 2000), L.V1_2, Timing(-1, 2000), False),
        (Timing(1000, 2000), L.V1_1, Timing(), True),
        (Timing(), L.V1_0, Timing(), False),
    ],
)
def test_TIM_2_UTL_2_HIDL_has_whole_microseconds(
    timing: Timing, level: FeatureLevel, arrives: Timing, loses: bool
) -> None:
    converted = convert_to(timing, level)

    assert (converted.value, bool(converted.lost)) == (arrives, loses)


def test_UTL_1_UTL_2_wishes_that_an_interface_has_no_place_for_become_the_default() -> None:
    assert convert_to(Priority.HIGH, L.V1_2).value == Priority.MEDIUM
    assert compliant_with(Priority.HIGH, L.V1_3)
    assert compliant_with(Priority.MEDIUM, L.V1_0)
    assert convert_to(ExecutionPreference.LOW_POWER, L.V1_0).value == ExecutionPreference.SUSTAINED_SPEED
    assert compliant_with(ExecutionPreference.LOW_POWER, L.V1_1)


@pytest.mark.parametrize("level", [L.V1_0, L.V1_1, L.V1_2])
def test_BUR_18_UTL_1_UTL_2_a_request_with_a_buffer_of_the_driver_s_needs_1_3(level: FeatureLevel) -> None:
    argument = RequestArgument(location=DataLocation(0))
    request = Request((argument,), (RequestArgument(has_no_value=True),), (BufferToken(1),))
    with pytest.raises(InvalidArgument, match="BUR-18"):
        convert_to(request, level)
    assert not compliant_with(request, level)
    assert convert_to(request, L.V1_3).value == request


@pytest.mark.parametrize(
    ("level", "types", "relaxed", "control_flow"),
    [
        (L.AIDL_V4, [*range(15), 10000, 10001], True, True),
        (L.V1_3, [*range(15), 10000, 10001], True, True),
        (L.V1_2, [*range(14), 10000, 10001], True, False),
        (L.V1_1, [3, 5], True, False),
        (L.V1_0, [3, 5], False, False),
    ],
)
def test_CAP_2_CAP_5_UTL_2_each_version_has_figures_for_more(
    level: FeatureLevel, types: list[int], relaxed: bool, control_flow: bool
) -> None:
    converted = convert_to(uniform_capabilities(PerformanceInfo(0.5, 0.5)), level)
    left = converted.value

    assert [int(e.type) for e in left.operand_performance] == types
    assert (left.relaxed_float32_to_float16_tensor != UNKNOWN_PERFORMANCE) == relaxed
    assert (left.if_performance != UNKNOWN_PERFORMANCE, left.while_performance != UNKNOWN_PERFORMANCE) == (
        control_flow,
        control_flow,
    )
    assert bool(converted.lost) == (level < L.V1_3)


def test_UTL_2_a_type_without_a_conversion_is_named() -> None:
    with pytest.raises(TypeError, match="bytes has no conversion"):
        convert_to(b"", L.V1_0)
