"""What a driver process says about its devices: figures, versions, supported operations, and the errors of queries.

The driver has the devices that nnfmq ships, of which `compiled` is OFFLINE because llvmlite is missing, and three
plug-ins: one with a different figure for every kind of work, one whose figures the helpers of `capabilities` make, and
one that fails when it is asked about operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.absent_packages import WITHOUT_LLVMLITE
from support.drivers import LIMIT_S, Daemon, running_daemon, short_folder
from support.models import add_model, invalid_model, unsupported_model
from support.plugins import add_plugin, path_with
from support.protocol import ProtocolPeer
from support.vts_models import is_legal, one_of_each

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.base.deadlines import deadline_after
from nnfmq.hal.capabilities import CPU_PERFORMANCE, Capabilities, PerformanceInfo, performance_of
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.hosted import is_runtime_name
from nnfmq.hal.types import DeviceType, Model, OperandType, OperationType
from nnfmq.lab import hidl
from nnfmq.lab.conformance.testmodels import TestModel
from nnfmq.operations import HAL_DECLARATIONS
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.models import encode_model

NONE, FAILED, INVALID = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT
UNAVAILABLE = ErrorStatus.DEVICE_UNAVAILABLE
HIDL = {"HIDL 1.0": "", "HIDL 1.1": "_1_1", "HIDL 1.2": "_1_2", "HIDL 1.3": "_1_3"}
SHIPPED = [
    "reference",
    "compiled",
    "sample-float_fast",
    "sample-float_slow",
    "sample-quant",
    "sample-minimal",
    "sample-partial",
]
PLUGINS = """
from nnfmq.engines import interpreter
from nnfmq.hal.capabilities import Capabilities, OperandPerformance, PerformanceInfo
from nnfmq.hal.capabilities import uniform_capabilities, with_performance
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import OperandType
from nnfmq.driver.devices.device import DeviceBase


class Figures(DeviceBase):
    name = "test-figures"
    capabilities = Capabilities(
        (
            OperandPerformance(OperandType.TENSOR_FLOAT32, PerformanceInfo(0.125, 0.25)),
            OperandPerformance(OperandType.TENSOR_QUANT8_ASYMM, PerformanceInfo(0.375, 0.5)),
        ),
        PerformanceInfo(2.0, 3.0),
        PerformanceInfo(4.0, 5.0),
        PerformanceInfo(6.0, 7.0),
        PerformanceInfo(8.0, 9.0),
    )

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        return interpreter.prepare(model)


class Helped(Figures):
    name = "test-helped"
    capabilities = with_performance(
        uniform_capabilities(PerformanceInfo(0.5, 0.25)),
        [OperandType.TENSOR_FLOAT32, OperandType.BOOL],
        PerformanceInfo(0.125, 0.0625),
    )


class Failing(Figures):
    name = "test-failing"

    def supports(self, model, subgraph, operation):
        raise GeneralFailure("the device does not reply")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    kinds = {name: f"queried:{name.capitalize()}" for name in ("figures", "helped", "failing")}
    add_plugin(folder, "queried", PLUGINS, kinds, "nnfmq.devices")
    return folder


@pytest.fixture(scope="module")
def driver(site: Path) -> Iterator[Daemon]:
    (site / "sitecustomize.py").write_text(WITHOUT_LLVMLITE)
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


@pytest.fixture
def client(driver: Daemon) -> Iterator[nnfmq.Client]:
    with driver.connect() as made:
        yield made


# ------------------------------------------------------------------------------------------------ capabilities


