"""Models in LiteRT and ONNX Runtime, for the tools that compare results: one thread, arrays in, arrays out.

Both raise errors of any type for models and inputs that they refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Run: TypeAlias = Callable[[Sequence[Array]], list[Array]]
_ORT_TYPES = {"float": "float32", "double": "float64"}


class PeerModel(NamedTuple):
    """Names, shapes and dtypes of a model's inputs, and the function that executes it; unknown extents are strings."""

    inputs: Sequence[tuple[str, tuple[int | str | None, ...], str]]
    run: Run


def litert(model: Path | bytes, *, is_reference: bool) -> PeerModel:
    """Return a `.tflite` model in LiteRT, with its reference kernels or with XNNPACK."""
    from ai_edge_litert.interpreter import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        Interpreter,
        OpResolverType,
    )

    given = {"model_content": model} if isinstance(model, bytes) else {"model_path": str(model)}
    if is_reference:
        given["experimental_op_resolver_type"] = OpResolverType.BUILTIN_REF
    interpreter = Interpreter(num_threads=1, **given)
    interpreter.allocate_tensors()
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()

    def run(arrays: Sequence[Array]) -> list[Array]:
        for detail, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(detail["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in outputs]

    described = [(d["name"], tuple(map(int, d["shape"])), np.dtype(d["dtype"]).name) for d in inputs]
    return PeerModel(described, run)


def onnx_runtime(model: Path | bytes, *, is_optimized: bool) -> PeerModel:
    """Return an `.onnx` model in ONNX Runtime, with all optimizations or without any."""
    import onnxruntime  # type: ignore[import-not-found, import-untyped, unused-ignore]

    onnxruntime.set_default_logger_severity(4)
    options, levels = onnxruntime.SessionOptions(), onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if is_optimized else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    source = model if isinstance(model, bytes) else str(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    described = [(node.name, tuple(node.shape), _dtype(node.type)) for node in session.get_inputs()]
    names = [name for name, _, _ in described]
    return PeerModel(described, lambda arrays: list(session.run(None, dict(zip(names, arrays, strict=True)))))


def _dtype(kind: str) -> str:
    """Return the dtype of a type such as `tensor(float)`."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return _ORT_TYPES.get(name, name)


def difference(found: Sequence[Array], expected: Sequence[Array], floor: float = 1e-30) -> float:
    """Return the largest difference, for floats over the output's largest element; infinite if sizes or NaN differ.

    An output whose largest element is smaller than `floor` counts as if that were its largest element.
    """
    if [array.size for array in found] != [array.size for array in expected]:
        return math.inf
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        a, b = (array.astype(np.float64).reshape(-1) for array in (one, other))
        finite = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return math.inf
        largest = max(float(np.abs(b[finite]).max(initial=0.0)), floor) if other.dtype.kind == "f" else 1.0
        worst = max(worst, float(np.abs(a - b)[finite].max(initial=0.0)) / largest)
    return worst
