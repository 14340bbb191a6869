"""ONNX Runtime's Python interface over nnfmq: `import nnfmq.compat.onnxruntime as ort` moves a script into the driver.

Every public name of ONNX Runtime 1.32 is here. What nnfmq does not have raises NotImplemented, with the reason, when it
is used. docs/how-to/move-an-onnx-runtime-script.md lists what differs.
"""

from typing import NoReturn

from nnfmq.compat.onnxruntime import capi, environment, types
from nnfmq.compat.onnxruntime.capi import onnxruntime_pybind11_state
from nnfmq.compat.onnxruntime.environment import *  # noqa: F403
from nnfmq.compat.onnxruntime.environment import VERSION as __version__
from nnfmq.compat.onnxruntime.interface import NodeArg
from nnfmq.compat.onnxruntime.interface import OrtModelMetadata as ModelMetadata
from nnfmq.compat.onnxruntime.options import OrtRunOptions as RunOptions
from nnfmq.compat.onnxruntime.options import SessionOptions
from nnfmq.compat.onnxruntime.session import InferenceSession
from nnfmq.compat.onnxruntime.types import *  # noqa: F403
from nnfmq.compat.onnxruntime.values import IOBinding, OrtDevice, OrtValue, copy_tensors

package_name, version, cuda_version = "nnfmq", __version__, ""

__all__ = [
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "OrtDevice",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "__version__",
    "capi",
    "copy_tensors",
    "cuda_version",
    "onnxruntime_pybind11_state",
    "package_name",
    "version",
]
__all__ += environment.__all__
__all__ += types.__all__


def __getattr__(name: str) -> NoReturn:
    """Raise NotImplementedError for a module of ONNX Runtime, with the reason; AttributeError for other names."""
    if name in environment.UNAVAILABLE_MODULES:
        raise NotImplementedError(f"nnfmq has no {__name__}.{name}: {environment.UNAVAILABLE_MODULES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
