"""Lowering rules of operations whose indices come with the request: gathers, scatters, updates, reversed sequences.

The kernels check each index. `KernelLaunch.errors` has the error of each number of an index vector, as the interpreter
words it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nnfmq.engines.compiled.kernels.indexing import (
    IndexAxis,
    IndexComponent,
    IndexedCopy,
    IndexedUpdate,
    ReverseSequence,
    UpdateSlice,
    coalesced,
)
from nnfmq.engines.compiled.lowering import KernelLaunch, KernelSequence, LoweringRule
from nnfmq.engines.compiled.target import Target
from nnfmq.hal.extensions import TfliteOperation, extended_code, extended_operations, operation_code
from nnfmq.hal.types import OperationType
from nnfmq.operations.declaration import Shape, Tensor
from nnfmq.operations.gather import outside

__all__ = ["INDEX_ATTRIBUTES", "RULES", "IndexAttribute"]

_INDEX_BYTES = 4
_MIN_BYTES_PER_ITEM, _MAX_WORK_ITEMS = 1 << 13, 16
_COMBINED_BYTES = (4, 8)  # elements that scatters combine


def _strides(shape: Shape, element_bytes: int) -> list[int]:
    """Return the strides of a contiguous array in bytes."""
    return [element_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _errors(components: Sequence[IndexComponent]) -> tuple[str, ...]:
    return tuple(_error(component.extent) for component in components)


def _error(extent: int) -> str:
    return f"{outside(extent)} (C1)"


def _is_empty(*tensors: Tensor) -> bool:
    return any(0 in tensor.shape for tensor in tensors)


# -- gathers ----------------------------------------------------------------------------------------------------------


def _copy(axes: Sequence[IndexAxis], components: tuple[IndexComponent, ...], run_bytes: int) -> KernelLaunch:
    runs = math.prod(axis.extent for axis in axes)
    items = max(1, min(_MAX_WORK_ITEMS, run_bytes * runs // _MIN_BYTES_PER_ITEM))
    kernel = IndexedCopy(coalesced(axes), components, run_bytes, items)
    return KernelLaunch(kernel, (), runs + run_bytes * runs // 16, _errors(components))


def _batch_gather(
    input: Tensor, indices: Tensor, *, output: Tensor, target: Target, axis: int, batch_dims: int = 0
) -> KernelLaunch | None:
    """Lower BATCH_GATHER; and GATHER, which has no batch, with indices that come with the request."""
    if _is_empty(input, indices):
        return None
    axis %= len(input.shape)
    run_bytes = input.dtype.itemsize * math.prod(input.shape[axis + 1 :])
    slice_bytes = run_bytes * input.shape[axis]
    batches, outer = math.prod(input.shape[:batch_dims]), math.prod(input.shape[batch_dims:axis])
    count = math.prod(indices.shape[batch_dims:])
    axes = (
        IndexAxis(batches, outer * slice_bytes, count * _INDEX_BYTES),
        IndexAxis(outer, slice_bytes, 0),
        IndexAxis(count, 0, _INDEX_BYTES),
    )
    return _copy(axes, (IndexComponent(input.shape[axis], run_bytes),), run_bytes)


def _embedding_lookup(lookups: Tensor, values: Tensor, *, output: Tensor, target: Target) -> KernelSequence | None:
    """Lower EMBEDDING_LOOKUP with lookups that come with the request; they are its first argument."""
    launch = _batch_gather(values, lookups, output=output, target=target, axis=0)
    return None if launch is None else KernelSequence((), launch, (1, 0))


def _gather_nd(input: Tensor, indices: Tensor, *, output: Tensor, target: Target) -> KernelLaunch | None:
    """Lower GATHER_ND."""
    if _is_empty(input, indices):
        return None
    components, run_bytes = _vectors(input.shape, indices.shape[-1], input.dtype.itemsize)
    axes = (IndexAxis(math.prod(indices.shape[:-1]), 0, _INDEX_BYTES * len(components)),)
    return _copy(axes, components, run_bytes)


def _vectors(shape: Shape, width: int, element_bytes: int) -> tuple[tuple[IndexComponent, ...], int]:
    """Return the numbers of index vectors of `width` numbers, and the size of the slice that one selects."""
    strides = _strides(shape, element_bytes)
    return tuple(map(IndexComponent, shape[:width], strides)), strides[width - 1]


def _gather_elements(
    input: Tensor, indices: Tensor, *, output: Tensor, target: Target, axis: int
) -> KernelLaunch | None:
    """Lower GATHER_ELEMENTS."""
    if _is_empty(input, indices):
        return None
    return _copy(*_elements(input.shape, indices.shape, axis, input.dtype.itemsize), input.dtype.itemsize)


def _elements(
    shape: Shape, indices: Shape, axis: int, element_bytes: int
) -> tuple[list[IndexAxis], tuple[IndexComponent, ...]]:
    """Return the loops around elements that have the positions of their indices, but along `axis` the index."""
    axis %= len(shape)
    strides, index_strides = _strides(shape, element_bytes), _strides(indices, _INDEX_BYTES)
    component = IndexComponent(shape[axis], strides[axis])
    strides[axis] = 0
    return list(map(IndexAxis, indices, strides, index_strides)), (component,)


# -- scatters ---------------------------------------------------------------------------------------------------------


def _update(
    array: Tensor,
    axes: Sequence[IndexAxis],
    components: tuple[IndexComponent, ...],
    run_bytes: int,
    reduction: int,
    has_array: bool = True,
) -> KernelLaunch | None:
    """Return the launch; None if it would combine elements that the kernel does not."""
    if reduction and array.dtype.itemsize not in _COMBINED_BYTES:
        return None
    size = array.dtype.itemsize * math.prod(array.shape)
    kind = f"{array.dtype.kind}{array.dtype.itemsize}"
    kernel = IndexedUpdate(coalesced(axes), components, run_bytes, size, kind, reduction, has_array)
    runs = math.prod(axis.extent for axis in axes)
    return KernelLaunch(kernel, (), size // 16 + runs + runs * run_bytes // 8, _errors(components))


def _scatter_nd(indices: Tensor, updates: Tensor, *, output: Tensor, target: Target, shape: Any) -> KernelLaunch | None:
    """Lower SCATTER_ND, which adds."""
    return None if _is_empty(indices, updates) else _update(output, *_slices(output, indices), 1, has_array=False)


def _scatter_nd_update(
    input: Tensor, indices: Tensor, updates: Tensor, *, output: Tensor, target: Target, reduction: int
) -> KernelLaunch | None:
    """Lower SCATTER_ND_UPDATE."""
    return None if _is_empty(input, indices, updates) else _update(output, *_slices(output, indices), reduction)


def _slices(array: Tensor, indices: Tensor) -> tuple[tuple[IndexAxis, ...], tuple[IndexComponent, ...], int]:
    components, run_bytes = _vectors(array.shape, indices.shape[-1], array.dtype.itemsize)
    axes = (IndexAxis(math.prod(indices.shape[:-1]), 0, _INDEX_BYTES * len(components)),)
    return axes, components, run_bytes


def _scatter_elements(
    input: Tensor, indices: Tensor, updates: Tensor, *, output: Tensor, target: Target, axis: int, reduction: int
) -> KernelLaunch | None:
    """Lower SCATTER_ELEMENTS."""
    if _is_empty(input, indices):
        return None
    size = input.dtype.itemsize
    return _update(output, *_elements(input.shape, indices.shape, axis, size), size, reduction)


# -- updates and reversed sequences -----------------------------------------------------------------------------------


def _update_slice(
    input: Tensor, update: Tensor, start: Tensor, *, output: Tensor, target: Target
) -> KernelLaunch | None:
    """Lower DYNAMIC_UPDATE_SLICE."""
    if _is_empty(input, update):
        return None
    size = input.dtype.itemsize
    strides, own_strides = _strides(input.shape, size), _strides(update.shape, size)
    starts = tuple(
        IndexComponent(total - part + 1, stride)
        for total, part, stride in zip(input.shape, update.shape, strides, strict=True)
    )
    *axes, run = [*coalesced(list(map(IndexAxis, update.shape, strides, own_strides)))]
    if run.array_stride != size:  # elements apart, or only one
        axes, run = [*axes, run], IndexAxis(1, size, size)
    total_bytes = size * math.prod(input.shape)
    return KernelLaunch(UpdateSlice(tuple(axes), starts, run.extent * size, total_bytes), (), total_bytes // 16)


def _reverse_sequence(
    input: Tensor, lengths: Tensor, *, output: Tensor, target: Target, sequence_axis: int, batch_axis: int
) -> KernelLaunch | None:
    """Lower REVERSE_SEQUENCE."""
    shape = input.shape
    if _is_empty(input):
        return None
    sequence, batch = sequence_axis % len(shape), batch_axis % len(shape)
    first, second = sorted((sequence, batch))
    run_bytes = input.dtype.itemsize * math.prod(shape[second + 1 :])
    parts = math.prod(shape[:first]), shape[first], math.prod(shape[first + 1 : second]), shape[second]
    kernel = ReverseSequence(parts, 1 if sequence == first else 3, run_bytes)
    return KernelLaunch(kernel, (), math.prod(parts) * (1 + run_bytes // 16), (_error(shape[sequence] + 1),))


RULES: Mapping[OperationType, LoweringRule] = {
    operation_code(TfliteOperation.BATCH_GATHER): _batch_gather,
    operation_code(TfliteOperation.GATHER_ND): _gather_nd,
    operation_code(TfliteOperation.GATHER_ELEMENTS): _gather_elements,
    operation_code(TfliteOperation.SCATTER_ND): _scatter_nd,
    operation_code(TfliteOperation.SCATTER_ELEMENTS): _scatter_elements,
    operation_code(TfliteOperation.SCATTER_ND_UPDATE): _scatter_nd_update,
    operation_code(TfliteOperation.DYNAMIC_UPDATE_SLICE): _update_slice,
    operation_code(TfliteOperation.REVERSE_SEQUENCE): _reverse_sequence,
}
"""Rules of operations whose indices are always data."""


class IndexAttribute(NamedTuple):
    """An attribute that has indices, and the rule of an operation in which they come with the request, as data."""

    name: str
    rule: LoweringRule


_GATHER = IndexAttribute("indices", _batch_gather)
INDEX_ATTRIBUTES: Mapping[OperationType, IndexAttribute] = {
    OperationType.GATHER: _GATHER,
    **{extended_code(*key): _GATHER for key in extended_operations() if key[0] == OperationType.GATHER},
    OperationType.EMBEDDING_LOOKUP: IndexAttribute("lookups", _embedding_lookup),
}
"""The operations whose indices are an attribute, which may come with the request."""
