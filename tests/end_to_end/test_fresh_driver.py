"""The information that a new driver reports about itself and its devices: the HAL's basic tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from support.drivers import Daemon
from support.small_models import F32, I32, Q8, Q8S, one_operation, two_adds

import nnfmq
from nnfmq.hal.capabilities import LARGEST_FLOAT32
from nnfmq.hal.deterministic import DETERMINISTIC
from nnfmq.hal.extensions import NAME as BUILTIN
from nnfmq.hal.hosted import NAME as HOSTED
from nnfmq.hal.hosted import is_runtime_name
from nnfmq.hal.types import DeviceStatus, DeviceType, Model, Operand, OperandType, OperationType

BASE_TYPES = set(OperandType) - {OperandType.SUBGRAPH}


@pytest.fixture
def devices(shared_daemon: Daemon) -> Iterator[list[nnfmq.Device]]:
    with shared_daemon.connect() as client:
        found = [client.device(info.name) for info in client.devices()]
        assert len(found) > 1
        yield found


def test_N_BAS_1_every_device_of_a_fresh_driver_is_available(devices: list[nnfmq.Device]) -> None:
    assert {device.info.status for device in devices} == {DeviceStatus.AVAILABLE}


def test_N_BAS_2_capabilities_are_sorted_positive_and_of_every_type_but_SUBGRAPH(devices: list[nnfmq.Device]) -> None:
    for device in devices:
        told = device.capabilities()
        types = [entry.type for entry in told.operand_performance]
        assert all(first < second for first, second in pairwise(types))
        assert set(types) <= BASE_TYPES
        others = [
            told.relaxed_float32_to_float16_scalar,
            told.relaxed_float32_to_float16_tensor,
            told.if_performance,
            told.while_performance,
        ]
        figures = [entry.info for entry in told.operand_performance] + others
        assert all(0 < figure <= LARGEST_FLOAT32 for info in figures for figure in (info.exec_time, info.power_usage))


def test_N_BAS_3_names_versions_types_and_extensions_are_well_formed(devices: list[nnfmq.Device]) -> None:
    names = [device.info.name for device in devices]
    assert len(set(names)) == len(names)
    for info in (device.info for device in devices):
        assert info.name.isprintable() and info.name.count("-") <= 1  # HIDL: vendor-name; the reference is Android's
        assert info.version
        assert info.type in DeviceType and info.type is not DeviceType.OTHER
        assert 1 <= info.feature_level <= 8
        hosted = [HOSTED] if is_runtime_name(info.name) else []
        assert all(
            extension.name in (BUILTIN, DETERMINISTIC, *hosted) for extension in info.extensions
        )  # no plug-in is installed


def test_SUP_6_cpu_devices_report_their_type_and_unsupported_operations(devices: list[nnfmq.Device]) -> None:
    softmax = one_operation(OperationType.SOFTMAX, [Operand(F32, (1, 4)), 1.0], Operand(F32, (1, 4)))
    for device in devices:
        assert device.info.type is DeviceType.CPU, device.info.name
        (is_supported,) = device.supported_operations(softmax)
        if is_supported:
            device.prepare(softmax).close()
        else:
            with pytest.raises(nnfmq.GeneralFailure, match="SOFTMAX"):
                device.prepare(softmax)
    limited = [device.info.name for device in devices if not all(device.supported_operations(softmax))]
    hosting = [name for name in limited if is_runtime_name(name)]
    assert limited == ["sample-quant", "sample-minimal", "sample-partial", *hosting]


def coupled() -> dict[str, tuple[Model, Model]]:
    """Return models of unsigned codes, each with the same one of signed codes."""

    def pair(make: Callable[[OperandType, int], Model]) -> tuple[Model, Model]:
        return make(Q8, 128), make(Q8S, 0)

    def codes(kind: OperandType, zero: int, *shape: int) -> Operand:
        return Operand(kind, shape, 0.5, zero)

    def to_depth(kind: OperandType, zero: int) -> Model:
        result = codes(kind, zero, 1, 1, 1, 4)
        return one_operation(OperationType.SPACE_TO_DEPTH, [codes(kind, zero, 1, 2, 2, 1), 2], result)

    def argmax(kind: OperandType, zero: int) -> Model:
        return one_operation(OperationType.ARGMAX, [codes(kind, zero, 1, 4), 1], Operand(I32, (1,)))

    return {
        "ADD": pair(lambda kind, zero: two_adds(kind, 0.5, zero)),
        "RELU": pair(
            lambda kind, zero: one_operation(OperationType.RELU, [codes(kind, zero, 4)], codes(kind, zero, 4))
        ),
        "SPACE_TO_DEPTH": pair(to_depth),
        "ARGMAX": pair(argmax),
    }


@pytest.mark.parametrize("name", coupled())
def test_N_BAS_4_a_device_that_supports_unsigned_quantized_values_supports_signed_ones(
    name: str, devices: list[nnfmq.Device]
) -> None:
    unsigned, signed = coupled()[name]
    supported = [(device.supported_operations(unsigned), device.supported_operations(signed)) for device in devices]
    assert all(first == second for first, second in supported)
    assert {all(first) for first, _ in supported} == {False, True}  # sample-minimal and its like have floats alone
