"""ArrayArguments: an execution's inputs and outputs as arrays of the application, copied to and from its memory.

Outputs of unknown shape have memory that grows, so that only the step that computes one is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.memory import Memory
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.outputs import Outputs, names_of, outputs_type
from nnfmq.runtime.plan_execution.execution_memory import ExecutionMemory
from nnfmq.runtime.plan_execution.value_locations import array_at
from nnfmq.runtime.tensor_layout import Array, has_unknown_shape, layout, view
from nnfmq.uncopyable import Uncopyable

__all__ = ["ArrayArguments"]


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
            if has_unknown_shape(info):
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
