"""AssembledRequest: the HAL request of an execution whose arguments are set, with memory for those in arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from msgspec.structs import replace

from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    OutputShape,
    Pool,
    Request,
    RequestArgument,
    merge_dimensions,
)
from nnfmq.memory import Memory
from nnfmq.nnapi.argument_settings import ArgumentSetting
from nnfmq.nnapi.device_memory import DeviceMemory
from nnfmq.nnapi.shared_model import SharedModel
from nnfmq.runtime.managed_buffer import Buffer
from nnfmq.runtime.tensor_layout import ALIGNMENT

__all__ = ["AssembledRequest"]

Shapes = Sequence[tuple[int, ...]]


class AssembledRequest:
    """A request over the application's memories, and over memory of its own for arguments in arrays.

    `copy_in` before each execution, and `copy_out` after each that has succeeded. Close it when no execution uses it.
    """

    def __init__(
        self, shared: SharedModel, inputs: Sequence[ArgumentSetting], outputs: Sequence[ArgumentSetting]
    ) -> None:
        self._shared = shared
        self._settings = (*inputs, *outputs)
        self._input_count = len(inputs)
        self._array_offsets: dict[int, tuple[Memory, int]] = {}
        self._own: list[Memory] = []
        self._used: list[DeviceMemory] = []
        self._pools: list[Pool | BufferToken] = []
        try:
            self._use_device_memories()
            self._allocate(inputs, 0, one_writer=True)
            self._allocate(outputs, len(inputs), one_writer=False)
            arguments = [self._argument(position) for position in range(len(self._settings))]
        except BaseException:
            self.close()
            raise
        self.request = Request(tuple(arguments[: len(inputs)]), tuple(arguments[len(inputs) :]), tuple(self._pools))

    def _use_device_memories(self) -> None:
        for setting in self._settings:
            if setting.device_memory is not None:
                setting.device_memory.users.acquire()
                self._used.append(setting.device_memory)

    def _allocate(self, settings: Sequence[ArgumentSetting], first: int, one_writer: bool) -> None:
        """Allocate one memory for all arguments in arrays among `settings`, whose positions begin with `first`."""
        offsets, end = {}, 0
        for position, setting in enumerate(settings, first):
            if setting.array is not None:
                offsets[position] = -(-end // ALIGNMENT) * ALIGNMENT
                end = offsets[position] + setting.length + setting.padding
        if offsets:
            memory = Memory.create(end, "nnfmq-arguments", one_writer=one_writer)
            self._own.append(memory)
            self._array_offsets |= {position: (memory, offset) for position, offset in offsets.items()}

    def _argument(self, position: int) -> RequestArgument:
        setting = self._settings[position]
        if setting.has_no_value:
            return RequestArgument(has_no_value=True)
        if setting.device_memory is not None:
            return self._device_argument(setting.device_memory.buffer, position)
        memory, offset = self._array_offsets.get(position, (setting.memory, setting.offset))
        assert memory is not None
        padding = setting.padding if setting.padding and self._shared.sends_padding else 0
        location = DataLocation(self._pool_index(memory), offset, setting.length, padding)
        return RequestArgument(location=location, dimensions=setting.dimensions)

    def _device_argument(self, buffer: Buffer, position: int) -> RequestArgument:
        dimensions = self._settings[position].dimensions
        argument = buffer.argument_in(self._pool_index(buffer.pool))
        if buffer.is_shared and not dimensions and buffer.info.shape != self._info(position).shape:
            dimensions = buffer.info.shape
        return replace(argument, dimensions=dimensions)

    def _pool_index(self, pool: Pool | BufferToken) -> int:
        """Return the index of a pool; a memory is listed once, or the driver would not see arguments that overlap."""
        found = next((index for index, other in enumerate(self._pools) if other == pool), None)
        if found is None:
            self._pools.append(pool)
            return len(self._pools) - 1
        return found

    def _info(self, position: int) -> TensorInfo:
        return (*self._shared.inputs, *self._shared.outputs)[position]

    def copy_in(self) -> None:
        """Copy the application's arrays into the request's memory, and begin to write its device memories.

        Raises:
            InvalidArgument: If a device memory was not described for its role.
            GeneralFailure: If an input is an uninitialized device memory.
        """
        for position, setting in enumerate(self._settings[: self._input_count]):
            if setting.array is not None:
                memory, offset = self._array_offsets[position]
                memory.view[offset : offset + setting.array.nbytes] = setting.array.data
        self._for_each_device_memory(self._begin_use)

    def _begin_use(self, memory: DeviceMemory, index: int, is_output: bool) -> None:
        memory.buffer.check_role((self._shared, index, is_output), self)

    def copy_out(self, reported: Sequence[OutputShape]) -> Shapes:
        """Copy outputs into the application's arrays, record that device memories are written, and return the shapes.

        `reported` are the shapes that the driver has reported, if any.
        """
        shapes = [shape.dimensions for shape in reported] or self._expected_shapes()
        for index, shape in enumerate(shapes):
            position = self._input_count + index
            array = self._settings[position].array
            if array is not None:
                memory, offset = self._array_offsets[position]
                size = prod(shape) * np.dtype(self._info(position).dtype).itemsize
                array[:size] = np.frombuffer(memory.view, np.uint8, size, offset)
        self._for_each_device_memory(self._end_use)
        return shapes

    def _end_use(self, memory: DeviceMemory, _index: int, is_output: bool) -> None:
        if is_output:
            memory.buffer.mark_written(self)

    def _for_each_device_memory(self, call: Callable[[DeviceMemory, int, bool], None]) -> None:
        for position, setting in enumerate(self._settings):
            is_output = position >= self._input_count
            if setting.device_memory is not None:
                call(setting.device_memory, position - self._input_count * is_output, is_output)

    def _expected_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs as the model and the settings have them, for a driver that reports none."""
        settings = self._settings[self._input_count :]
        pairs = zip(self._shared.outputs, settings, strict=True)
        return [merge_dimensions(info.shape, setting.dimensions) or () for info, setting in pairs]

    def close(self) -> None:
        """Release device memories, and close the request's own; a driver that still uses it has its own mapping.

        Idempotent.
        """
        while self._used:
            self._used.pop().users.release()
        for memory in self._own:
            memory.close()
