"""Evaluation of nodes whose inputs are constants, so that the arithmetic on shapes leaves only constants.

The reference evaluator of the package `onnx` computes them, to the values that the node's operations would have. The
size of a result is limited before it exists.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.onnx.file import integer_limits
from nnfmq.importers.onnx.operators import CONVERTERS
from nnfmq.importers.onnx.operators.indexing import slice_ranges
from nnfmq.importers.onnx.values import Node

__all__ = ["FOLDED", "MAX_ELEMENTS", "evaluated", "fold"]

Array: TypeAlias = npt.NDArray[Any]
MAX_ELEMENTS = 1 << 24
_BOUNDS = 2  # of Clip
FOLDED = frozenset(
    ("Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape",
     "CumSum", "Div", "Equal", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater",
     "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "MelWeightMatrix", "Min", "Mod", "Mul", "Neg",
     "NonZero", "Not", "OneHot", "Or", "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum",
     "Reshape", "ScatterElements", "ScatterND", "Sign", "Size", "Slice", "Split", "Sqrt", "Squeeze", "Sub",
     "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where", "Xor")
)  # fmt: skip

_BROADCASTING = frozenset(
    ("Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Or",
     "Pow", "Sub", "Where", "Xor")
)  # fmt: skip


_SCALARS = {"CumSum": 1, "OneHot": 1}
"""Inputs that may be a vector of one number, which the evaluator rejects."""
_ROUNDED = frozenset(("Add", "CumSum", "Div", "Mod", "Mul", "Pow", "ReduceProd", "ReduceSum", "Sqrt", "Sub"))
"""Arithmetic that engines compute in float32 for float16, and round once; all others have exact results."""


class _Rejected(InvalidArgument):
    """The evaluator does not compute a node."""


def fold(node: Node, proto: Any) -> list[Array] | None:
    """Return the outputs of a node whose inputs are all constants; None if the node is to be converted.

    Raises:
        InvalidArgument: If the evaluator rejects a node that cannot be converted, or its result would be too large.
    """
    arrays = [None if value is None else value.array for value in node.inputs]
    is_constant = all(array is not None for array, value in zip(arrays, node.inputs, strict=True) if value is not None)
    if node.operator not in FOLDED or not is_constant or not any(value is not None for value in node.inputs):
        return None
    given = [array for array in arrays if array is not None]
    if _exceeds_integers(node, given) or _has_integer_powers(node, given) or _has_default_bounds(node, given):
        return None
    try:
        return evaluated(node, proto, given)
    except _Rejected:
        if node.operator in CONVERTERS:  # which also says what is wrong, if it is the node
            return None
        raise


def _has_integer_powers(node: Node, arrays: list[Array]) -> bool:
    """Return whether a node raises integers to negative powers, or to those of another type: engines define these."""
    if node.operator != "Pow" or any(array.dtype.kind == "f" for array in arrays):
        return False
    return arrays[0].dtype != arrays[1].dtype or bool((arrays[1] < 0).any())


def _exceeds_integers(node: Node, arrays: list[Array]) -> bool:
    """Return whether a node converts NaN, or a float to integers that do not have it: engines define the result."""
    if node.operator not in ("Cast", "CastLike") or arrays[0].dtype.kind != "f":
        return False
    from nnfmq.importers.onnx.file import dtype_of

    dtype = dtype_of(node.attributes.get("to", 0)) if node.operator == "Cast" else node.value(1).dtype
    limits = integer_limits(dtype)
    if limits is None:
        return False
    with np.errstate(invalid="ignore"):
        whole = np.trunc(arrays[0].astype(np.float64))
    return not bool(((whole >= limits[0]) & (whole <= limits[1])).all())


def _has_default_bounds(node: Node, arrays: list[Array]) -> bool:
    """Return whether a node clips floats at a bound that it omits, which the evaluator does not."""
    return node.operator == "Clip" and arrays[0].dtype.kind == "f" and len(arrays) < 1 + _BOUNDS


def evaluated(node: Node, proto: Any, arrays: list[Array]) -> list[Array]:
    """Return the outputs of a node whose given inputs are `arrays`. Raises as `fold`."""
    if _elements(node) > MAX_ELEMENTS:
        raise InvalidArgument(f"its constant result would have {_elements(node)} elements")
    if node.operator == "Unique" and (not node.attribute("sorted", 1) or any(np.isnan(arrays[0].ravel()))):
        raise InvalidArgument("it is supported for sorted elements without NaN")
    if _SCALARS.get(node.operator, len(arrays)) < len(arrays):
        at = _SCALARS[node.operator]
        arrays = [array.reshape(()) if i == at and array.size == 1 else array for i, array in enumerate(arrays)]
    if node.operator == "Slice":  # the evaluator's is NumPy's, which clamps starts differently
        return [arrays[0][np.ix_(*slice_ranges(node))]]
    if node.operator not in _ROUNDED or not any(array.dtype == np.float16 for array in arrays):
        return _evaluate(proto, node.opset, arrays)
    wide = [array.astype(np.float32) if array.dtype == np.float16 else array for array in arrays]
    with np.errstate(all="ignore"):
        return [found.astype(arrays[0].dtype) for found in _evaluate(proto, node.opset, wide)]


def _elements(node: Node) -> int:
    """Return how many elements the result has at most."""
    sizes = [value.size for value in node.inputs if value is not None]
    if node.operator == "ConstantOfShape":
        return math.prod(int(extent) for extent in node.constant(0, "shape").reshape(-1))
    if node.operator == "Concat":
        return sum(sizes)
    if node.operator == "OneHot":
        return sizes[0] * max(int(node.constant(1, "depth").reshape(-1)[0]), 1)
    if node.operator in ("Expand", "Tile"):
        return sizes[0] * math.prod(max(int(extent), 1) for extent in node.constant(1, "shape").reshape(-1))
    if node.operator == "Range":
        start, limit, delta = (node.constant(position, "range").item() for position in range(3))
        return math.ceil(abs((limit - start) / delta)) if delta else MAX_ELEMENTS + 1
    if node.operator in ("Gather", "GatherND"):
        return sizes[0] * sizes[1]
    if node.operator in _BROADCASTING:
        return _broadcast_elements([value.shape for value in node.inputs if value is not None])
    if node.operator == "MelWeightMatrix":
        bands, length = (int(node.constant(position, "size").reshape(-1)[0]) for position in range(2))
        return max(bands, 0) * (max(length, 0) // 2 + 1)
    if node.operator == "NonZero":
        return sizes[0] * len(node.value(0).shape)
    return max(sizes)


def _broadcast_elements(shapes: list[tuple[int, ...]]) -> int:
    try:
        return math.prod(np.broadcast_shapes(*shapes))
    except ValueError:
        return 0  # the evaluator rejects them


def _evaluate(proto: Any, opset: int, arrays: list[Array]) -> list[Array]:
    import onnx
    from onnx.reference import ReferenceEvaluator

    names = [name for name in proto.input if name]
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in dict(zip(names, arrays, strict=True)).items()
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "folded", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))
    except Exception as error:  # noqa: BLE001 - the evaluator raises errors of any type for what it rejects
        raise _Rejected(f"its constant inputs are rejected: {error}") from None
    return [np.asarray(result) for result in results]
