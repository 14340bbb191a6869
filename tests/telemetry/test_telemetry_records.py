"""Records of telemetry: their fields, and the data class."""

from __future__ import annotations

from dataclasses import fields

import pytest
from msgspec.structs import replace
from support.models import add_model
from support.recordings import execution, preparation

from nnfmq.hal.models import model_architecture_hash
from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.types import (
    HalExecutionMode,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.telemetry import CompilationRecord, DataClass, ExecutionRecord, TelemetryMode, register
from nnfmq.telemetry.records import compilation_record, data_class, execution_record

T = OperandType
OTHERS = [T.INT32, T.UINT32, T.BOOL, T.TENSOR_INT32, T.TENSOR_BOOL8, T.SUBGRAPH, T.OEM, T.TENSOR_OEM_BYTE]
OTHERS += [T(0x10001)]
CLASSES = {
    DataClass.FLOAT32: [T.FLOAT32, T.TENSOR_FLOAT32],
    DataClass.FLOAT16: [T.FLOAT16, T.TENSOR_FLOAT16],
    DataClass.QUANT: [
        T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT8_ASYMM_SIGNED, T.TENSOR_QUANT8_SYMM, T.TENSOR_QUANT8_SYMM_PER_CHANNEL,
        T.TENSOR_QUANT16_ASYMM, T.TENSOR_QUANT16_SYMM,
    ],
    DataClass.OTHER: OTHERS,
}  # fmt: skip


def test_OBS_3_the_values_are_those_of_NNAPI() -> None:
    assert {found.name: found.value for found in DataClass} == {
        "UNKNOWN": 0, "OTHER": 1, "FLOAT32": 2, "FLOAT16": 3, "QUANT": 4, "MIXED": 5,
    }  # fmt: skip


def test_OBS_3_each_operand_type_has_a_class() -> None:
    for found, types in CLASSES.items():
        assert {data_class([operand_type]) for operand_type in types} == {found}
    assert {t for types in CLASSES.values() for t in types if t < 0x10000} == set(OperandType)


@pytest.mark.parametrize(
    ("types", "found"),
    [
        ([], DataClass.UNKNOWN),
        ([T.TENSOR_INT32, T.TENSOR_FLOAT32], DataClass.FLOAT32),  # others do not count beside floats
        ([T.TENSOR_FLOAT32, T.TENSOR_INT32], DataClass.FLOAT32),
        ([T.TENSOR_FLOAT32, T.FLOAT32], DataClass.FLOAT32),
        ([T.TENSOR_QUANT8_ASYMM, T.TENSOR_QUANT16_SYMM], DataClass.QUANT),
        ([T.TENSOR_FLOAT32, T.TENSOR_FLOAT16], DataClass.MIXED),
        ([T.TENSOR_FLOAT16, T.TENSOR_INT32, T.TENSOR_QUANT8_ASYMM], DataClass.MIXED),
        ([T.TENSOR_FLOAT32, T.TENSOR_QUANT8_ASYMM, T.TENSOR_FLOAT32], DataClass.MIXED),
        ([T.TENSOR_BOOL8, T.TENSOR_INT32], DataClass.OTHER),
    ],
)
def test_OBS_3_the_class_of_several_types(types: list[OperandType], found: DataClass) -> None:
    assert data_class(types) is found


def test_OBS_1_a_compilation_record_has_the_fields_of_NNAPI_and_the_number_of_steps() -> None:
    record = compilation_record(preparation())
    assert record == CompilationRecord(
        model_architecture_hash(add_model()), "reference=1.0", 0, DataClass.FLOAT32, DataClass.FLOAT32,
        1_000_000, False, True, False, False, False,
    )  # fmt: skip
    assert {field.name for field in fields(record)} == {
        "model_arch_hash", "device_id", "error_code", "input_data_class", "output_data_class", "compilation_time_ns",
        "fallback_to_cpu", "introspection_used", "cache_used", "has_control_flow", "has_dynamic_temporaries",
        "step_count",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "fallback", "introspection"),
    [("application", False, True), ("best", False, False), ("fallback", True, False)],
)
def test_OBS_1_who_chose_the_device(choice: DeviceChoice, fallback: bool, introspection: bool) -> None:
    record = compilation_record(replace(preparation(), choice=choice))
    assert (record.fallback_to_cpu, record.introspection_used) == (fallback, introspection)


def test_OBS_1_a_cache_and_a_failure() -> None:
    record = compilation_record(replace(preparation(), is_cached=True, status=4))
    assert (record.cache_used, record.error_code, record.compilation_time_ns) == (True, 4, -1)


