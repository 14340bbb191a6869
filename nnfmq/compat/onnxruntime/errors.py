"""The exceptions of ONNX Runtime, by name, base class, status code and text; and nnfmq's errors translated to them.

If the application has imported ONNX Runtime itself, perhaps because a part of it was not changed, an exception is an
instance of ONNX Runtime's class, too. nnfmq does not import ONNX Runtime for this: nobody can name its classes before.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

from nnfmq.hal.errors import (
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    NnfmqError,
    TransportError,
    UnsupportedModel,
)

__all__ = ["EXCEPTIONS", "bare_message", "load_failure", "ort_error", "translated"]

_CODES = {
    "Fail": (1, "FAIL"),
    "InvalidArgument": (2, "INVALID_ARGUMENT"),
    "NoSuchFile": (3, "NO_SUCHFILE"),
    "NoModel": (4, "NO_MODEL"),
    "EngineError": (5, "ENGINE_ERROR"),
    "RuntimeException": (6, "RUNTIME_EXCEPTION"),
    "InvalidProtobuf": (7, "INVALID_PROTOBUF"),
    "ModelLoaded": (8, "MODEL_LOADED"),
    "NotImplemented": (9, "NOT_IMPLEMENTED"),
    "InvalidGraph": (10, "INVALID_GRAPH"),
    "EPFail": (11, "EP_FAIL"),
    "ModelLoadCanceled": (12, "MODEL_LOAD_CANCELED"),
    "ModelRequiresCompilation": (13, "MODEL_REQUIRES_COMPILATION"),
    "NotFound": (14, "NOT_FOUND"),
    "DeviceReset": (15, "DEVICE_RESET"),
}
"""Each exception's status code and its name (onnxruntime/core/common/status.h)."""
_NAMES_OF_STATUSES = {status: name for name, (_, status) in _CODES.items()}
_PEER_TEXT = re.compile(r"\[ONNXRuntimeError\] : \d+ : (\w+) : (.*)", re.DOTALL)
_PEER = "onnxruntime.capi.onnxruntime_pybind11_state"

EXCEPTIONS: dict[str, type[Exception]] = {
    name: type(name, (Exception,), {"__module__": "nnfmq.compat.onnxruntime.capi.onnxruntime_pybind11_state"})
    for name in _CODES
}
"""The exception classes. As ONNX Runtime's, they are derived from Exception alone."""


def ort_error(name: str, message: str) -> Exception:
    """Return the exception `name` with ONNX Runtime's form of its text."""
    code, status = _CODES[name]
    peer = getattr(sys.modules.get(_PEER), name, None)
    return _exception(name, peer)(f"[ONNXRuntimeError] : {code} : {status} : {message}")


@cache
def _exception(name: str, peer: Any) -> type[Exception]:
    """Return the exception class that is also `peer`, ONNX Runtime's own class, if that is not None."""
    kind = EXCEPTIONS[name]
    if peer is None:
        return kind
    return type(name, (kind, peer), {"__module__": kind.__module__})


def translated(error: NnfmqError, name: str = "", path: object = None) -> Exception:
    """Return the exception that stands for an error of nnfmq: it says the same.

    If that has the text of an exception of ONNX Runtime, which the driver hosts, it is that exception. The driver knows
    a file by its `name`, the application by its path (None: it gave bytes).
    """
    found = _PEER_TEXT.search(str(error))
    if found is not None and found[1] in _NAMES_OF_STATUSES:
        text = found[2].replace(load_failure(name), load_failure(path), 1)
        return ort_error(_NAMES_OF_STATUSES[found[1]], text)
    if isinstance(error, UnsupportedModel):
        return ort_error("NotImplemented", str(error))
    if isinstance(error, InvalidArgument):
        return ort_error("InvalidArgument", str(error))
    if isinstance(error, (DeadObject, DeviceUnavailable, TransportError)):
        return ort_error("EPFail", str(error))
    return ort_error("RuntimeException", str(error))


def load_failure(path: object) -> str:
    """Return ONNX Runtime's words before the reason why it does not load a file; none for bytes, which have no path."""
    return "" if path is None else f"Load model from {path} failed:"


def bare_message(error: Exception) -> str:
    """Return the text of an exception without ONNX Runtime's status before it."""
    text = str(error)
    return text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError] : ") else text
