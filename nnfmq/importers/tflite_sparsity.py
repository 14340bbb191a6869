"""Sparse constants of TFLite files as dense ones.

A sparse tensor is stored as a tree: each level is a dimension, or a dimension of the blocks into which others are
divided. A DENSE level has all indexes, a SPARSE_CSR level those that it lists for each node of the level above. The
values are the leaves, in order. Source: schema.fbs of TensorFlow Lite, SparsityParameters.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers.flatbuffer_reader import TableReader

__all__ = ["densified"]

_DENSE, _SPARSE_CSR = 0, 1
_Indexes = npt.NDArray[np.int64]


def densified(sparsity: Any, data: memoryview, shape: tuple[int, ...], element_bytes: int) -> memoryview:
    """Return the bytes of the dense tensor. Its size must have been limited by the caller.

    Raises:
        InvalidArgument: If the indexes do not fit the shape, or their number the values.
    """
    order, blocks = (
        _ints(sparsity.TraversalOrderLength, sparsity.TraversalOrderAsNumpy),
        _ints(sparsity.BlockMapLength, sparsity.BlockMapAsNumpy),
    )
    sizes = _level_sizes(sparsity, order, blocks, shape)
    paths = _paths(sparsity, order, sizes, math.prod(shape))
    if len(data) != element_bytes * len(next(iter(paths.values()), ())):
        raise InvalidArgument(f"a sparse tensor has {len(data)} bytes of values, its indexes are for another number")
    positions = np.zeros(len(data) // element_bytes, np.int64)
    for axis, extent in enumerate(shape):
        along = paths[axis]
        for level, blocked in enumerate(blocks, len(shape)):
            if blocked == axis:
                along = along * sizes[level] + paths[level]
        if along.size and int(along.max()) >= extent:
            raise InvalidArgument(f"a sparse tensor has an index outside dimension {axis} of {extent}")
        positions = positions * extent + along
    dense = np.zeros((math.prod(shape), element_bytes), np.uint8)
    dense[positions] = np.frombuffer(data, np.uint8).reshape(-1, element_bytes)
    return memoryview(dense.tobytes())


def _ints(length: Any, values: Any) -> list[int]:
    return [int(value) for value in values()] if length() else []


def _level_sizes(sparsity: Any, order: list[int], blocks: list[int], shape: tuple[int, ...]) -> dict[int, int]:
    """Return the extent of each dimension and block dimension; that of a blocked dimension counts blocks."""
    levels = len(shape) + len(blocks)
    if sorted(order) != list(range(levels)) or not all(0 <= axis < len(shape) for axis in blocks):
        raise InvalidArgument(f"a sparse tensor has traversal order {order[:16]} and block map {blocks[:16]}")
    if sparsity.DimMetadataLength() != levels:
        raise InvalidArgument(f"a sparse tensor has {sparsity.DimMetadataLength()} levels, it needs {levels}")
    sizes = dict(enumerate(shape))
    for level, axis in enumerate(blocks, len(shape)):
        metadata = sparsity.DimMetadata(order.index(level))
        size = metadata.DenseSize()
        if metadata.Format() != _DENSE or size < 1 or sizes[axis] % size:
            raise InvalidArgument(f"a sparse tensor has blocks of {size} in a dimension of {sizes[axis]}")
        sizes[level], sizes[axis] = size, sizes[axis] // size
    return sizes


def _paths(sparsity: Any, order: list[int], sizes: dict[int, int], count: int) -> dict[int, _Indexes]:
    """Return, for each level, the index there of each value; never more than `count` values."""
    paths: dict[int, _Indexes] = {}
    nodes = 1
    for number, level in enumerate(order):
        metadata = sparsity.DimMetadata(number)
        if metadata.Format() == _DENSE:
            size = sizes[level]
            if size * nodes > count or metadata.DenseSize() != size:
                raise InvalidArgument(f"a sparse tensor has a level of {metadata.DenseSize()}, it must have {size}")
            repeats: Any = size
            indexes = np.tile(np.arange(size), nodes)
        elif metadata.Format() == _SPARSE_CSR:
            repeats, indexes = _compressed(metadata, nodes, sizes[level])
        else:
            raise InvalidArgument(f"a sparse tensor has a level of format {metadata.Format()}")
        paths = {other: np.repeat(along, repeats) for other, along in paths.items()}
        paths[level] = indexes
        nodes = len(indexes)
        if nodes > count:
            raise InvalidArgument(f"a sparse tensor has more than its {count} elements")
    return paths


def _compressed(metadata: Any, nodes: int, size: int) -> tuple[_Indexes, _Indexes]:
    """Return how many indexes each node has, and the indexes."""
    segments = _vector(metadata.ArraySegments())
    indexes = _vector(metadata.ArrayIndices())
    counts = np.diff(segments)
    fits = len(segments) == nodes + 1 and segments[0] == 0 and segments[-1] == len(indexes) and not (counts < 0).any()
    if not fits or (indexes.size and not 0 <= int(indexes.min()) <= int(indexes.max()) < size):
        raise InvalidArgument("a sparse tensor has segments or indexes that do not fit")
    return counts, indexes


def _vector(vector: TableReader | None) -> _Indexes:
    if vector is None or not vector.ValuesLength():
        return np.zeros(0, np.int64)
    return np.asarray(vector.ValuesAsNumpy(), np.int64)