def test_OBS_1_a_model_that_is_only_a_signature_has_no_hash() -> None:
    record = compilation_record(replace(preparation(), model=None))
    assert (record.model_arch_hash, record.input_data_class) == ("", DataClass.UNKNOWN)
    assert not record.has_control_flow


def graph(operation: OperationType, temporary: Operand) -> Model:
    operands = (Operand(T.TENSOR_FLOAT32, (1,), lifetime=LifeTime.SUBGRAPH_INPUT), temporary)
    return Model(Subgraph(operands, (Operation(operation, (0,), (1,)),), (0,), (1,)))


FIXED = Operand(T.TENSOR_FLOAT32, (1, 2))


@pytest.mark.parametrize("operation", [OperationType.IF, OperationType.WHILE])
@pytest.mark.parametrize("is_referenced", [False, True])
def test_OBS_1_control_flow_in_any_subgraph(operation: OperationType, is_referenced: bool) -> None:
    model = graph(operation, FIXED)
    if is_referenced:
        model = Model(add_model().main, (model.main,))
    assert compilation_record(preparation(model)).has_control_flow
    assert not compilation_record(preparation(graph(OperationType.ADD, FIXED))).has_control_flow


@pytest.mark.parametrize(
    ("temporary", "is_dynamic"),
    [
        (FIXED, False),
        (Operand(T.TENSOR_FLOAT32, (1, 0)), True),
        (Operand(T.TENSOR_FLOAT32), True),
        (Operand(T.INT32), False),
        (Operand(T.TENSOR_FLOAT32, (0,), lifetime=LifeTime.SUBGRAPH_OUTPUT), False),
    ],
)
def test_OBS_1_dynamic_temporaries(temporary: Operand, is_dynamic: bool) -> None:
    model = graph(OperationType.RELU, temporary)
    assert compilation_record(preparation(model)).has_dynamic_temporaries is is_dynamic


def test_OBS_1_a_model_with_indexes_that_do_not_exist_has_a_record() -> None:
    model = Model(Subgraph((), (), (3,), (-1,)))
    assert compilation_record(preparation(model)).input_data_class is DataClass.UNKNOWN


def test_OBS_2_an_execution_record_has_the_fields_of_NNAPI() -> None:
    compilation = compilation_record(replace(preparation(), is_cached=True))
    record = execution_record(compilation, execution(time_on_device_ns=50_000, time_in_driver_ns=70_000))
    assert record == ExecutionRecord(
        compilation.model_arch_hash, "reference=1.0", TelemetryMode.SYNC, 0, DataClass.FLOAT32, DataClass.FLOAT32,
        100_000, 70_000, 50_000, True, True, False, False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (HalExecutionMode.SYNCHRONOUS, TelemetryMode.SYNC),
        (HalExecutionMode.ASYNCHRONOUS, TelemetryMode.ASYNC),
        (HalExecutionMode.BURST, TelemetryMode.BURST),
        (HalExecutionMode.FENCED, TelemetryMode.ASYNC_WITH_DEPS),
        (HalExecutionMode.REUSABLE, TelemetryMode.SYNC),
        (HalExecutionMode.AIDL_BURST, TelemetryMode.BURST),
    ],
)
def test_OBS_2_the_mode_is_one_of_NNAPI(mode: HalExecutionMode, found: TelemetryMode) -> None:
    assert execution_record(compilation_record(preparation()), execution(mode=mode)).mode is found


def test_OBS_2_a_failed_execution_has_its_status_and_no_times() -> None:
    record = execution_record(compilation_record(preparation()), execution(status=2))
    assert (record.error_code, record.duration_runtime_ns, record.duration_driver_ns) == (2, -1, -1)


def test_OBS_1_a_plan_has_the_sorted_ids_of_its_devices_each_once() -> None:
    devices = (("gpu", "2"), ("cpu", "1"), ("gpu", "2"))
    record = compilation_record(replace(preparation(), device="", device_version="", plan_devices=devices))
    assert (record.device_id, record.step_count) == ("cpu=1,gpu=2", 3)
    assert execution_record(record, execution()).device_id == "cpu=1,gpu=2"


def test_OBS_1_a_plan_of_steps_on_one_device_has_its_id() -> None:
    record = compilation_record(replace(preparation(), plan_devices=(("cpu", "1"),)))
    assert (record.device_id, record.step_count) == ("cpu=1", 1)


def test_OBS_1_steps_of_a_plan_have_no_records_of_their_own() -> None:
    found: list[object] = []
    with register(found.append) as registration:
        assert registration.prepared(replace(preparation(), choice="step")) is None
        assert registration.prepared(replace(preparation(), plan_devices=(("cpu", "1"),))) is not None
    assert [record.device_id for record in found if isinstance(record, CompilationRecord)] == ["cpu=1"]
