"""Layouts: operations between NCHW images that are computed in NHWC, without conversions around them.

Kernels of images only know NHWC. A model in NCHW has other operations between its convolutions (ADD, CONCATENATION),
which are the same function of permuted arrays, with permuted axes among their attributes. `_PERMUTED_ATTRIBUTES` lists
them. Such an operation reads and writes NHWC copies if all of its inputs are available as such, or have the same
elements in the same order in both layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace

from nnfmq.engines.compiled.lowering import LoweredOp, ViewOp, elementwise
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Shape, Tensor
from nnfmq.operations.preparation import TO_NHWC, permute_shape

__all__ = ["changes_order", "keep_nhwc"]


def keep_nhwc(ops: Iterable[LoweredOp]) -> list[LoweredOp]:
    """Return the operations of a partition in order, those in NHWC that need no conversion for it."""
    available: set[int] = set()  # operands with an NHWC copy
    result = []
    for op in ops:
        if not op.outputs_nchw and not any(op.inputs_nchw):
            op = _in_nhwc(op, available) or op
        available.update(index for index, nchw in zip(op.inputs, op.inputs_nchw, strict=True) if nchw)
        available.update(op.outputs if op.outputs_nchw else ())
        result.append(op)
    return result


def _in_nhwc(op: LoweredOp, available: AbstractSet[int]) -> LoweredOp | None:
    """Return the operation on NHWC copies, or None if it is not in the table or an input would have to be converted."""
    permute = _PERMUTED_ATTRIBUTES.get(op.call.code)
    inputs_nchw = tuple(index in available for index in op.inputs)
    if permute is None or not any(inputs_nchw) or len(op.inputs) != len(op.call.tensors):
        return None
    pairs = zip(op.call.tensors, inputs_nchw, strict=True)
    tensors = [_permuted(tensor, has_copy) for tensor, has_copy in pairs if tensor is not None]
    attributes = permute(op.call.attributes)
    if attributes is None or None in tensors:
        return None
    outputs_nchw = len(op.call.output.shape) == len(TO_NHWC) and op.call.code != OperationType.TRANSPOSE
    outputs = op.call.outputs
    if outputs_nchw:
        outputs = tuple(replace(output, shape=permute_shape(output.shape, TO_NHWC)) for output in outputs)
    call = replace(op.call, tensors=tuple(tensors), outputs=outputs, attributes=attributes)
    lowered = call.lower()
    if lowered is None or isinstance(lowered, ViewOp):
        return None
    return replace(op, call=call, lowered=lowered, inputs_nchw=inputs_nchw, outputs_nchw=outputs_nchw)


def _permuted(tensor: Tensor, has_copy: bool) -> Tensor | None:
    """Return the NHWC tensor, or None if there is no copy and the order of the elements is another one."""
    if len(tensor.shape) > len(TO_NHWC):
        return None
    shape: Shape = (1,) * (len(TO_NHWC) - len(tensor.shape)) + tensor.shape
    if not has_copy and changes_order(shape, TO_NHWC):
        return None
    return replace(tensor, shape=permute_shape(shape, TO_NHWC))


def changes_order(shape: Shape, permutation: Sequence[int]) -> bool:
    """Return whether a permutation of the axes changes the order of the elements; axes of one element do not count."""
    axes = [axis for axis in permutation if shape[axis] > 1]
    return axes != sorted(axes)


# -- attributes --------------------------------------------------------------------------------------------------------

_Attributes: TypeAlias = Mapping[str, Any]
_Permute: TypeAlias = Callable[[_Attributes], "_Attributes | None"]


def _nhwc_axis(axis: int) -> int:
    """Return the NHWC axis that is the NCHW axis `axis`."""
    return TO_NHWC.index(axis % len(TO_NHWC))


def _same(attributes: _Attributes) -> _Attributes:
    return attributes


def _permuted_axis(attributes: _Attributes) -> _Attributes | None:
    """Return the attributes of an operation along an axis; None if the axis is the last one by default."""
    return {**attributes, "axis": _nhwc_axis(attributes["axis"])} if "axis" in attributes else None


def _permuted_gather(attributes: _Attributes) -> _Attributes | None:
    """Return a gather's attributes; None if its indices come with the request, or are more than a row."""
    indices = attributes.get("indices")
    return _permuted_axis(attributes) if indices is not None and indices.ndim == 1 else None


def _permuted_rows(*names: str) -> _Permute:
    """Return the permutation of attributes that have an entry for each axis."""
    return lambda attributes: {**attributes, **{name: attributes[name][list(TO_NHWC)] for name in names}}


def _permuted_reduction(attributes: _Attributes) -> _Attributes | None:
    """Return a reduction's attributes; None if its result has less axes and is another one in NHWC."""
    reduced = {axis % len(TO_NHWC) for axis in attributes["axes"].tolist()}
    kept = [axis for axis in TO_NHWC if axis not in reduced]
    if not attributes["keep_dimensions"] and kept != sorted(kept):
        return None
    return {**attributes, "axes": np.array(sorted(map(_nhwc_axis, reduced)), np.int32)}


def _permuted_transpose(attributes: _Attributes) -> _Attributes:
    """Return a permutation of NHWC axes to the output's, which stay as in the model."""
    permutation = attributes.get("permutation")
    axes = range(len(TO_NHWC))[::-1] if permutation is None else permutation.tolist()
    return {**attributes, "permutation": np.array([_nhwc_axis(axis) for axis in axes], np.int32)}


_REDUCTIONS = (OperationType.MEAN, OperationType.REDUCE_MAX, OperationType.REDUCE_MIN, OperationType.REDUCE_SUM)
_PERMUTED_ATTRIBUTES: Mapping[OperationType | None, _Permute] = {
    **dict.fromkeys(elementwise.RULES, _same),
    **dict.fromkeys(_REDUCTIONS, _permuted_reduction),
    OperationType.CONCATENATION: _permuted_axis,
    OperationType.SPLIT: _permuted_axis,
    OperationType.GATHER: _permuted_gather,
    OperationType.LOG_SOFTMAX: _permuted_axis,
    OperationType.SOFTMAX: _permuted_axis,
    OperationType.TRANSPOSE: _permuted_transpose,
    OperationType.MIRROR_PAD: _permuted_rows("paddings"),
    OperationType.PAD: _permuted_rows("paddings"),
    OperationType.PAD_V2: _permuted_rows("paddings"),
    OperationType.SLICE: _permuted_rows("begin", "size"),
    OperationType.TILE: _permuted_rows("multiples"),
}
