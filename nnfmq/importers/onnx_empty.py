"""Nodes with tensors that have no elements: their results are known when the file is loaded.

The HAL has no such tensors. A value without elements is a constant, whatever computes it: its shape says everything.
Which results have none follows from the shapes of a node's inputs, by the inference of the package `onnx`. Others are
the identity of a reduction or of a sum of products.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx_file import dtype_of
from nnfmq.importers.onnx_folding import FOLDED, MAX_ELEMENTS, evaluated
from nnfmq.importers.onnx_values import Node

__all__ = ["empty_results", "results_of_nothing"]

Array: TypeAlias = npt.NDArray[Any]
_COMPUTED = frozenset(
    ("Einsum", "Gemm", "MatMul", "MatMulInteger", "Pad", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
     "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")
)  # fmt: skip
"""Operators besides those that are folded that compute elements from none."""
_KEEPING = ("DepthToSpace", "Reshape", "STFT", "SpaceToDepth")
"""Operators whose result has elements if the input has: inference does not reject others."""
_MAX_VALUES = 1 << 12  # of a constant that may decide a shape


def results_of_nothing(node: Node, proto: Any) -> list[Array] | None:
    """Return the outputs of a node with an input that has no elements; None if they depend on the other inputs.

    Raises:
        InvalidArgument: If the operator does not accept the inputs.
    """
    given = [value for value in node.inputs if value is not None]
    if all(value.size for value in given):
        return None
    shapes = _inferred_shapes(node, proto)
    if shapes is not None and all(0 in shape for shape, _ in shapes):
        return [np.zeros(shape, dtype) for shape, dtype in shapes]
    arrays = [value.array for value in given if value.array is not None]
    if node.operator not in _COMPUTED | FOLDED or len(arrays) != len(given):
        return None
    if node.operator in _COMPUTED and (shapes is None or math.prod(shapes[0][0]) > MAX_ELEMENTS):
        raise InvalidArgument("the shape of its result is unknown, or too large for a constant")
    if node.operator != "ReduceMean":
        return evaluated(node, proto, arrays)
    assert shapes is not None
    if shapes[0][1].kind != "f":
        raise InvalidArgument("the mean of no integers is not defined")
    return [np.full(shapes[0][0], np.nan, shapes[0][1])]


def empty_results(node: Node, proto: Any) -> list[Array] | None:
    """Return the outputs of a node if none of them has elements; None if one has some, or a shape is not known."""
    if node.operator in _KEEPING and node.value(0).size:
        return None
    shapes = _inferred_shapes(node, proto)
    if shapes is None or not all(0 in shape for shape, _ in shapes):
        return None
    return [np.zeros(shape, dtype) for shape, dtype in shapes]


def _inferred_shapes(node: Node, proto: Any) -> list[tuple[tuple[int, ...], np.dtype[Any]]] | None:
    """Return shape and type of each output that has a name; None if one is not known."""
    import onnx

    inputs, constants = [], []
    for name, value in dict(zip(proto.input, node.inputs, strict=True)).items():
        if value is None:
            continue
        if value.array is not None and value.size <= _MAX_VALUES:
            constants.append(onnx.numpy_helper.from_array(np.ascontiguousarray(value.array).reshape(value.shape), name))
        else:
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            inputs.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "one node", inputs, outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(proto.domain, node.opset)])
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        return [_known(info.type.tensor_type) for info in inferred.graph.output]
    except (onnx.shape_inference.InferenceError, InvalidArgument, ValueError, RuntimeError):
        return None


def _known(kind: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return an inferred shape and type. Raises InvalidArgument if it is not fully known."""
    if not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        raise InvalidArgument("a shape is not known")
    return tuple(dim.dim_value for dim in kind.shape.dim), dtype_of(kind.elem_type)
