"""ValueLocation: the memory of one value of a plan, and its dimensions, which an execution may learn from a driver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nnfmq.file_memory import FileMemory
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, Pool, Request, RequestArgument
from nnfmq.runtime.tensor_layout import Array, callers_shape, has_unknown_shape, size_bytes

__all__ = ["Shape", "ValueLocation", "array_at", "copy_content", "read_condition", "step_request"]

Shape = tuple[int, ...]


@dataclass(slots=True)
class ValueLocation:
    """The memory of a value: `length_bytes` of `pool` from `offset` on; no pool if the argument was omitted.

    `dimensions` are those of the content: 0 = unknown, () = a scalar or unknown rank. `is_growable` says that the
    runtime may replace the memory by a larger one. `padding` is that of the application's own request.
    """

    element_bytes: int
    is_scalar: bool
    dimensions: Shape
    pool: Pool | None = None
    offset: int = 0
    length_bytes: int = 0
    is_growable: bool = False
    padding: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the dimensions specify the size of the content."""
        return 0 not in self.dimensions and (bool(self.dimensions) or self.is_scalar)

    @property
    def content_bytes(self) -> int:
        """The size of the content; 0 if it is not known."""
        return self.size_of(self.dimensions) if self.is_known else 0

    def size_of(self, dimensions: Shape) -> int:
        """Return the size of a value of this type with other dimensions, in bytes."""
        return math.prod(dimensions) * self.element_bytes


def step_request(
    locations: Sequence[ValueLocation],
    inputs: Sequence[int],
    outputs: Sequence[int],
    infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
) -> Request:
    """Return the request of a step whose values `inputs` and `outputs` are in `locations`.

    `infos` describes the inputs and the outputs of the step's model. Dimensions that the model leaves unknown are part
    of the request, except those of an output that can grow: its driver reports them.
    """
    pools: list[Pool] = []
    read = [_argument(locations[i], info, pools, is_output=False) for i, info in zip(inputs, infos[0], strict=True)]
    written = [_argument(locations[i], info, pools, is_output=True) for i, info in zip(outputs, infos[1], strict=True)]
    return Request(tuple(read), tuple(written), tuple(pools))


def _argument(location: ValueLocation, info: TensorInfo, pools: list[Pool], *, is_output: bool) -> RequestArgument:
    if location.pool is None:
        return RequestArgument(has_no_value=True)
    index = next((i for i, pool in enumerate(pools) if pool is location.pool), len(pools))
    if index == len(pools):  # a memory listed twice would hide overlapping arguments
        pools.append(location.pool)
    dimensions, length = location.dimensions, location.length_bytes
    if location.is_growable and is_output:
        dimensions = ()
    elif location.is_growable:
        length = max(location.content_bytes, 1)  # the content may be smaller than its memory
    if not has_unknown_shape(info):
        dimensions = ()
    return RequestArgument(
        location=DataLocation(index, location.offset, length, location.padding), dimensions=dimensions
    )


def array_at(location: ValueLocation, info: TensorInfo) -> Array:
    """Return an array over the content of a value. Raises GeneralFailure if it was omitted."""
    if location.pool is None:
        raise GeneralFailure("a value of the plan was omitted")
    shape = callers_shape(info, location.dimensions)
    content = location.pool.view[location.offset : location.offset + size_bytes(info, shape)]
    return np.frombuffer(content, info.dtype).reshape(shape)


def read_condition(location: ValueLocation) -> bool:
    """Return the condition of an IF or a WHILE. It is read once: another process may be able to write to it.

    Raises:
        GeneralFailure: If it was omitted.
    """
    if location.pool is None:
        raise GeneralFailure("the condition of an IF or a WHILE was omitted")
    return bool(location.pool.view[location.offset])


def copy_content(source: ValueLocation, target: ValueLocation) -> None:
    """Copy a value, with its dimensions, to memory that is large enough.

    Raises:
        GeneralFailure: If either was omitted, or the target is too small.
    """
    if source.pool is None or target.pool is None:
        raise GeneralFailure("a value of a WHILE was omitted; a loop that the runtime executes needs all of them")
    size = source.content_bytes
    if size > target.length_bytes:
        raise GeneralFailure(f"a value of a WHILE has {size} bytes, its location {target.length_bytes}")
    content = source.pool.view[source.offset : source.offset + size]
    if isinstance(target.pool, FileMemory):
        target.pool.range(target.offset, size).write_from(content)
    else:
        target.pool.view[target.offset : target.offset + size] = content
    target.dimensions = source.dimensions