def test_CAP_6_a_device_states_figures_for_all_types_at_once_and_others_for_some(client: nnfmq.Client) -> None:
    """The values in the table of `Capabilities` are what the plug-in's two helpers make."""
    whole, exact = PerformanceInfo(0.5, 0.25), PerformanceInfo(0.125, 0.0625)
    found = client.device("test-helped").capabilities()
    assert {entry.type: entry.info for entry in found.operand_performance} == {
        kind: exact if kind in (OperandType.TENSOR_FLOAT32, OperandType.BOOL) else whole
        for kind in OperandType
        if kind is not OperandType.SUBGRAPH
    }
    assert len(found.operand_performance) == len(OperandType) - 1
    relaxed = found.relaxed_float32_to_float16_scalar, found.relaxed_float32_to_float16_tensor
    assert {*relaxed, found.if_performance, found.while_performance} == {whole}
    few = client.device("test-figures").capabilities()
    assert performance_of(few, OperandType.TENSOR_QUANT8_ASYMM) == PerformanceInfo(0.375, 0.5)
    largest = float(np.finfo(np.float32).max)
    assert performance_of(few, OperandType.BOOL) == PerformanceInfo(largest, largest)


@pytest.mark.parametrize("interface", HIDL)
def test_DEV_1_CAP_2_CAP_4_each_hidl_call_returns_its_own_figures(interface: str, driver: Daemon) -> None:
    figures = {
        "float32Performance": PerformanceInfo(0.125, 0.25),
        "quantized8Performance": PerformanceInfo(0.375, 0.5),
        "relaxedFloat32toFloat16Performance": PerformanceInfo(4.0, 5.0),  # one tensor figure in 1.1
        "relaxedFloat32toFloat16PerformanceScalar": PerformanceInfo(2.0, 3.0),
        "relaxedFloat32toFloat16PerformanceTensor": PerformanceInfo(4.0, 5.0),
        "ifPerformance": PerformanceInfo(6.0, 7.0),
        "whilePerformance": PerformanceInfo(8.0, 9.0),
    }
    fields = {"": 2, "_1_1": 3, "_1_2": 2, "_1_3": 4}  # without the list of operand types
    with nnfmq.connect(driver.path, timeout=LIMIT_S, interface=interface) as client:
        get_capabilities = getattr(hidl.IDevice(client, "test-figures"), f"getCapabilities{HIDL[interface]}")
        status, capabilities = get_capabilities()
    assert status is NONE
    found = vars(capabilities)
    operands = found.pop("operandPerformance", None)
    assert len(found) == fields[HIDL[interface]]
    assert found == {name: figures[name] for name in found}
    assert (operands is not None) == (interface >= "HIDL 1.2")


def test_DEV_1_CAP_4_CAP_5_aidl_returns_relaxed_scalars_and_tensors_and_control_flow_apart(
    client: nnfmq.Client,
) -> None:
    capabilities = client.device("test-figures").capabilities()
    assert [entry.type for entry in capabilities.operand_performance] == [
        OperandType.TENSOR_FLOAT32,
        OperandType.TENSOR_QUANT8_ASYMM,
    ]
    assert replace(capabilities, operand_performance=()) == Capabilities(
        (),
        relaxed_float32_to_float16_scalar=PerformanceInfo(2.0, 3.0),
        relaxed_float32_to_float16_tensor=PerformanceInfo(4.0, 5.0),
        if_performance=PerformanceInfo(6.0, 7.0),
        while_performance=PerformanceInfo(8.0, 9.0),
    )


@pytest.mark.parametrize("interface", HIDL)
def test_DEV_1_a_device_that_is_offline_is_unavailable_and_has_no_figures(interface: str, driver: Daemon) -> None:
    with nnfmq.connect(driver.path, timeout=LIMIT_S, interface=interface) as client:
        method = f"getCapabilities{HIDL[interface]}"
        assert getattr(hidl.IDevice(client, "compiled"), method)() == (UNAVAILABLE, None)
        assert getattr(hidl.IDevice(client, "reference"), method)()[0] is NONE


# ------------------------------------------------------------------------------------------------ supported operations


