"""How results reach the buffers of a request: copied in place where they fit exactly, else after all were measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from nnfmq.engines.execution import DynamicOutput, ExecutionFrame, OutputWriter
from nnfmq.hal.errors import InvalidArgument, OutputInsufficientSize
from nnfmq.hal.types import OutputShape
from nnfmq.operations.signature import Array, Shape

__all__ = ["is_array_of", "store", "storing_in_place"]

_SIZED = (np.ndarray, memoryview)  # a tuple: `np.ndarray | memoryview` would be built anew at each call


def storing_in_place(indexes: Sequence[int], outputs: Sequence[Any], shapes: tuple[OutputShape, ...]) -> OutputWriter:
    """Return what copies each result into its array, of the same shape and type, and gives the shapes."""
    if len(outputs) == 1:
        index, out = indexes[0], outputs[0]

        def store_one(scope: ExecutionFrame) -> tuple[OutputShape, ...]:
            out[...] = scope[index]
            return shapes

        return store_one
    pairs = tuple(zip(indexes, outputs, strict=True))

    def store(scope: ExecutionFrame) -> tuple[OutputShape, ...]:
        for index, out in pairs:
            out[...] = scope[index]
        return shapes

    return store


def is_array_of(out: Any, dtype: np.dtype[Any], shape: OutputShape) -> bool:
    """Return True where a result of this type and shape can be copied into `out` as it is."""
    return type(out) is np.ndarray and out.dtype == dtype and out.shape == shape.dimensions


def store(results: Sequence[Array], outputs: Sequence[Any]) -> tuple[OutputShape, ...]:
    """Copy each result into its buffer, after all of them were found large enough."""
    if len(results) != len(outputs):
        raise InvalidArgument(f"{len(outputs)} outputs given, the model has {len(results)}")
    pairs = list(zip(results, outputs, strict=True))
    shapes = tuple(_output_shape(result.shape, out is None or _suffices(out, result.nbytes)) for result, out in pairs)
    if not all(shape.is_sufficient for shape in shapes):
        short = [position for position, shape in enumerate(shapes) if not shape.is_sufficient]
        raise OutputInsufficientSize(f"the buffers of outputs {short} are too small", shapes)
    # All places before the first copy: a Growing output may refuse.
    places = [None if out is None else _destination(out, result) for result, out in pairs]
    for result, place in zip(results, places, strict=True):
        if place is not None and result.size:
            np.copyto(place, result)
    return shapes


@lru_cache(maxsize=1024)
def _output_shape(dimensions: Shape, is_sufficient: bool) -> OutputShape:
    """Return an OutputShape; they are frozen, and the same few come back with every execution."""
    return OutputShape(dimensions, is_sufficient)


def _suffices(out: Any, byte_count: int) -> bool:
    if isinstance(out, DynamicOutput):
        return True
    return (out.nbytes if isinstance(out, _SIZED) else memoryview(out).nbytes) >= byte_count


def _destination(out: Any, result: Array) -> Array:
    """Return `out` as an array like `result`; arrays of that shape and dtype are taken as they are."""
    if isinstance(out, DynamicOutput):
        return out.allocate(result.shape)
    if isinstance(out, np.ndarray) and out.dtype == result.dtype and out.shape == result.shape:
        return out
    return np.frombuffer(memoryview(out).cast("B"), result.dtype, result.size).reshape(result.shape)
