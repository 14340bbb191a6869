"""NNAPI's functions by their C names through a driver process: each is called, and queries of devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder, until
from support.nnapi_objects import ONE, SUM, TEN, floats
from support.plugins import NAME, add_fibonacci, path_with

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.capabilities import CPU_PERFORMANCE, NumberOfCacheFiles, PriorityCode
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import DeviceType, ExecutionPreference, OperandType, Protection
from nnfmq.nnapi import device_queries as queries
from nnfmq.nnapi.support_library import FUNCTIONS
from nnfmq.telemetry import CompilationRecord, ExecutionRecord

TOKEN = bytes(32)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a driver whose devices support the extension of the documents."""
    site = tmp_path_factory.mktemp("site")
    add_fibonacci(site)
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


@pytest.fixture
def runtime(driver: Daemon) -> Iterator[nnfmq.Runtime]:
    with nnfmq.Runtime([driver.path]) as made:
        yield made


class CalledFunctions:
    """FUNCTIONS, and which of them were called."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a function by its C name without `ANeuralNetworks`."""
        full = name.replace("SL_", "SL_ANeuralNetworks") if name.startswith("SL_") else f"ANeuralNetworks{name}"
        self.names.add(full)
        return FUNCTIONS[full](*arguments, **named)


Call = CalledFunctions


def describe_devices(call: Call, runtime: nnfmq.Runtime) -> Any:
    """Query the devices of a runtime, and return `reference`."""
    count = call("_getDeviceCount", runtime)
    found = [call("_getDevice", runtime, index) for index in range(count)]
    named = {call("Device_getName", device): device for device in found}
    device = named["reference"]
    assert call("Device_getType", device) is DeviceType.CPU
    assert call("Device_getVersion", device).startswith("nnfmq-")
    assert call("Device_getFeatureLevel", device) == call("_getRuntimeFeatureLevel", runtime) == FeatureLevel.AIDL_V4
    assert call("Device_getExtensionSupport", device, NAME)
    call("Device_wait", device)
    assert (call("_getDefaultLoopTimeout"), call("_getMaximumLoopTimeout")) == (2.0, 15.0)
    return device


def describe_for_the_support_library(call: Call, device: Any) -> None:
    files = call("SL_Device_getNumberOfCacheFilesNeeded", device)
    assert isinstance(files, NumberOfCacheFiles)
    assert call("SL_Device_getPerformanceInfo", device, 0) == CPU_PERFORMANCE
    performances: list[Any] = []
    call("SL_Device_forEachOperandPerformanceInfo", device, performances.append)
    assert OperandType.TENSOR_FLOAT32 in [performance.type for performance in performances]
    count = call("SL_Device_getVendorExtensionCount", device)
    names = [call("SL_Device_getVendorExtensionName", device, index) for index in range(count)]
    kinds: list[Any] = []
    call("SL_Device_forEachVendorExtensionOperandTypeInformation", device, names.index(NAME), kinds.append)
    assert [(kind.type, kind.is_tensor, kind.byte_size) for kind in kinds] == [(0, False, 8), (1, True, 8)]


def build_adding(call: Call, runtime: nnfmq.Runtime, device: Any, constant: Memory) -> nnfmq.ModelBuilder:
    """Build x + 10, 20, 30, 40, which are in a memory."""
    model = call("Model_create")
    x, weights, total = (call("Model_addOperand", model, "TENSOR_FLOAT32", (4,)) for _ in range(3))
    activation = call("Model_addOperand", model, "INT32")
    call("Model_setOperandValue", model, activation, 0)
    call("Model_setOperandValueFromMemory", model, weights, constant, 0, 16)
    call("Model_addOperation", model, "ADD", [x, weights, activation], [total])
    call("Model_identifyInputsAndOutputs", model, [x], [total])
    call("Model_relaxComputationFloat32toFloat16", model, False)
    call("Model_finish", model)
    assert call("Model_getSupportedOperationsForDevices", runtime, model, [device]) == [True]
    made: nnfmq.ModelBuilder = model
    return made


def use_other_operands(call: Call, branch: nnfmq.ModelBuilder) -> None:
    """Describe operands of all other kinds, in a model that is never finished."""
    model = call("Model_create")
    filters = call("Model_addOperand", model, "TENSOR_QUANT8_SYMM_PER_CHANNEL", (2, 1, 1, 1))
    call("Model_setOperandSymmPerChannelQuantParams", model, filters, [0.5, 0.25], 0)
    call("Model_setOperandValueFromModel", model, call("Model_addOperand", model, "SUBGRAPH"), branch)
    kind = call("Model_getExtensionOperandType", model, NAME, 1)
    call("Model_setOperandExtensionData", model, call("Model_addOperand", model, kind, (3,)), b"parameters")
    assert call("Model_getExtensionOperationType", model, NAME, 0) > 0xFFFF
    call("Model_free", model)


