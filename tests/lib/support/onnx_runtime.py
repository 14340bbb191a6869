"""One operator of ONNX, computed by ONNX Runtime on the CPU, unoptimized and in one thread.

ONNX and ONNX Runtime are optional dependencies: without them the tests that import this module are skipped. The
versions of format and operators are fixed, so that a newer ONNX writes what an older runtime reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support.oracles import Array

onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed")
runtime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

_FORMAT, _OPERATORS = 10, 21
_ERRORS_ONLY = 3


def by_onnx(name: str, inputs: Sequence[Array | None], count: int = 1, **attributes: Any) -> list[Array]:
    """Return the operator's `count` outputs; None is an omitted input."""
    names = ["" if array is None else f"i{place}" for place, array in enumerate(inputs)]
    outputs = [f"o{place}" for place in range(count)]
    node = onnx.helper.make_node(name, names, outputs, **attributes)
    given = {named: array for named, array in zip(names, inputs, strict=True) if array is not None}
    graph = onnx.helper.make_graph(
        [node],
        "one operator",
        [_described(named, array) for named, array in given.items()],
        [onnx.helper.make_empty_tensor_value_info(output) for output in outputs],
    )
    opset = onnx.helper.make_opsetid("", _OPERATORS)
    model = onnx.helper.make_model(graph, ir_version=_FORMAT, opset_imports=[opset])
    session = runtime.InferenceSession(model.SerializeToString(), _options(), providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(outputs, given)]


def _described(name: str, array: Array) -> Any:
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.helper.make_tensor_value_info(name, kind, array.shape)


def _options() -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _ERRORS_ONLY
    return options


def channels_first(array: Array) -> Array:
    """Return NHWC as NCHW."""
    return np.ascontiguousarray(np.moveaxis(array, -1, 1))


def channels_last(array: Array) -> Array:
    """Return NCHW as NHWC."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))
