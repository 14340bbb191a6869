"""The module of ONNX Runtime that defines the classes of its package."""

from nnfmq.compat.onnxruntime.session import InferenceSession
from nnfmq.compat.onnxruntime.values import IOBinding, OrtDevice, OrtValue, copy_tensors

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue", "copy_tensors"]