def compile_adding(call: Call, model: nnfmq.ModelBuilder, device: Any, folder: Path) -> Any:
    compilation = call("Compilation_createForDevices", model, [device])
    call("Compilation_setPreference", compilation, ExecutionPreference.FAST_SINGLE_ANSWER)
    call("Compilation_setPriority", compilation, PriorityCode.DEFAULT)
    call("Compilation_setTimeout", compilation, None)
    call("Compilation_setCaching", compilation, folder, TOKEN)
    call("SL_Compilation_setCachingFromFds", compilation, [], [], TOKEN)
    call("Compilation_addExtensionAttribute", compilation, NAME, 7, b"unknown to the device")
    call("Compilation_finish", compilation)
    for query in ("AlignmentForInput", "PaddingForInput", "AlignmentForOutput", "PaddingForOutput"):
        assert call(f"Compilation_getPreferredMemory{query}", compilation, 0) == 64
    return compilation


def set_up(call: Call, compilation: Any) -> Any:
    execution = call("Execution_create", compilation)
    call("Execution_enableInputAndOutputPadding", execution, True)
    call("Execution_setTimeout", execution, None)
    call("Execution_setLoopTimeout", execution, 1.0)
    call("Execution_setMeasureTiming", execution, True)
    call("Execution_setReusable", execution, True)
    call("Execution_addExtensionAttribute", execution, NAME, 7, b"unknown to the device")
    return execution


def compute_in_arrays(call: Call, compilation: Any) -> None:
    """Compute in all modes."""
    execution, found, burst = set_up(call, compilation), floats([0] * 4), call("Burst_create", compilation)
    call("Execution_setInput", execution, 0, floats(ONE))
    call("Execution_setOutput", execution, 0, found)
    call("Execution_compute", execution)
    call("Execution_burstCompute", execution, burst)
    event = call("Execution_startCompute", execution)
    call("Event_wait", event)
    call("Event_free", event)
    assert found.tolist() == SUM
    assert call("Execution_getOutputOperandRank", execution, 0) == 1
    assert call("Execution_getOutputOperandDimensions", execution, 0) == (4,)
    assert call("Execution_getDuration", execution, 1) >= 0
    call("Burst_free", burst)
    call("Execution_free", execution)


def compute_in_memories(call: Call, compilation: Any, memory: Any) -> None:
    """Compute from a memory into a device memory, behind a fence, and copy the result."""
    description = call("MemoryDesc_create")
    call("MemoryDesc_addOutputRole", description, compilation, 0, 1.0)
    call("MemoryDesc_addInputRole", description, compilation, 0, 0.5)
    call("MemoryDesc_setDimensions", description, (4,))
    call("MemoryDesc_finish", description)
    result = call("Memory_createFromDesc", description)
    call("MemoryDesc_free", description)
    execution = set_up(call, compilation)
    call("Execution_setInputFromMemory", execution, 0, memory, 0, 16)
    call("Execution_setOutputFromMemory", execution, 0, result)
    with nnfmq.Fence.create() as own:
        start = call("Event_createFromSyncFenceFd", own.fileno())
        end = call("Execution_startComputeWithDependencies", execution, [start], 30.0)
        os.close(call("Event_getSyncFenceFd", end))
        own.signal()
        call("Event_wait", end)
    for event in (start, end):
        call("Event_free", event)
    call("Memory_copy", result, memory)
    call("Execution_free", execution)
    call("Memory_free", result)


def check_records(call: Call, records: list[Any]) -> None:
    """Read all fields of the records of a compilation and an execution."""
    until(lambda: any(isinstance(record, ExecutionRecord) for record in records), "an execution is reported")
    for kind, record_type in (("CompilationInfo", CompilationRecord), ("ExecutionInfo", ExecutionRecord)):
        record = next(record for record in records if isinstance(record, record_type))
        prefix = f"SL_Diagnostic{kind}_"
        names = [name.replace("ANeuralNetworks", "") for name in FUNCTIONS]
        fields = {name.removeprefix(prefix): call(name, record) for name in names if name.startswith(prefix)}
        assert (fields["getErrorCode"], fields["isControlFlowUsed"]) == (0, False)
        assert len(fields["getModelArchHash"]) == 64


