"""The devices of a driver: the class to subclass, the configuration, plug-ins, and the status that is shared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import control_flow_models, models
from support.small_models import two_adds, with_operand, with_operation

from nnfmq.driver.cache.files import CacheContents, CacheFiles
from nnfmq.driver.devices import plugins
from nnfmq.driver.devices.builtin import InterpreterDevice
from nnfmq.driver.devices.configuration import STATUS_PAGE_BYTES, end_changes, read_configuration
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.driver.devices.registry import DeviceRegistry, load_devices, make_devices
from nnfmq.driver.execution.prepared_model import MappedExecution, run_bound
from nnfmq.engines import interpreter
from nnfmq.engines.function import FunctionProgram
from nnfmq.engines.program import Program
from nnfmq.hal.capabilities import (
    CPU_PERFORMANCE,
    UNKNOWN_PERFORMANCE,
    Capabilities,
    NumberOfCacheFiles,
    PerformanceInfo,
    is_device_name,
    performance_of,
    uniform_capabilities,
)
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, ErrorStatus, GeneralFailure, InvalidArgument
from nnfmq.hal.extensions import Extension
from nnfmq.hal.types import (
    DeviceStatus,
    DeviceType,
    MeasureTiming,
    Model,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.validation.values import validate_capabilities


@pytest.fixture(autouse=True)
def _no_hosted_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drivers have the devices of these tests only, whatever is installed."""
    monkeypatch.setenv("NNFMQ_RUNTIMES", "")


ADD = models.add_model()
NO_NAMES = ["", "-", "-a", "a-", "a-b-c", "a--b", "a-b\u2028", "a\u2028", "reference-"]
FLOAT = [OperandType.TENSOR_FLOAT32, OperandType.FLOAT32]


class Plain(DeviceBase):
    """The least that a device is: everything but subtraction, by the interpreter."""

    name = "test-plain"

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        return operation.type != OperationType.SUB

    def compile(self, model: Model) -> Program:
        return interpreter.prepare(model)


@pytest.fixture
def configured(tmp_path: Path) -> Any:
    """Return the devices that a configuration of this text lists."""

    def configured(text: str) -> dict[str, InterpreterDevice]:
        path = tmp_path / "devices.toml"
        path.write_text(text)
        return {entry.name: InterpreterDevice(entry) for entry in read_configuration(path)}

    return configured


def as_shipped() -> dict[str, InterpreterDevice]:
    found = make_devices(read_configuration()).values()
    return {device.name: device for device in found if isinstance(device, InterpreterDevice)}


@pytest.fixture
def shipped() -> dict[str, InterpreterDevice]:
    return as_shipped()


# ------------------------------------------------------------------------------------------------ one device


def test_SUP_1_one_boolean_for_each_operation_in_order() -> None:
    model = with_operation(two_adds(), 1, type=OperationType.SUB)
    assert Plain().supported_operations(model) == [True, False]


def test_SUP_2_an_invalid_model_is_rejected() -> None:
    with pytest.raises(InvalidArgument):
        Plain().supported_operations(with_operand(ADD, 0, scale=-1.0))


def test_SUP_4_control_flow_is_supported_if_its_subgraphs_are() -> None:
    class Without(Plain):
        def __init__(self, unsupported: OperationType) -> None:
            super().__init__()
            self.unsupported = unsupported

        def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
            return operation.type != self.unsupported

    branching = control_flow_models.branching()
    in_branches = {operation.type for graph in branching.referenced for operation in graph.operations}
    assert len(in_branches) == 2
    for unsupported in in_branches:
        assert Without(unsupported).supported_operations(branching) == [False]
    assert Without(OperationType.DIV).supported_operations(branching) == [True]


def test_a_model_with_an_unsupported_operation_is_not_prepared() -> None:
    device = Plain()
    model = with_operation(ADD, 0, type=OperationType.SUB)
    checked = device.check_prepare_arguments(model, 0, 0, None)
    with pytest.raises(GeneralFailure, match=r"'test-plain' does not support operation 0 \(SUB\)"):
        device.prepare_model(checked)


def test_DEV_3_DEV_4_DEV_9_the_device_info_has_the_device_s_properties() -> None:
    info = Plain().info
    assert (info.name, info.type, info.feature_level, info.status) == (
        "test-plain",
        DeviceType.CPU,
        8,
        DeviceStatus.AVAILABLE,
    )
    assert info.version.startswith("nnfmq-")