@pytest.mark.parametrize(
    ("device", "model", "expected", "supported"),
    [
        ("test-figures", add_model(), NONE, (True,)),
        ("test-figures", invalid_model(), INVALID, ()),
        ("test-failing", add_model(), FAILED, ()),
        ("test-failing", invalid_model(), INVALID, ()),
        ("compiled", add_model(), UNAVAILABLE, ()),
        ("test-none", add_model(), INVALID, ()),
    ],
    ids=["good", "bad model", "failing device", "bad model for it", "unavailable device", "unknown device"],
)
def test_SUP_2_an_error_has_its_status_and_an_empty_list(
    device: str, model: Model, expected: ErrorStatus, supported: tuple[bool, ...], driver: Daemon
) -> None:
    with closing(ProtocolPeer(Channel.connect(driver.path, deadline_after(LIMIT_S)), PeerRole.CLIENT)) as peer:
        peer.send(messages.Hello(control_protocol.PROTOCOL, "AIDL v4", "queries"))
        peer.receive(messages.HelloReply)
        for _ in range(2):  # the same client continues
            peer.send(messages.GetSupportedOperations(8, device, encode_model(model)[0]))
            reply = peer.receive(messages.SupportedOperations)
            assert (reply.status, tuple(reply.supported)) == (expected, supported), reply.message


def first_with_each_operation() -> dict[OperationType, TestModel]:
    """Return for each operation the first of the HAL's test models that has it in its main subgraph."""
    found: dict[OperationType, TestModel] = {}
    for test in one_of_each():
        if not test.must_fail and is_legal(test.model):
            for operation in test.model.main.operations:
                found.setdefault(operation.type, test)
    return found


def test_DEV_12_PART_13_the_reference_supports_every_operation_at_the_cpu_s_own_speed(
    client: nnfmq.Client, data_dir: Path
) -> None:
    device = client.device("reference")
    assert device.info.type == DeviceType.CPU
    capabilities = device.capabilities()
    figures = {entry.type: entry.info for entry in capabilities.operand_performance}
    assert set(figures) == set(OperandType) - {OperandType.SUBGRAPH}
    assert set(figures.values()) == {CPU_PERFORMANCE}
    assert replace(capabilities, operand_performance=()) == Capabilities((), *[CPU_PERFORMANCE] * 4)
    tests = first_with_each_operation()
    assert set(HAL_DECLARATIONS) - set(tests) <= {OperationType.LESS_EQUAL}  # which the HAL tests in subgraphs alone
    unsupported = [
        f"{code.name} of {test.name}"
        for code, test in tests.items()
        if not all(device.supported_operations(test.model))
    ]
    assert unsupported == []
    assert device.supported_operations(unsupported_model()) == [False]  # OEM_OPERATION


# ------------------------------------------------------------------------------------------------ versions, restarts


def information(folder: Path, version: str) -> dict[str, Any]:
    """Start a driver that is installed as the release `version`; return what it says about each device."""
    found: dict[str, Any] = {}
    with (
        short_folder() as place,
        running_daemon(place / "d.sock", environment=path_with(folder / version)) as daemon,
        daemon.connect() as client,
    ):
        for info in client.devices():
            device = client.device(info.name)
            found[info.name] = info, device.capabilities(), device.supported_operations(add_model())
    return found


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the information of three drivers: a release, the same again, and the next one."""
    folder = tmp_path_factory.mktemp("releases")
    for version in ("801.0", "801.1"):
        (folder / version).mkdir()
        add_plugin(folder / version, "queried", PLUGINS, {"figures": "queried:Figures"}, "nnfmq.devices")
        info = folder / version / f"nnfmq-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nnfmq\nVersion: {version}\n")
    return [information(folder, version) for version in ("801.0", "801.0", "801.1")]


def test_API_1_DEV_7_a_driver_that_was_started_again_gives_the_same_information(started: list[dict[str, Any]]) -> None:
    first, again, _ = started
    assert [name for name in first if not is_runtime_name(name)] == [*SHIPPED, "test-figures"]
    assert first == again


def test_DEV_4_two_releases_differ_in_their_versions_and_not_in_their_feature_levels(
    started: list[dict[str, Any]],
) -> None:
    older, _, newer = ({name: info for name, (info, _, _) in found.items()} for found in started)
    for name in older:
        assert older[name].version and newer[name].version
        assert older[name].version != newer[name].version
        assert older[name].feature_level == newer[name].feature_level == 8
