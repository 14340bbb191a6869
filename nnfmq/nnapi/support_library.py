"""The functions of NNAPI and of its support library by their C names: FUNCTIONS, and those that Linux has no use for.

An updatable NNAPI driver on Android is a library with a table of function pointers, NnApiSLDriverImplFL5. FUNCTIONS is
that table in Python (API-17): the value of a name takes the C function's object first, and returns what the C function
writes through a pointer. A result code other than NO_ERROR is an exception. `free` accepts None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol

from nnfmq.client.partitioned.devices import RuntimeDevice
from nnfmq.client.partitioned.runtime import Runtime
from nnfmq.model_builder.builder import ModelBuilder
from nnfmq.nnapi import device_queries as queries
from nnfmq.nnapi.burst import BurstBuilder
from nnfmq.nnapi.compilation import CompilationBuilder
from nnfmq.nnapi.event import Event
from nnfmq.nnapi.execution import ExecutionBuilder, get_default_loop_timeout, get_maximum_loop_timeout
from nnfmq.nnapi.memory import MemoryBuilder, copy_memory, create_memory_from_fd
from nnfmq.telemetry import register

__all__ = ["FUNCTIONS", "NOT_ON_LINUX", "free"]


class _Closable(Protocol):
    def close(self) -> None: ...


def free(released: _Closable | None) -> None:
    """Close an object of this package, a memory or a ModelBuilder; None has no effect (API-16)."""
    if released is not None:
        released.close()


def _methods(prefix: str, kind: type, names: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of an object, by the C names of `names`, which are in camel case."""
    return {f"{prefix}_{name}": getattr(kind, _snake_case(name)) for name in names.split()}


