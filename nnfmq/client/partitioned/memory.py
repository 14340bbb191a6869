"""ExecutionMemory: the runtime's memory for one execution in progress of a plan.

Temporaries of known size are in one shared memory. Each of the others has a memory of its own, which grows when a
driver reports that it is too small. Constants are in one sealed memory, which all executions of the model share. The
model's inputs and outputs are in the application's memory, or in that of an execution object.

A driver that executes a step can write to the temporaries of other steps. That can change results, as a driver can
anyway; addresses and control flow do not depend on them, except the conditions of IF and WHILE, of which one byte is
read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from nnfmq.base.memory import Memory, write_all
from nnfmq.base.ownership import Uncopyable
from nnfmq.client.model.arrays import ALIGNMENT, Array, Outputs, layout, names_of, outputs_type, view
from nnfmq.client.model.buffers import Buffer
from nnfmq.client.partitioned.plan import BoundPlan, ValueLocation, ValueSource, array_at, copy_content
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

__all__ = ["ArrayArguments", "ExecutionMemory", "constant_locations", "value_locations"]

_GRANULE_BYTES = 4096


def value_locations(
    plan: BoundPlan, infos: Sequence[tuple[Sequence[TensorInfo], Sequence[TensorInfo]]]
) -> list[ValueLocation]:
    """Return a location without memory for each value of `plan`.

    `infos` has the inputs and outputs of the model of each step: the types of extensions are known from there.
    """
    locations = [
        ValueLocation(element_bytes(value.operand.type), is_scalar(value.operand.type), value.operand.dimensions)
        for value in plan.values
    ]
    for call, (inputs, outputs) in zip(plan.calls, infos, strict=True):
        for number, info in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True):
            locations[number].element_bytes = np.dtype(info.dtype).itemsize
            locations[number].is_scalar = info.is_scalar
    return locations


def constant_locations(
    plan: BoundPlan, model: Model, templates: Sequence[ValueLocation]
) -> tuple[Memory | None, dict[int, ValueLocation]]:
    """Return a memory with the constants among the values, None if there are none, and their locations by number.

    The caller closes the memory.
    """
    content, locations = bytearray(), {}
    for number, value in enumerate(plan.values):
        if value.source is ValueSource.CONSTANT:
            content += bytes(-len(content) % ALIGNMENT)
            data = _constant_bytes(model, value.operand)
            locations[number] = replace(templates[number], offset=len(content), length_bytes=len(data))
            content += data
    if not locations:
        return None, {}
    data = bytes(content)
    memory = Memory.create_constant(len(data), lambda fd: write_all(fd, data), "nnfmq-constants")
    return memory, {number: replace(location, pool=memory) for number, location in locations.items()}


def _constant_bytes(model: Model, operand: Operand) -> bytes:
    source = operand.location
    begin, end = source.offset, source.offset + source.length
    if operand.lifetime is LifeTime.CONSTANT_COPY:
        return model.operand_values[begin:end]
    return bytes(model.pools[source.pool_index].view[begin:end])


class ExecutionMemory(Uncopyable):
    """The locations of all values of a plan for one execution at a time. Close it.

    `locations` has one for each value. Those of the model's inputs and outputs have no memory until `bind` or an
    `ArrayArguments` gives them some.
    """

    def __init__(
        self, plan: BoundPlan, templates: Sequence[ValueLocation], constants: dict[int, ValueLocation]
    ) -> None:
        self.plan = plan
        self.locations = [constants.get(number) or replace(template) for number, template in enumerate(templates)]
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
            location = self.locations[number]
            if location.is_known:
                location.offset = -(-end // ALIGNMENT) * ALIGNMENT
                location.length_bytes = location.content_bytes
                end = location.offset + location.length_bytes
        if end:
            self._arena = Memory.create(end, "nnfmq-temporaries")
        for number in self._temporaries:
            if self.locations[number].is_known:
                self.locations[number].pool = self._arena
            else:
                self.make_growable(number)

    def make_growable(self, number: int) -> None:
        """Give the value a small memory of its own, unless it has one: a driver then reports the size that it needs."""
        if number not in self._grown:
            self._replace(number, 1)
        location, memory = self.locations[number], self._grown[number]
        location.pool, location.offset, location.length_bytes, location.padding = memory, 0, memory.size_bytes, 0
        location.is_growable = True

    def grow(self, number: int, size_bytes: int) -> bool:
        """Make the memory of a value larger if it can grow and is smaller than `size_bytes`; return whether it was.

        It at least doubles, so that a driver cannot make a step run often by reporting a little more each time.

        Raises:
            ResourceExhaustedTransient: If there is not enough memory.
        """
        location = self.locations[number]
        if not location.is_growable or size_bytes <= location.length_bytes:
            return False
        self._replace(number, max(size_bytes, 2 * location.length_bytes))
        location.pool = self._grown[number]
        location.length_bytes = self._grown[number].size_bytes
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
                self.set_argument(number, argument, request.pools)

    def set_argument(self, number: int, argument: RequestArgument, pools: Sequence[Pool | BufferToken]) -> None:
        """Use one argument of a request, as `bind` does for all."""
        location, source = self.locations[number], argument.location
        location.offset, location.length_bytes, location.padding = source.offset, source.length, source.padding
        location.dimensions = self._initial[number] = argument.dimensions or self._declared[number]
        location.pool, location.is_growable = None, False
        if argument.has_no_value:
            return
        pool = pools[source.pool_index]
        if isinstance(pool, BufferToken):
            raise InvalidArgument(
                "a model on several devices cannot use a buffer in the memory of a driver; nnfmq.allocate with its "
                "roles returns one in shared memory"
            )
        location.pool = pool

    def unbind(self) -> None:
        """Forget the memory of the model's inputs and outputs."""
        for number in (*self.plan.inputs, *self.plan.outputs):
            self.locations[number].pool = None

    def reset(self) -> None:
        """Forget the dimensions that an execution has learned, those of the outputs included."""
        for number in (*self._temporaries, *self.plan.outputs):
            self.locations[number].dimensions = self._initial[number]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy values. Raises GeneralFailure if one has no memory, or does not fit."""
        for source, target in zip(sources, targets, strict=False):
            self.grow(target, self.locations[source].content_bytes)
            copy_content(self.locations[source], self.locations[target])

    def write(self, number: int, array: Array) -> None:
        """Store the content of a value. Raises GeneralFailure if its memory is too small and cannot grow."""
        self.grow(number, array.nbytes)
        location = self.locations[number]
        if location.pool is None or array.nbytes > location.length_bytes:
            raise GeneralFailure(f"a result of {array.nbytes} bytes does not fit into {location.length_bytes}")
        location.pool.view[location.offset : location.offset + array.nbytes] = array.tobytes()
        location.dimensions = array.shape

    def close(self) -> None:
        """Close the memories. A driver that still uses them has its own mappings. Idempotent."""
        if self._arena is not None:
            self._arena.close()
        for memory in self._grown.values():
            memory.close()


# ----------------------------------------------------------------------------------------------------------------------
# ArrayArguments: an execution's inputs and outputs as arrays of the application, copied to and from its memory.
#
# Outputs of unknown shape have memory that grows, so that only the step that computes one is repeated.


class ArrayArguments(Uncopyable):
    """Memory for the arguments of one execution at a time; owns that and the ExecutionMemory `memory`. Close it.

    No driver can write to the inputs' memory.
    """

    def __init__(self, memory: ExecutionMemory, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> None:
        self.memory = memory
        self._inputs, self._outputs = inputs, outputs
        self._input_memory: Memory | None = None
        self._output_memory: Memory | None = None

    def write(self, values: Sequence[Array | Buffer], targets: Sequence[object]) -> None:
        """Copy the arrays among `values`, which are checked, and use the Buffers among these and `targets` as they are.

        `targets` has one object for each output.

        Raises:
            InvalidArgument: If a Buffer is in the memory of a driver.
            ResourceExhaustedTransient: If there is not enough memory.
        """
        shapes = [value.shape if isinstance(value, np.ndarray) else () for value in values]
        arguments, size_bytes = layout(self._inputs, shapes, 0)
        memory = self._memory_for_inputs(size_bytes)
        for number, info, argument, value in zip(self.memory.plan.inputs, self._inputs, arguments, values, strict=True):
            if isinstance(value, Buffer):
                self._set_buffer(number, value)
                continue
            np.copyto(view(memory, argument, info, value.shape), value, casting="same_kind")
            self.memory.set_argument(number, argument, (memory,))
        self._set_outputs(targets)

    def _memory_for_inputs(self, size_bytes: int) -> Memory:
        memory = self._input_memory
        if memory is None or memory.size_bytes < size_bytes:
            self._input_memory = Memory.create(size_bytes, "nnfmq-inputs", one_writer=True)
            if memory is not None:
                memory.close()
        assert self._input_memory is not None
        return self._input_memory

    def _set_outputs(self, targets: Sequence[object]) -> None:
        arguments, size_bytes = layout(self._outputs, [info.shape for info in self._outputs], 0)
        if self._output_memory is None:
            self._output_memory = Memory.create(size_bytes, "nnfmq-outputs")
        for number, info, argument, target in zip(
            self.memory.plan.outputs, self._outputs, arguments, targets, strict=True
        ):
            if isinstance(target, Buffer):
                self._set_buffer(number, target)
                continue
            self.memory.set_argument(number, argument, (self._output_memory,))
            if info.has_unknown_shape:
                self.memory.make_growable(number)

    def _set_buffer(self, number: int, buffer: Buffer) -> None:
        if not buffer.is_shared:
            raise InvalidArgument(
                "a model on several devices cannot use a buffer in the memory of one driver; "
                "nnfmq.allocate with its roles returns one in shared memory"
            )
        self.memory.set_argument(number, buffer.argument_in(0), (buffer.pool,))

    def results(self, targets: Sequence[object]) -> tuple[Array | Buffer, ...]:
        """Return copies of the outputs, and the Buffers among `targets`."""
        found: list[Array | Buffer] = []
        for number, info, target in zip(self.memory.plan.outputs, self._outputs, targets, strict=True):
            if isinstance(target, Buffer):
                found.append(target)
            else:
                found.append(array_at(self.memory.locations[number], info).copy())
        return tuple(found)

    def arrays(self) -> Outputs:
        """Return copies of the outputs, none of which is in a Buffer."""
        results = self.results([None] * len(self._outputs))
        arrays = [result for result in results if isinstance(result, np.ndarray)]
        return outputs_type(names_of(self._outputs))(arrays)

    def close(self) -> None:
        """Close the memories. A driver that still uses them has its own mappings. Idempotent."""
        self.memory.close()
        for memory in (self._input_memory, self._output_memory):
            if memory is not None:
                memory.close()
