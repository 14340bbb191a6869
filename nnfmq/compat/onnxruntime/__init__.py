"""ONNX Runtime's Python interface over nnfmq: `import nnfmq.compat.onnxruntime as ort` moves a script into the driver.

Every public name of ONNX Runtime 1.32 is here. What nnfmq does not have raises NotImplemented, with the reason, when it
is used. docs/how-to/move-an-onnx-runtime-script.md lists what differs.
"""

from typing import Any, NoReturn

from nnfmq.compat.onnxruntime import capi
from nnfmq.compat.onnxruntime.capi import onnxruntime_pybind11_state
from nnfmq.compat.onnxruntime.environment import (
    UNAVAILABLE_CLASSES,
    UNAVAILABLE_MODULES,
    OrtMemoryInfo,
    create_and_register_allocator,
    create_and_register_allocator_v2,
    disable_telemetry_events,
    enable_telemetry_events,
    get_all_providers,
    get_available_providers,
    get_build_info,
    get_device,
    get_ep_devices,
    get_version_string,
    has_collective_ops,
    preload_dlls,
    print_debug_info,
    register_execution_provider_library,
    set_default_logger_callback,
    set_default_logger_severity,
    set_default_logger_verbosity,
    set_global_thread_pool_sizes,
    set_seed,
    unregister_execution_provider_library,
)
from nnfmq.compat.onnxruntime.environment import VERSION as __version__
from nnfmq.compat.onnxruntime.interface import NodeArg
from nnfmq.compat.onnxruntime.interface import OrtModelMetadata as ModelMetadata
from nnfmq.compat.onnxruntime.options import OrtRunOptions as RunOptions
from nnfmq.compat.onnxruntime.options import SessionOptions
from nnfmq.compat.onnxruntime.session import InferenceSession
from nnfmq.compat.onnxruntime.types import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    ModelPackageWriteMode,
    OrtAllocatorType,
    OrtCompileApiFlags,
    OrtDeviceMemoryType,
    OrtDeviceVendorId,
    OrtExecutionProviderDevicePolicy,
    OrtHardwareDeviceType,
    OrtMemoryInfoDeviceType,
    OrtMemType,
    OrtSparseFormat,
)
from nnfmq.compat.onnxruntime.values import IOBinding, OrtDevice, OrtValue, copy_tensors

package_name, version, cuda_version = "nnfmq", __version__, ""

AdapterFormat: Any = UNAVAILABLE_CLASSES["AdapterFormat"]
LoraAdapter: Any = UNAVAILABLE_CLASSES["LoraAdapter"]
ModelCompiler: Any = UNAVAILABLE_CLASSES["ModelCompiler"]
ModelPackage: Any = UNAVAILABLE_CLASSES["ModelPackage"]
ModelPackageComponentContext: Any = UNAVAILABLE_CLASSES["ModelPackageComponentContext"]
ModelPackageContext: Any = UNAVAILABLE_CLASSES["ModelPackageContext"]
ModelPackageOptions: Any = UNAVAILABLE_CLASSES["ModelPackageOptions"]
OrtArenaCfg: Any = UNAVAILABLE_CLASSES["OrtArenaCfg"]
OrtEpAssignedNode: Any = UNAVAILABLE_CLASSES["OrtEpAssignedNode"]
OrtEpAssignedSubgraph: Any = UNAVAILABLE_CLASSES["OrtEpAssignedSubgraph"]
OrtEpContextData: Any = UNAVAILABLE_CLASSES["OrtEpContextData"]
OrtEpContextDataBuffer: Any = UNAVAILABLE_CLASSES["OrtEpContextDataBuffer"]
OrtEpDevice: Any = UNAVAILABLE_CLASSES["OrtEpDevice"]
OrtExternalInitializerInfo: Any = UNAVAILABLE_CLASSES["OrtExternalInitializerInfo"]
OrtHardwareDevice: Any = UNAVAILABLE_CLASSES["OrtHardwareDevice"]
OrtSyncStream: Any = UNAVAILABLE_CLASSES["OrtSyncStream"]
SessionIOBinding: Any = UNAVAILABLE_CLASSES["SessionIOBinding"]
SparseTensor: Any = UNAVAILABLE_CLASSES["SparseTensor"]

__all__ = [
    "AdapterFormat",
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "LoraAdapter",
    "ModelCompiler",
    "ModelMetadata",
    "ModelPackage",
    "ModelPackageComponentContext",
    "ModelPackageContext",
    "ModelPackageOptions",
    "ModelPackageWriteMode",
    "NodeArg",
    "OrtAllocatorType",
    "OrtArenaCfg",
    "OrtCompileApiFlags",
    "OrtDevice",
    "OrtDeviceMemoryType",
    "OrtDeviceVendorId",
    "OrtEpAssignedNode",
    "OrtEpAssignedSubgraph",
    "OrtEpContextData",
    "OrtEpContextDataBuffer",
    "OrtEpDevice",
    "OrtExecutionProviderDevicePolicy",
    "OrtExternalInitializerInfo",
    "OrtHardwareDevice",
    "OrtHardwareDeviceType",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtMemoryInfoDeviceType",
    "OrtSparseFormat",
    "OrtSyncStream",
    "OrtValue",
    "RunOptions",
    "SessionIOBinding",
    "SessionOptions",
    "SparseTensor",
    "__version__",
    "capi",
    "copy_tensors",
    "create_and_register_allocator",
    "create_and_register_allocator_v2",
    "cuda_version",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_ep_devices",
    "get_version_string",
    "has_collective_ops",
    "onnxruntime_pybind11_state",
    "package_name",
    "preload_dlls",
    "print_debug_info",
    "register_execution_provider_library",
    "set_default_logger_callback",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
    "set_seed",
    "unregister_execution_provider_library",
    "version",
]


def __getattr__(name: str) -> NoReturn:
    """Raise NotImplementedError for a module of ONNX Runtime, with the reason; AttributeError for other names."""
    if name in UNAVAILABLE_MODULES:
        raise NotImplementedError(f"nnfmq has no {__name__}.{name}: {UNAVAILABLE_MODULES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