def _snake_case(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


_DIAGNOSTIC_FIELDS = {
    "CompilationInfo": {
        "getModelArchHash": "model_arch_hash",
        "getDeviceIds": "device_id",
        "getErrorCode": "error_code",
        "getInputDataClass": "input_data_class",
        "getOutputDataClass": "output_data_class",
        "getCompilationTimeNanos": "compilation_time_ns",
        "isCachingEnabled": "cache_used",
        "isControlFlowUsed": "has_control_flow",
        "areDynamicTensorsUsed": "has_dynamic_temporaries",
    },
    "ExecutionInfo": {
        "getModelArchHash": "model_arch_hash",
        "getDeviceIds": "device_id",
        "getExecutionMode": "mode",
        "getInputDataClass": "input_data_class",
        "getOutputDataClass": "output_data_class",
        "getErrorCode": "error_code",
        "getRuntimeExecutionTimeNanos": "duration_runtime_ns",
        "getDriverExecutionTimeNanos": "duration_driver_ns",
        "getHardwareExecutionTimeNanos": "duration_hardware_ns",
        "isCachingEnabled": "cache_used",
        "isControlFlowUsed": "has_control_flow",
        "areDynamicTensorsUsed": "has_dynamic_temporaries",
    },
}
"""The functions of the support library's diagnostics, and the fields of telemetry records that they return."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ANeuralNetworks_getDefaultLoopTimeout": get_default_loop_timeout,
    "ANeuralNetworks_getMaximumLoopTimeout": get_maximum_loop_timeout,
    "ANeuralNetworks_getRuntimeFeatureLevel": attrgetter("runtime_feature_level"),
    "ANeuralNetworks_getDeviceCount": queries.get_device_count,
    "ANeuralNetworks_getDevice": queries.get_device,
    "ANeuralNetworksDevice_getName": attrgetter("name"),
    "ANeuralNetworksDevice_getType": attrgetter("type"),
    "ANeuralNetworksDevice_getVersion": attrgetter("version_string"),
    "ANeuralNetworksDevice_getFeatureLevel": attrgetter("feature_level"),
    "ANeuralNetworksDevice_getExtensionSupport": RuntimeDevice.supports_extension,
    "ANeuralNetworksDevice_wait": RuntimeDevice.connected,
    "ANeuralNetworksModel_create": ModelBuilder,
    "ANeuralNetworksModel_free": free,
    **_methods(
        "ANeuralNetworksModel",
        ModelBuilder,
        "addOperand setOperandValue setOperandValueFromMemory setOperandValueFromModel addOperation "
        "identifyInputsAndOutputs finish getExtensionOperandType getExtensionOperationType",
    ),
    "ANeuralNetworksModel_setOperandSymmPerChannelQuantParams": ModelBuilder.set_per_channel_quant_params,
    "ANeuralNetworksModel_setOperandExtensionData": ModelBuilder.set_extension_data,
    "ANeuralNetworksModel_relaxComputationFloat32toFloat16": ModelBuilder.relax_computation,
    "ANeuralNetworksModel_getSupportedOperationsForDevices": Runtime.supported_operations,
    "ANeuralNetworksCompilation_create": CompilationBuilder,
    "ANeuralNetworksCompilation_createForDevices": CompilationBuilder,
    "ANeuralNetworksCompilation_free": free,
    **_methods(
        "ANeuralNetworksCompilation",
        CompilationBuilder,
        "setPreference setPriority setTimeout setCaching addExtensionAttribute finish "
        "getPreferredMemoryAlignmentForInput getPreferredMemoryPaddingForInput "
        "getPreferredMemoryAlignmentForOutput getPreferredMemoryPaddingForOutput",
    ),
    "ANeuralNetworksExecution_create": ExecutionBuilder,
    "ANeuralNetworksExecution_free": free,
    **_methods(
        "ANeuralNetworksExecution",
        ExecutionBuilder,
        "setInput setInputFromMemory setOutput setOutputFromMemory enableInputAndOutputPadding setTimeout "
        "setLoopTimeout setMeasureTiming setReusable addExtensionAttribute compute burstCompute startCompute "
        "startComputeWithDependencies getOutputOperandRank getOutputOperandDimensions getDuration",
    ),
    "ANeuralNetworksEvent_free": free,
    **_methods("ANeuralNetworksEvent", Event, "createFromSyncFenceFd wait getSyncFenceFd"),
    "ANeuralNetworksBurst_create": BurstBuilder,
    "ANeuralNetworksBurst_free": free,
    "ANeuralNetworksMemoryDesc_create": MemoryBuilder,
    "ANeuralNetworksMemoryDesc_free": free,
    **_methods("ANeuralNetworksMemoryDesc", MemoryBuilder, "addInputRole addOutputRole setDimensions finish"),
    "ANeuralNetworksMemory_createFromDesc": MemoryBuilder.create_memory,
    "ANeuralNetworksMemory_createFromFd": create_memory_from_fd,
    "ANeuralNetworksMemory_copy": copy_memory,
    "ANeuralNetworksMemory_free": free,
    "SL_ANeuralNetworksCompilation_setCachingFromFds": CompilationBuilder.set_caching_from_fds,
    "SL_ANeuralNetworksDiagnostic_registerCallbacks": register,
    **{
        f"SL_ANeuralNetworksDevice_{name}": getattr(queries, _snake_case(name))
        for name in (
            "getNumberOfCacheFilesNeeded",
            "getPerformanceInfo",
            "forEachOperandPerformanceInfo",
            "getVendorExtensionCount",
            "getVendorExtensionName",
            "forEachVendorExtensionOperandTypeInformation",
        )
    },
    **{
        f"SL_ANeuralNetworksDiagnostic{kind}_{name}": attrgetter(field)
        for kind, fields in _DIAGNOSTIC_FIELDS.items()
        for name, field in fields.items()
    },
}

NOT_ON_LINUX: Mapping[str, str] = {
    "ANeuralNetworksMemory_createFromAHardwareBuffer": (
        "hardware buffers are Android's; a memfd is the counterpart of a BLOB: create_memory_from_fd"
    ),
    **dict.fromkeys(
        (
            "SL_ANeuralNetworksDiagnosticCompilationInfo_getSessionId",
            "SL_ANeuralNetworksDiagnosticExecutionInfo_getSessionId",
        ),
        "a record is of the process that registered the callback",
    ),
    **dict.fromkeys(
        (
            "SL_ANeuralNetworksDiagnosticCompilationInfo_getNnApiVersion",
            "SL_ANeuralNetworksDiagnosticExecutionInfo_getNnApiVersion",
        ),
        "the library and the runtime are one: Runtime.runtime_feature_level",
    ),
}
"""The functions without a meaning on Linux, and the reason or the counterpart."""
