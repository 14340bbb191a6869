"""The exceptions of ONNX Runtime, and the classes that its compiled module has."""

from nnfmq.compat.onnxruntime.environment import get_available_providers, get_device, get_version_string
from nnfmq.compat.onnxruntime.errors import EXCEPTIONS
from nnfmq.compat.onnxruntime.interface import NodeArg
from nnfmq.compat.onnxruntime.interface import OrtModelMetadata as ModelMetadata
from nnfmq.compat.onnxruntime.options import OrtRunOptions as RunOptions
from nnfmq.compat.onnxruntime.options import SessionOptions
from nnfmq.compat.onnxruntime.session import InferenceSession
from nnfmq.compat.onnxruntime.types import ExecutionMode, ExecutionOrder, GraphOptimizationLevel
from nnfmq.compat.onnxruntime.values import OrtDevice, OrtValue, OrtValueVector

__all__ = [
    "DeviceReset",
    "EPFail",
    "EngineError",
    "ExecutionMode",
    "ExecutionOrder",
    "Fail",
    "GraphOptimizationLevel",
    "InferenceSession",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "ModelLoadCanceled",
    "ModelLoaded",
    "ModelMetadata",
    "ModelRequiresCompilation",
    "NoModel",
    "NoSuchFile",
    "NodeArg",
    "NotFound",
    "NotImplemented",
    "OrtDevice",
    "OrtValue",
    "OrtValueVector",
    "RunOptions",
    "RuntimeException",
    "SessionOptions",
    "get_available_providers",
    "get_device",
    "get_version_string",
]

DeviceReset = EXCEPTIONS["DeviceReset"]
EPFail = EXCEPTIONS["EPFail"]
EngineError = EXCEPTIONS["EngineError"]
Fail = EXCEPTIONS["Fail"]
InvalidArgument = EXCEPTIONS["InvalidArgument"]
InvalidGraph = EXCEPTIONS["InvalidGraph"]
InvalidProtobuf = EXCEPTIONS["InvalidProtobuf"]
ModelLoadCanceled = EXCEPTIONS["ModelLoadCanceled"]
ModelLoaded = EXCEPTIONS["ModelLoaded"]
ModelRequiresCompilation = EXCEPTIONS["ModelRequiresCompilation"]
NoModel = EXCEPTIONS["NoModel"]
NoSuchFile = EXCEPTIONS["NoSuchFile"]
NotFound = EXCEPTIONS["NotFound"]
NotImplemented = EXCEPTIONS["NotImplemented"]
RuntimeException = EXCEPTIONS["RuntimeException"]
