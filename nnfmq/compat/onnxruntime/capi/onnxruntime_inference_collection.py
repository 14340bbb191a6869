"""The module of ONNX Runtime that defines the classes of its package."""

from nnfmq.compat.onnxruntime.ort_binding import IOBinding
from nnfmq.compat.onnxruntime.ort_session import InferenceSession
from nnfmq.compat.onnxruntime.ort_value import OrtDevice, OrtValue, copy_tensors

__all__ = ["IOBinding", "InferenceSession", "OrtDevice", "OrtValue", "copy_tensors"]