def test_DEV_7_the_info_is_the_same_each_time(shipped: dict[str, InterpreterDevice]) -> None:
    again = as_shipped()
    assert [device.info for device in shipped.values()] == [device.info for device in again.values()]
    assert [device.capabilities for device in shipped.values()] == [device.capabilities for device in again.values()]


def test_DEV_12_the_reference_supports_everything_at_the_cpu_s_own_speed() -> None:
    reference = load_devices()["reference"]
    assert reference.type is DeviceType.CPU
    assert reference.get_capabilities() == uniform_capabilities(CPU_PERFORMANCE)


class TestFunctions:
    """A program that is one function."""

    @staticmethod
    def bound(function: Any, outputs: list[Any], model: Model = ADD) -> Any:
        inputs = [np.full(4, value, np.float32) for value in (1, 2)]
        return FunctionProgram(model, function).bind(inputs, outputs)

    def test_results_are_copied_into_the_outputs(self) -> None:
        out = np.zeros(4, np.float32)
        shapes = self.bound(lambda inputs: [inputs[0] + inputs[1]], [out]).run()
        assert (out.tolist(), shapes[0].dimensions) == ([3.0] * 4, (4,))

    def test_inputs_that_do_not_fit_are_rejected(self) -> None:
        with pytest.raises(InvalidArgument, match="1 inputs given"):
            FunctionProgram(ADD, lambda inputs: inputs).bind([np.zeros(4, np.float32)], [None])
        with pytest.raises(InvalidArgument, match="input operand 0"):
            FunctionProgram(ADD, lambda inputs: inputs).bind([np.zeros(4, np.int32)] * 2, [None])

    @pytest.mark.parametrize(
        "result",
        [[], [np.zeros(4, np.float32)] * 2, [np.zeros(4, np.float64)], [np.zeros(3, np.float32)], [[0.0] * 4]],
        ids=["none", "two", "float64", "short", "list"],
    )
    def test_results_of_wrong_shape_or_type_are_a_failure(self, result: list[Any]) -> None:
        with pytest.raises(GeneralFailure, match="the device computed"):
            self.bound(lambda inputs: result, [np.zeros(4, np.float32)]).run()


# ------------------------------------------------------------------------------------------------ the configuration


def test_UTL_10_the_sample_devices_exist(shipped: dict[str, InterpreterDevice]) -> None:
    samples = ["float_fast", "float_slow", "quant", "minimal", "partial"]
    assert list(shipped) == ["reference", "compiled", *(f"sample-{name}" for name in samples)]


