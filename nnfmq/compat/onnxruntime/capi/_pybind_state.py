"""ONNX Runtime's other name of `onnxruntime_pybind11_state`."""

from nnfmq.compat.onnxruntime.capi.onnxruntime_pybind11_state import *  # noqa: F403
