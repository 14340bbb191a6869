"""Names of ONNX Runtime that nnfmq does not have: using one raises NotImplemented with the reason."""

from __future__ import annotations

from typing import Any, NoReturn

from nnfmq.compat.onnxruntime.ort_errors import ort_error

__all__ = ["UNAVAILABLE_CLASSES", "UNAVAILABLE_MODULES", "unavailable_function"]


class _Unavailable(type):
    """The type of classes whose use raises: making an object, and reading an attribute."""

    reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise ort_error("NotImplemented", f"nnfmq has no {cls.__name__}: {cls.reason}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ort_error("NotImplemented", f"nnfmq has no {cls.__name__}.{name}: {cls.reason}")


_COMPILED = "models compiled for an execution provider cannot be written or read"
_PACKAGE = "model packages of ONNX Runtime cannot be read"
_LORA = "LoRA adapters cannot be read"
_DEVICES = "the driver's devices are those of `nnfmq devices`"
_REASONS = {
    "AdapterFormat": _LORA,
    "LoraAdapter": _LORA,
    "ModelCompiler": _COMPILED,
    "ModelPackage": _PACKAGE,
    "ModelPackageComponentContext": _PACKAGE,
    "ModelPackageContext": _PACKAGE,
    "ModelPackageOptions": _PACKAGE,
    "OrtArenaCfg": "the driver allocates memory itself",
    "OrtEpAssignedNode": "a graph is not divided among providers",
    "OrtEpAssignedSubgraph": "a graph is not divided among providers",
    "OrtEpContextData": _COMPILED,
    "OrtEpContextDataBuffer": _COMPILED,
    "OrtEpDevice": _DEVICES,
    "OrtExternalInitializerInfo": _COMPILED,
    "OrtHardwareDevice": _DEVICES,
    "OrtSyncStream": "runs end before they return; there are no streams",
    "SessionIOBinding": "use InferenceSession.io_binding",
    "SparseTensor": "tensors are dense",
}
UNAVAILABLE_CLASSES: dict[str, type] = {
    name: _Unavailable(name, (), {"reason": reason, "__module__": __name__, "__doc__": f"Not available: {reason}."})
    for name, reason in _REASONS.items()
}
UNAVAILABLE_MODULES = {
    "backend": "the interface of onnx.backend",
    "datasets": "the example models",
    "experimental": "experiments",
    "quantization": "the quantizer; use ONNX Runtime's, or nnfmq's own for TensorFlow Lite files",
    "tools": "the tools",
    "training": "training",
    "transformers": "the optimizer of transformers",
}
"""Modules of ONNX Runtime, and what is in them."""


def unavailable_function(name: str, reason: str) -> Any:
    """Return a function that raises NotImplemented."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ort_error("NotImplemented", f"nnfmq has no {name}: {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotImplemented: {reason}."
    return refuse