def test_TST_2_API_17_every_function_is_called_by_its_name(runtime: nnfmq.Runtime, tmp_path: Path) -> None:
    call, records = CalledFunctions(), []  # type: ignore[var-annotated]
    with ExitStack() as stack:
        constant, origin = (stack.enter_context(Memory.create(16)) for _ in range(2))
        constant.view[:] = floats(TEN).tobytes()
        origin.view[:] = floats(ONE).tobytes()
        memory = call("Memory_createFromFd", 16, Protection.READ_WRITE, origin.fileno())
        device = describe_devices(call, runtime)
        describe_for_the_support_library(call, device)
        stack.enter_context(call("SL_Diagnostic_registerCallbacks", records.append))
        model = build_adding(call, runtime, device, constant)
        use_other_operands(call, model)
        compilation = compile_adding(call, model, device, tmp_path)
        automatic = call("Compilation_create", model, runtime=runtime)
        call("Model_free", model)
        compute_in_arrays(call, compilation)
        compute_in_memories(call, compilation, memory)
        assert np.frombuffer(origin.view, np.float32).tolist() == SUM
        check_records(call, records)
        for compilation_ in (compilation, automatic):
            call("Compilation_free", compilation_)
        call("Memory_free", memory)
    assert call.names == set(FUNCTIONS)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.endswith("_free")])
def test_API_16_free_of_nothing_has_no_effect(name: str) -> None:
    assert FUNCTIONS[name](None) is None


NULLS: dict[str, Callable[[Any], object]] = {
    "get_device_count": lambda _: queries.get_device_count(None),  # type: ignore[arg-type]
    "get_device": lambda _: queries.get_device(None, 0),  # type: ignore[arg-type]
    "cache files": lambda _: queries.get_number_of_cache_files_needed(None),  # type: ignore[arg-type]
    "performance": lambda _: queries.get_performance_info(None, 0),  # type: ignore[arg-type]
    "each performance": lambda device: queries.for_each_operand_performance_info(device, None),  # type: ignore[arg-type]
    "extension count": lambda _: queries.get_vendor_extension_count(None),  # type: ignore[arg-type]
    "extension name": lambda _: queries.get_vendor_extension_name(None, 0),  # type: ignore[arg-type]
    "extension types": lambda device: queries.for_each_vendor_extension_operand_type_information(device, 0, None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", NULLS.values(), ids=NULLS)
def test_TST_2_none_is_rejected_by_every_query(runtime: nnfmq.Runtime, call: Callable[[Any], object]) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="None"):
        call(runtime.device("reference"))


@pytest.mark.parametrize("index", [-1, 99])
def test_N_API_32_an_index_without_a_device_is_rejected(runtime: nnfmq.Runtime, index: int) -> None:
    count = queries.get_device_count(runtime)
    for wrong in (index, count):
        with pytest.raises(nnfmq.InvalidArgument, match=f"there is no device {wrong}: the runtime has {count}"):
            queries.get_device(runtime, wrong)
    assert queries.get_device(runtime, count - 1).name == "nnapi-reference"


@pytest.mark.parametrize("kind", ["runtime", "client"])
def test_API_17_queries_of_devices_of_a_runtime_and_of_a_client(
    runtime: nnfmq.Runtime, driver: Daemon, kind: str
) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(driver.connect())
        device = runtime.device("sample-float_fast") if kind == "runtime" else client.device("sample-float_fast")
        capabilities = client.device("sample-float_fast").capabilities()
        found = [queries.get_performance_info(device, code) for code in queries.PerformanceInfoCode]
        assert found == [
            capabilities.relaxed_float32_to_float16_scalar,
            capabilities.relaxed_float32_to_float16_tensor,
            capabilities.if_performance,
            capabilities.while_performance,
        ]
        assert (found[0].exec_time, found[0].power_usage) == pytest.approx((0.7, 1.1))
        with pytest.raises(nnfmq.InvalidArgument, match="allowed are 0 to 3"):
            queries.get_performance_info(device, 4)  # type: ignore[arg-type]
        count = queries.get_vendor_extension_count(device)
        for index in (-1, count):
            with pytest.raises(nnfmq.InvalidArgument, match=f"the device has {count}"):
                queries.get_vendor_extension_name(device, index)
        reference = runtime.device("reference") if kind == "runtime" else client.device("reference")
        names = [queries.get_vendor_extension_name(reference, i) for i in range(2)]
        found_types: list[Any] = []
        queries.for_each_vendor_extension_operand_type_information(reference, names.index(NAME), found_types.append)
        assert [found_type.byte_size for found_type in found_types] == [8, 8]
        compiled = client.device("compiled")
        files = queries.get_number_of_cache_files_needed(compiled)
        assert (files.model, files.data) == (compiled.info.model_cache_files, compiled.info.data_cache_files)