@pytest.mark.parametrize(
    ("name", "types", "float32", "relaxed"),
    [
        ("sample-float_fast", FLOAT, (0.8, 1.2), (0.7, 1.1)),
        ("sample-float_slow", FLOAT, (1.3, 0.7), (1.2, 0.6)),
        ("sample-minimal", FLOAT, (0.4, 0.5), (0.4, 0.5)),
        ("sample-quant", FLOAT, (50.0, 1.0), (50.0, 1.0)),
        ("sample-partial", FLOAT, (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_CAP_3_CAP_4_performance_info_is_that_of_android_s_sample_drivers(
    name: str,
    types: list[OperandType],
    float32: tuple[float, float],
    relaxed: tuple[float, float],
    shipped: dict[str, InterpreterDevice],
) -> None:
    capabilities = shipped[name].get_capabilities()
    validate_capabilities(capabilities)
    assert {performance_of(capabilities, type) for type in types} == {PerformanceInfo(*float32)}
    assert capabilities.relaxed_float32_to_float16_tensor == PerformanceInfo(*relaxed)
    assert performance_of(capabilities, OperandType.SUBGRAPH) is UNKNOWN_PERFORMANCE


def test_CAP_4_a_relaxed_model_is_as_fast_on_the_compiling_device_as_any_other(
    shipped: dict[str, InterpreterDevice],
) -> None:
    capabilities = shipped["compiled"].capabilities  # no engine has code for relaxed models
    float32 = performance_of(capabilities, OperandType.TENSOR_FLOAT32)
    assert capabilities.relaxed_float32_to_float16_tensor == float32
    assert capabilities.relaxed_float32_to_float16_scalar == float32


def supported(device: DeviceBase, model: Model) -> bool:
    return all(device.supported_operations(model))


def test_SUP_3_each_sample_device_supports_only_its_operations(shipped: dict[str, InterpreterDevice]) -> None:
    quantized = two_adds(OperandType.TENSOR_QUANT8_ASYMM, 0.5, 128)
    relu = models.relu_model()
    able = {name: [supported(device, model) for model in (ADD, relu, quantized)] for name, device in shipped.items()}
    assert able == {
        "reference": [True, True, True],
        "compiled": [True, True, True],
        "sample-float_fast": [True, True, False],
        "sample-float_slow": [True, True, False],
        "sample-quant": [False, False, True],
        "sample-minimal": [True, False, False],
        "sample-partial": [True, True, True],
    }


def test_operations_can_be_excluded(configured: Any) -> None:
    found = configured('[[device]]\nname = "test-a"\nexcept_operations = ["RELU"]\n')
    assert [supported(found["test-a"], model) for model in (ADD, models.relu_model())] == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[device]]\n", "name"),
        *((f'[[device]]\nname = "{name}"\n', "of the form 'vendor-name'") for name in NO_NAMES),
        ('[[device]]\nname = "test-a"\noperations = ["PLUS"]\n', "'PLUS' is not an OperationType"),
        ('[[device]]\nname = "test-a"\nfirst_operand = ["FLOAT"]\n', "'FLOAT' is not an OperandType"),
        ('[[device]]\nname = "test-a"\ncolour = 1\n', "colour"),
        (
            '[[device]]\nname = "test-a"\n[device.performance]\nall = { exec_time = 0, power_usage = 1.0 }\n',
            "exec_time",
        ),
        (
            '[[device]]\nname = "test-a"\n[device.performance.types]\nX = { exec_time = 1.0, power_usage = 1.0 }\n',
            "'X'",
        ),
        ('[[device]]\nname = "test-a"\n[[device]]\nname = "test-a"\n', "'test-a' is listed twice"),
        ("no toml", "devices.toml"),
        ("device = " + "[" * 5000 + "]" * 5000, "nested too deep"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_an_invalid_configuration_is_rejected(text: str, message: str, configured: Any) -> None:
    with pytest.raises(InvalidArgument, match=message):
        configured(text)


# ------------------------------------------------------------------------------------------------ all devices


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, configured: Any) -> Iterator[Any]:
    """Return what is loaded where these are the plug-ins, by name, beside one configured device."""

    def loaded(**plug_ins: Any) -> DeviceRegistry:
        entries = [
            SimpleNamespace(name=name, value=name, load=lambda kind=kind: kind()) for name, kind in plug_ins.items()
        ]
        monkeypatch.setattr(plugins, "entry_points_of", lambda _group: entries)
        return make_devices(read_configuration()[:1])

    return loaded


class Misnamed(Plain):
    name = "a-b-c"


class Impossible(Plain):
    @property
    def capabilities(self) -> Capabilities:
        return uniform_capabilities(PerformanceInfo(-1.0, 1.0))


class Versionless(Plain):
    @property
    def version_string(self) -> str:
        return ""


class TypedOddly(Plain):
    type = 9  # type: ignore[assignment]


class VersionedOddly(Plain):
    @property
    def version_string(self) -> str:
        return 7  # type: ignore[return-value]


class LongNamed(Plain):
    name = "n-" + "n" * 255


class Hoarding(Plain):
    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        return NumberOfCacheFiles(33, 0)


class Fractional(Plain):
    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        return NumberOfCacheFiles(0, 0.5)  # type: ignore[arg-type]


class BadlyExtended(Plain):
    @property
    def extensions(self) -> Any:
        return [SimpleNamespace(name="noperiod", types=(), described=Extension("noperiod", ()))]


class OfTheFuture(Plain):
    feature_level = 9


class Undecided(Plain):
    @property
    def extensions(self) -> Any:
        raise RuntimeError("no hardware")


def test_devices_of_plug_ins_come_after_configured_ones(loaded: Any) -> None:
    assert list(loaded(mine=lambda: Plain)) == ["reference", "test-plain"]


@pytest.mark.parametrize(
    "kind",
    [
        *(Misnamed, Impossible, Versionless, TypedOddly, VersionedOddly, LongNamed, OfTheFuture, Undecided),
        *(Hoarding, Fractional, BadlyExtended),
        *(dict, lambda: 1 / 0),
    ],
    ids=lambda kind: kind.__name__,
)
def test_N_BAS_3_DEV_6_DEV_10_a_device_with_an_invalid_description_is_skipped(
    kind: Any, loaded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(loaded(bad=lambda: kind, good=lambda: Plain)) == ["reference", "test-plain"]
    assert "device bad (bad) is left out" in caplog.text


@pytest.mark.parametrize("name", NO_NAMES)
def test_N_BAS_3_DEV_8_a_name_has_at_most_one_hyphen_inside(name: str) -> None:
    assert not is_device_name(name)


def test_N_BAS_3_DEV_8_the_names_of_all_built_in_devices_are_valid() -> None:
    assert all(is_device_name(name) for name in load_devices())


@pytest.mark.parametrize("name", ["vendor-name", "name", "n", "a b"])
def test_DEV_8_a_name_may_begin_with_a_vendor(name: str) -> None:
    assert is_device_name(name)


class Saving(Plain):
    """A device whose compilation is one file, and that counts what it is asked."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.result = result
        self.saved: list[Any] = []

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        return NumberOfCacheFiles(0, 1)

    def save(self, model: Model, program: Any) -> CacheContents:
        self.saved.append(program)
        return CacheContents(data=(b"saved",))

    def restore(self, contents: CacheContents) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        assert [bytes(data) for data in contents.data] == [b"saved"]
        return self.result or (ADD, self.compile(ADD))


def saved_to(device: DeviceBase, fd: int) -> CacheFiles:
    """Prepare ADD and have it saved; return what it is to be restored from."""
    caches = CacheFiles(bytes(32), (), (fd,))
    device.prepare_model(device.check_prepare_arguments(ADD, 0, 0, None), caches)
    return caches


@pytest.fixture
def cache_file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "cache", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def test_DEV_6_CACHE_9_a_plug_in_saves_its_own_program_and_restores_it(loaded: Any, cache_file: int) -> None:
    saving = Saving()
    device = loaded(own=lambda: lambda: saving)["test-plain"]
    assert (device.info.model_cache_files, device.info.data_cache_files) == (0, 1)
    contents, size = device.load_caches(saved_to(device, cache_file), None, 1 << 20)
    assert isinstance(saving.saved[0], Program) and size == len(b"saved")
    out = np.zeros(4, np.float32)
    inputs = [np.full(4, value, np.float32) for value in (1, 2)]
    device.restore_model(contents).program.bind(inputs, [out]).run()
    assert out.tolist() == [3.0] * 4


@pytest.mark.parametrize("result", [RuntimeError("no hardware"), ("no model", None), 7], ids=["error", "text", "int"])
def test_LIFE_8_a_plug_in_that_cannot_restore_fails_that_call_only(result: Any, loaded: Any, cache_file: int) -> None:
    device = loaded(own=lambda: lambda: Saving(result))["test-plain"]
    contents, _ = device.load_caches(saved_to(device, cache_file), None, 1 << 20)
    with pytest.raises(GeneralFailure):
        device.restore_model(contents)


class Broken(Plain):
    """Fails as the libraries of hardware do, in one of its methods; forgets what `Device` needs."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, here: str) -> None:
        if self.where == here:
            raise OSError("the hardware is gone")
        if self.where == f"{here} of another driver":
            raise DeadObject("the other driver is gone")

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        self.fail("supports")
        return True

    def compile(self, model: Model) -> Any:
        self.fail("compile")
        return None if self.where == "bind" else FunctionProgram(model, self.run)

    def run(self, inputs: Any) -> list[Any]:
        self.fail("run")
        return [inputs[0] + inputs[1]]


@pytest.mark.parametrize("where", ["supports", "compile", "bind", "run", "run of another driver", "nowhere"])
def test_LIFE_8_any_exception_of_a_plug_in_s_device_fails_that_call_only(
    where: str, loaded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    device = loaded(bad=lambda: lambda: Broken(where))["test-plain"]

    def executed() -> list[float]:
        prepared = device.prepare_model(device.check_prepare_arguments(ADD, 0, 0, None))
        out = np.zeros(4, np.float32)
        prepared.program.bind([np.full(4, value, np.float32) for value in (1, 2)], [out]).run()
        return out.tolist()

    if where == "nowhere":
        assert executed() == [3.0] * 4
        return
    with pytest.raises(GeneralFailure, match="the plug-in of device 'test-plain' failed"):
        executed()
    assert "the plug-in of device 'test-plain' failed" in caplog.text


class Prefetching(Plain):
    def __init__(self, prefetch: Callable[[], object]) -> None:
        super().__init__()
        self.prefetch = prefetch

    def prefetch_imports(self) -> None:
        self.prefetch()


def test_LIFE_8_a_plug_in_imports_what_it_needs_before_a_preparation_and_may_fail_at_that(
    loaded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    for prefetch in (lambda: calls.append(1), lambda: calls.append(1 // 0)):
        loaded(own=lambda prefetch=prefetch: lambda: Prefetching(prefetch))["test-plain"].prefetch_imports()
    assert calls == [1]
    assert "the plug-in of device 'test-plain' failed" in caplog.text


def test_DEV_10_a_plug_in_that_cannot_be_imported_is_skipped(loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise SystemExit("no hardware")

    assert list(loaded(bad=broken)) == ["reference"]
    assert "no hardware" in caplog.text


def test_DEV_8_a_second_device_with_the_same_name_is_skipped(loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert list(loaded(one=lambda: Plain, two=lambda: Plain)) == ["reference", "test-plain"]
    assert "device 'test-plain' is left out: there is another one of this name" in caplog.text


def test_DEV_14_the_status_is_in_a_page_that_all_workers_map() -> None:
    page = memoryview(bytearray(STATUS_PAGE_BYTES))
    first, second = DeviceRegistry([Plain()]), DeviceRegistry([Plain()])
    for workers in (first, second):
        workers.share_status(page)
    first.set_status("test-plain", DeviceStatus.BUSY)
    device = second["test-plain"]
    assert device.info.status is DeviceStatus.BUSY
    for call in (
        device.get_capabilities,
        lambda: device.supported_operations(ADD),
        lambda: device.check_prepare_arguments(ADD, 0, 0, None),
    ):
        with pytest.raises(DeviceUnavailable, match="'test-plain' is BUSY"):
            call()
    second.set_status("test-plain", DeviceStatus.AVAILABLE)
    assert first["test-plain"].supported_operations(ADD) == [True]


def test_DEV_14_a_temporary_status_ends_with_its_process_and_restores_the_status_that_was_kept() -> None:
    page = memoryview(bytearray(STATUS_PAGE_BYTES))
    first, second = DeviceRegistry([Plain()]), DeviceRegistry([Plain()])
    for workers in (first, second):
        workers.share_status(page)
    device = second["test-plain"]
    first.set_status("test-plain", DeviceStatus.BUSY)
    first.set_status("test-plain", DeviceStatus.OFFLINE, is_kept=False)
    end_changes(page, os.getpid() + 1)
    assert device.status is DeviceStatus.OFFLINE
    end_changes(page, os.getpid())
    assert device.status is DeviceStatus.BUSY
    first.set_status("test-plain", DeviceStatus.AVAILABLE, is_kept=False)
    end_changes(page, os.getpid())
    assert device.status is DeviceStatus.AVAILABLE


def test_DEV_2_the_status_cannot_be_set_to_UNKNOWN() -> None:
    with pytest.raises(InvalidArgument, match="not UNKNOWN"):
        DeviceRegistry([Plain()]).set_status("test-plain", DeviceStatus.UNKNOWN)
    with pytest.raises(InvalidArgument, match="no device 'gpu'; this driver has: test-plain"):
        DeviceRegistry([Plain()]).set_status("gpu", DeviceStatus.BUSY)


def test_DEV_14_a_bound_execution_is_unavailable_too() -> None:
    device = Plain()
    prepared = device.prepare_model(device.check_prepare_arguments(ADD, 0, 0, None))
    page = device.status_byte
    bound = prepared.program.bind([np.zeros(4, np.float32)] * 2, [None])
    page[0] = DeviceStatus.OFFLINE
    result = run_bound(MappedExecution(bound, page), MeasureTiming.NO, 0)
    assert result.status is ErrorStatus.DEVICE_UNAVAILABLE
