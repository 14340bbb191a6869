"""ExecutionMemory: the runtime's memory for one execution in progress of a plan.

Temporaries of known size are in one shared memory. Each of the others has a memory of its own, which grows when a
driver reports that it is too small. Constants are in one sealed memory, which all executions of the model share. The
model's inputs and outputs are in the application's memory, or in that of an execution object.

A driver that executes a step can write to the temporaries of other steps. That can change results, as a driver can
anyway; addresses and control flow do not depend on them, except the conditions of IF and WHILE, of which one byte is
read once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import (
    BufferToken,
    LifeTime,
    Model,
    Operand,
    Pool,
    Request,
    RequestArgument,
    element_bytes,
    is_scalar,
)
from nnfmq.memory import Memory
from nnfmq.runtime.plan_execution.bound_plan import BoundPlan, ValueSource
from nnfmq.runtime.plan_execution.places import Place, copy_content
from nnfmq.runtime.tensor_layout import ALIGNMENT, Array
from nnfmq.uncopyable import Uncopyable

_GRANULE_BYTES = 4096
__all__ = ["ExecutionMemory", "constant_places", "value_places"]


def value_places(plan: BoundPlan, infos: Sequence[tuple[Sequence[TensorInfo], Sequence[TensorInfo]]]) -> list[Place]:
    """Return a place without memory for each value of `plan`.

    `infos` has the inputs and outputs of the model of each step: the types of extensions are known from there.
    """
    places = [
        Place(element_bytes(value.operand.type), is_scalar(value.operand.type), value.operand.dimensions)
        for value in plan.values
    ]
    for call, (inputs, outputs) in zip(plan.calls, infos, strict=True):
        for number, info in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True):
            places[number].element_bytes = np.dtype(info.dtype).itemsize
            places[number].is_scalar = info.is_scalar
    return places


def constant_places(
    plan: BoundPlan, model: Model, templates: Sequence[Place]
) -> tuple[Memory | None, dict[int, Place]]:
    """Return a memory with the constants among the values, None if there are none, and their places by number.

    The caller closes the memory.
    """
    content, places = bytearray(), {}
    for number, value in enumerate(plan.values):
        if value.source is ValueSource.CONSTANT:
            content += bytes(-len(content) % ALIGNMENT)
            data = _constant_bytes(model, value.operand)
            places[number] = replace(templates[number], offset=len(content), length_bytes=len(data))
            content += data
    if not places:
        return None, {}
    data = bytes(content)
    memory = Memory.create_constant(len(data), lambda fd: os.pwrite(fd, data, 0), "nnfmq-constants")
    return memory, {number: replace(place, pool=memory) for number, place in places.items()}


def _constant_bytes(model: Model, operand: Operand) -> bytes:
    place = operand.location
    begin, end = place.offset, place.offset + place.length
    if operand.lifetime is LifeTime.CONSTANT_COPY:
        return model.operand_values[begin:end]
    return bytes(model.pools[place.pool_index].view[begin:end])


class ExecutionMemory(Uncopyable):
    """The places of all values of a plan for one execution at a time. Close it.

    `places` has one for each value. Those of the model's inputs and outputs have no memory until `bind` or an
    `ArrayArguments` gives them some.
    """

    def __init__(self, plan: BoundPlan, templates: Sequence[Place], constants: dict[int, Place]) -> None:
        self.plan = plan
        self.places = [constants.get(number) or replace(template) for number, template in enumerate(templates)]
        self._declared = [template.dimensions for template in templates]
        self._initial = list(self._declared)  # with what requests add to it
        self._temporaries = [n for n, value in enumerate(plan.values) if value.source is ValueSource.TEMPORARY]
        self._arena: Memory | None = None
        self._grown: dict[int, Memory] = {}
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        end = 0
        for number in self._temporaries:
            place = self.places[number]
            if place.is_known:
                place.offset = -(-end // ALIGNMENT) * ALIGNMENT
                place.length_bytes = place.content_bytes
                end = place.offset + place.length_bytes
        if end:
            self._arena = Memory.create(end, "nnfmq-temporaries")
        for number in self._temporaries:
            if self.places[number].is_known:
                self.places[number].pool = self._arena
            else:
                self.make_growable(number)

    def make_growable(self, number: int) -> None:
        """Give the value a small memory of its own, unless it has one: a driver then reports the size that it needs."""
        if number not in self._grown:
            self._replace(number, 1)
        place, memory = self.places[number], self._grown[number]
        place.pool, place.offset, place.length_bytes, place.padding = memory, 0, memory.size_bytes, 0
        place.is_growable = True

    def grow(self, number: int, size_bytes: int) -> bool:
        """Make the memory of a value larger if it can grow and is smaller than `size_bytes`; return whether it was.

        It at least doubles, so that a driver cannot make a step run often by reporting a little more each time.

        Raises:
            ResourceExhaustedTransient: If there is not enough memory.
        """
        place = self.places[number]
        if not place.is_growable or size_bytes <= place.length_bytes:
            return False
        self._replace(number, max(size_bytes, 2 * place.length_bytes))
        place.pool = self._grown[number]
        place.length_bytes = self._grown[number].size_bytes
        return True

    def _replace(self, number: int, size_bytes: int) -> None:
        size = -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        memory = Memory.create(size, "nnfmq-temporary")
        old = self._grown.get(number)
        self._grown[number] = memory
        if old is not None:
            old.close()

    def bind(self, request: Request) -> None:
        """Use the memory of the application's `request` for the model's inputs and outputs. Borrows its pools.

        Raises:
            InvalidArgument: If one of them is in a managed buffer of a driver.
        """
        for numbers, arguments in ((self.plan.inputs, request.inputs), (self.plan.outputs, request.outputs)):
            for number, argument in zip(numbers, arguments, strict=True):
                self.place_argument(number, argument, request.pools)

    def place_argument(self, number: int, argument: RequestArgument, pools: Sequence[Pool | BufferToken]) -> None:
        """Use one argument of a request, as `bind` does for all."""
        place, location = self.places[number], argument.location
        place.offset, place.length_bytes, place.padding = location.offset, location.length, location.padding
        place.dimensions = self._initial[number] = argument.dimensions or self._declared[number]
        place.pool, place.is_growable = None, False
        if argument.has_no_value:
            return
        pool = pools[location.pool_index]
        if isinstance(pool, BufferToken):
            raise InvalidArgument(
                "a model on several devices cannot use a buffer in the memory of a driver; nnfmq.allocate with its "
                "roles returns one in shared memory"
            )
        place.pool = pool

    def unbind(self) -> None:
        """Forget the memory of the model's inputs and outputs."""
        for number in (*self.plan.inputs, *self.plan.outputs):
            self.places[number].pool = None

    def reset(self) -> None:
        """Forget the dimensions that an execution has learned, those of the outputs included."""
        for number in (*self._temporaries, *self.plan.outputs):
            self.places[number].dimensions = self._initial[number]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy values. Raises GeneralFailure if one has no memory, or does not fit."""
        for source, target in zip(sources, targets, strict=False):
            self.grow(target, self.places[source].content_bytes)
            copy_content(self.places[source], self.places[target])

    def write(self, number: int, array: Array) -> None:
        """Store the content of a value. Raises GeneralFailure if its memory is too small and cannot grow."""
        self.grow(number, array.nbytes)
        place = self.places[number]
        if place.pool is None or array.nbytes > place.length_bytes:
            raise GeneralFailure(f"a result of {array.nbytes} bytes does not fit into {place.length_bytes}")
        place.pool.view[place.offset : place.offset + array.nbytes] = array.tobytes()
        place.dimensions = array.shape

    def close(self) -> None:
        """Close the memories. A driver that still uses them has its own mappings. Idempotent."""
        if self._arena is not None:
            self._arena.close()
        for memory in self._grown.values():
            memory.close()
