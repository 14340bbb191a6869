"""What a device answers about itself, its speed and a model's operations, through driver processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support import control_flow_models, models
from support.small_models import Q8, Q8S, two_adds

import nnfmq
from nnfmq.hal.capabilities import CPU_PERFORMANCE, PerformanceInfo, performance_of
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.types import DeviceStatus, DeviceType, OperandType, Operation, OperationType
from nnfmq.lab import hidl

HIDL = [FeatureLevel.V1_0, FeatureLevel.V1_1, FeatureLevel.V1_2, FeatureLevel.V1_3]
FIGURES = {
    "getCapabilities": "float32Performance quantized8Performance",
    "getCapabilities_1_1": "relaxedFloat32toFloat16Performance float32Performance quantized8Performance",
    "getCapabilities_1_2": "relaxedFloat32toFloat16PerformanceScalar relaxedFloat32toFloat16PerformanceTensor"
    " operandPerformance",
    "getCapabilities_1_3": "relaxedFloat32toFloat16PerformanceScalar relaxedFloat32toFloat16PerformanceTensor"
    " operandPerformance ifPerformance whilePerformance",
}


@pytest.fixture(scope="module")
def speaking() -> Iterator[Callable[[FeatureLevel], nnfmq.Client]]:
    """Return a client of each HIDL version, each with its own driver."""
    clients = {level: nnfmq.connect(embedded=True, interface=interface_name(level)) for level in HIDL}
    yield lambda level: clients[level]
    for made in clients.values():
        made.close()


def test_DEV_1_capabilities_come_with_a_status_and_not_at_all_while_the_device_is_offline(
    shared_client: nnfmq.Client,
) -> None:
    device = shared_client.device("sample-minimal")
    assert device.capabilities().operand_performance
    for status in (DeviceStatus.OFFLINE, DeviceStatus.BUSY):
        shared_client.set_device_status("sample-minimal", status)
        try:
            with pytest.raises(nnfmq.DeviceUnavailable):
                device.capabilities()
        finally:
            shared_client.set_device_status("sample-minimal", DeviceStatus.AVAILABLE)
    assert device.capabilities().operand_performance


def test_DEV_2_getStatus_returns_the_status_that_was_set(speaking: Callable[[FeatureLevel], nnfmq.Client]) -> None:
    client = speaking(FeatureLevel.V1_0)
    device = hidl.IDevice(client, "sample-minimal")
    found = []
    for status in (DeviceStatus.BUSY, DeviceStatus.OFFLINE, DeviceStatus.AVAILABLE):
        client.set_device_status("sample-minimal", status)
        found.append(device.getStatus())
    assert found == [DeviceStatus.BUSY, DeviceStatus.OFFLINE, DeviceStatus.AVAILABLE]
    with pytest.raises(nnfmq.InvalidArgument):
        client.set_device_status("sample-minimal", DeviceStatus.UNKNOWN)


def test_DEV_3_SUP_6_every_device_has_one_type_and_this_machine_s_are_CPUs(shared_client: nnfmq.Client) -> None:
    types = {info.name: info.type for info in shared_client.devices()}
    assert set(types.values()) == {DeviceType.CPU}
    assert {"reference", "compiled", "sample-minimal"} <= set(types)


def test_DEV_4_the_version_names_the_release_and_not_the_feature_level(
    shared_client: nnfmq.Client, speaking: Callable[[FeatureLevel], nnfmq.Client]
) -> None:
    versions = {info.version for info in shared_client.devices()}
    assert all(f"nnfmq-{metadata.version('nnfmq')}" in version for version in versions)
    older = {info.version for info in speaking(FeatureLevel.V1_2).devices()}
    assert older == versions  # although the feature level is another one


def test_DEV_7_another_process_of_the_same_driver_answers_the_same(shared_client: nnfmq.Client) -> None:
    with nnfmq.connect(embedded=True) as restarted:
        assert restarted.driver_pid != shared_client.driver_pid
        assert restarted.devices() == shared_client.devices()
        for info in shared_client.devices():
            ours, theirs = (one.device(info.name) for one in (shared_client, restarted))
            assert ours.capabilities() == theirs.capabilities()
            assert ours.supported_operations(models.add_model()) == theirs.supported_operations(models.add_model())


def test_DEV_12_CAP_1_the_reference_device_is_as_fast_as_the_CPU_for_every_type(shared_client: nnfmq.Client) -> None:
    found = shared_client.device("reference").capabilities()
    types = sorted(set(OperandType) - {OperandType.SUBGRAPH})
    assert [entry.type for entry in found.operand_performance] == types
    assert {entry.info for entry in found.operand_performance} == {CPU_PERFORMANCE}
    assert (found.if_performance, found.while_performance) == (CPU_PERFORMANCE, CPU_PERFORMANCE)


@pytest.mark.parametrize("level", HIDL, ids=interface_name)
def test_CAP_2_each_version_has_its_own_figures(
    level: FeatureLevel, speaking: Callable[[FeatureLevel], nnfmq.Client]
) -> None:
    device = hidl.IDevice(speaking(level), "sample-float_fast")
    for form in list(FIGURES)[:level]:
        status, found = getattr(device, form)()
        assert status is ErrorStatus.NONE
        assert set(vars(found)) == set(FIGURES[form].split())


def test_CAP_3_figures_are_sorted_by_type_and_a_type_without_one_is_infinitely_slow(
    shared_client: nnfmq.Client,
) -> None:
    for info in shared_client.devices():
        found = shared_client.device(info.name).capabilities()
        types = [entry.type for entry in found.operand_performance]
        assert types == sorted(set(types))
        assert OperandType.SUBGRAPH not in types
        assert performance_of(found, OperandType.SUBGRAPH).exec_time == float(np.finfo(np.float32).max)


def test_CAP_4_CAP_5_relaxed_figures_are_for_scalars_and_tensors_and_control_flow_has_its_own(
    shared_client: nnfmq.Client,
) -> None:
    slow, fast = (shared_client.device(f"sample-float_{kind}").capabilities() for kind in ("slow", "fast"))
    for found, relaxed in ((slow, 1.2), (fast, 0.7)):  # as in the driver's configuration
        assert found.relaxed_float32_to_float16_scalar.exec_time == pytest.approx(relaxed)
        assert found.relaxed_float32_to_float16_tensor.exec_time == pytest.approx(relaxed)
        assert min(found.if_performance.exec_time, found.while_performance.exec_time) > 0


def test_CAP_7_measured_figures_in_the_configuration_are_the_device_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(
        '[[device]]\nname = "test-measured"\n[device.performance.types]\n'
        "TENSOR_FLOAT32 = { exec_time = 0.25, power_usage = 1.5 }\n"
    )
    monkeypatch.setenv("NNFMQ_DEVICES", str(path))
    monkeypatch.setenv("NNFMQ_RUNTIMES", "")
    with nnfmq.connect(embedded=True) as client:
        assert [info.name for info in client.devices()] == ["test-measured"]
        found = client.device("test-measured").capabilities()
    assert performance_of(found, OperandType.TENSOR_FLOAT32) == PerformanceInfo(0.25, 1.5)
    assert performance_of(found, OperandType.TENSOR_INT32) == CPU_PERFORMANCE


# ------------------------------------------------------------------------------------------------ operations


def test_SUP_1_SUP_3_each_operation_has_its_own_answer_in_order(shared_client: nnfmq.Client) -> None:
    mixed = two_adds()
    relu = Operation(OperationType.RELU, (3,), (4,))
    mixed = replace(mixed, main=replace(mixed.main, operations=(mixed.main.operations[0], relu)))
    answers = {
        name: shared_client.device(name).supported_operations(mixed)
        for name in ("reference", "sample-minimal", "sample-quant", "sample-float_fast")
    }
    assert answers == {
        "reference": [True, True],
        "sample-minimal": [True, False],  # ADD only
        "sample-quant": [False, False],  # the operands' type
        "sample-float_fast": [True, True],
    }


def test_SUP_2_an_invalid_model_and_an_offline_device_have_no_answer(shared_client: nnfmq.Client) -> None:
    device = shared_client.device("sample-minimal")
    with pytest.raises(nnfmq.InvalidArgument):
        device.supported_operations(models.invalid_model())
    shared_client.set_device_status("sample-minimal", DeviceStatus.OFFLINE)
    try:
        with pytest.raises(nnfmq.DeviceUnavailable):
            device.supported_operations(models.add_model())
    finally:
        shared_client.set_device_status("sample-minimal", DeviceStatus.AVAILABLE)


def test_SUP_4_a_branch_with_an_unsupported_operation_makes_the_IF_unsupported(shared_client: nnfmq.Client) -> None:
    partial = shared_client.device("sample-partial")  # everything but SOFTMAX, LOGISTIC and a few
    able = control_flow_models.branching(OperationType.ADD, OperationType.MUL)
    branch = able.referenced[1]
    logistic = replace(branch, operations=(Operation(OperationType.LOGISTIC, (0,), (3,)),))
    unable = replace(able, referenced=(able.referenced[0], logistic))
    assert shared_client.device("reference").supported_operations(unable) == [True]
    assert [partial.supported_operations(model) for model in (able, unable)] == [[True], [False]]


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_SUP_5_a_signed_model_is_supported_and_its_result_is_128_lower(
    device: str, shared_client: nnfmq.Client
) -> None:
    unsigned, signed = two_adds(Q8, 0.5, 128), two_adds(Q8S, 0.5, 0)
    values = np.arange(4, dtype=np.uint8).reshape(2, 2) + 130
    results = []
    for model, given in ((unsigned, values), (signed, (values ^ 0x80).view(np.int8))):
        assert shared_client.device(device).supported_operations(model) == [True, True]
        with shared_client.device(device).prepare(model) as prepared:
            results.append(prepared.execute(given, given)[0].astype(np.int16))
    assert np.array_equal(results[0] - 128, results[1])
    assert results[0].tolist() == [[134, 137], [140, 143]]
