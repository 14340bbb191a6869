"""Arguments of an execution as the application has set them, the request made of them, and its sending."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from nnfmq.base.fence import Fence, HasFileno, sync_wait
from nnfmq.base.memory import Memory
from nnfmq.client.execution.fenced import FencedExecution, FencedTiming
from nnfmq.client.execution.reusable import BoundRequest
from nnfmq.client.model.arrays import ALIGNMENT, Array, ExecutionResult, format_shape
from nnfmq.client.model.buffers import AnyMemory, Buffer
from nnfmq.client.model.compiled_model import CompiledModel
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.timing import Timing
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionConfig,
    FenceState,
    OutputShape,
    Pool,
    Request,
    RequestArgument,
    merge_dimensions,
)
from nnfmq.nnapi.burst import BurstBuilder
from nnfmq.nnapi.compilation import SharedModel
from nnfmq.nnapi.memory import DeviceMemory

__all__ = [
    "ApplicationBuffer",
    "ArgumentSetting",
    "AssembledRequest",
    "PendingResult",
    "RequestSender",
    "TimedResult",
    "array_setting",
    "device_setting",
    "memory_setting",
]

ApplicationBuffer: TypeAlias = Array | bytes | bytearray | memoryview
"""The application's own memory: a contiguous array, or bytes."""
_SIZE_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True, eq=False)
class ArgumentSetting:
    """An argument: omitted, or in exactly one of `array`, `memory` and `device_memory`.

    `dimensions` are those that the application has given, () if none. `length` are the bytes of the data, followed by
    `padding` bytes that belong to the argument, too.
    """

    dimensions: tuple[int, ...] = ()
    length: int = 0
    padding: int = 0
    array: Array | None = None
    """The application's array or bytes, flat, as bytes."""
    memory: AnyMemory | None = None
    offset: int = 0
    device_memory: DeviceMemory | None = None

    @property
    def has_no_value(self) -> bool:
        """Whether the argument is omitted."""
        return self.array is None and self.memory is None and self.device_memory is None


def array_setting(
    info: TensorInfo, buffer: ApplicationBuffer | None, dimensions: Sequence[int] | None, is_output: bool, padded: bool
) -> ArgumentSetting:
    """Return the setting of an argument in the application's array or bytes; None omits it.

    Raises:
        InvalidArgument: If its size, element type or dimensions do not fit `info`, or it cannot be accessed as bytes.
    """
    requested = _checked_dimensions(info, dimensions, may_be_unknown=is_output or buffer is None)
    if buffer is None:
        return ArgumentSetting()
    array = _as_bytes(info, buffer, is_output)
    length = _data_length(info, requested, array.nbytes, padded)
    return ArgumentSetting(requested, length, array.nbytes - length, array=array)


def memory_setting(
    info: TensorInfo,
    memory: AnyMemory,
    span: tuple[int, int],
    dimensions: Sequence[int] | None,
    is_output: bool,
    padded: bool,
) -> ArgumentSetting:
    """Return the setting of an argument in a part of a memory; `span` is its offset and its length with padding.

    Raises:
        InvalidArgument: If the part is not inside the memory, or its size or the dimensions do not fit `info`.
    """
    memory.fileno()  # raises if the memory is closed
    requested = _checked_dimensions(info, dimensions, may_be_unknown=is_output)
    offset, space = span
    if space <= 0 or offset < 0 or offset + space > memory.size_bytes:
        raise InvalidArgument(
            f"{info.name!r}: {space} bytes from byte {offset} on of a memory of {memory.size_bytes}; "
            "a part has 1 byte or more, and is inside the memory"
        )
    length = _data_length(info, requested, space, padded)
    return ArgumentSetting(requested, length, space - length, memory=memory, offset=offset)


def device_setting(
    info: TensorInfo,
    memory: DeviceMemory,
    span: tuple[int, int],
    dimensions: Sequence[int] | None,
) -> ArgumentSetting:
    """Return the setting of an argument that is a device memory, of which it is all: `span` is (0, 0).

    Raises:
        InvalidArgument: If another span is given, or the dimensions do not fit `info` or the memory.
    """
    if span != (0, 0):
        raise InvalidArgument(
            f"{info.name!r}: an argument is a whole device memory, with offset 0 and length 0; got {span}"
        )
    requested = _checked_dimensions(info, dimensions, may_be_unknown=True)
    if merge_dimensions(requested, memory.info.shape) is None:
        shapes = f"dimensions {format_shape(requested)}; the device memory has {format_shape(memory.info.shape)}"
        raise InvalidArgument(f"{info.name!r}: {shapes}")
    return ArgumentSetting(requested, device_memory=memory)


def _checked_dimensions(info: TensorInfo, dimensions: Sequence[int] | None, may_be_unknown: bool) -> tuple[int, ...]:
    """Return the dimensions to send: () if none are given. Raise InvalidArgument if they do not fit."""
    requested = () if dimensions is None else tuple(dimensions)
    if requested and (info.is_scalar or not all(0 <= extent <= _SIZE_MAX for extent in requested)):
        rule = "a scalar has none" if info.is_scalar else "each is 0 to 2^32 - 1"
        raise InvalidArgument(f"{info.name!r}: dimensions {requested}; {rule}")
    merged = merge_dimensions(info.shape, requested)
    if merged is None:
        raise InvalidArgument(f"{info.name!r}: dimensions {requested}; the model has {format_shape(info.shape)}")
    if prod(merged) * np.dtype(info.dtype).itemsize > _SIZE_MAX:
        raise InvalidArgument(f"{info.name!r}: a tensor of {format_shape(merged)} has more than 2^32 - 1 bytes")
    if not may_be_unknown and not info.is_scalar and (not merged or 0 in merged):
        raise InvalidArgument(
            f"{info.name!r} has the shape {format_shape(merged)}, which is not fully known: pass its `dimensions`"
        )
    return requested


def _data_length(info: TensorInfo, requested: tuple[int, ...], space: int, padded: bool) -> int:
    """Return how many bytes of an argument's space are its data. Raise InvalidArgument if they do not fit."""
    shape = merge_dimensions(info.shape, requested) or ()
    if 0 in shape or not (shape or info.is_scalar):
        return space  # an output of unknown shape
    needed = prod(shape) * np.dtype(info.dtype).itemsize
    if space < needed or (space > needed and not padded):
        hint = "" if space < needed else "; enable_input_and_output_padding(True) allows more"
        raise InvalidArgument(f"{info.name!r}: {space} bytes given, {needed} are required{hint}")
    return needed


def _as_bytes(info: TensorInfo, buffer: ApplicationBuffer, is_output: bool) -> Array:
    """Return a flat array of bytes over the application's array or bytes, without a copy."""
    if not isinstance(buffer, np.ndarray):
        try:
            buffer = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{info.name!r} is neither an array nor contiguous bytes: {error}") from error
    elif buffer.dtype not in (np.dtype(info.dtype), np.uint8):
        raise InvalidArgument(f"{info.name!r} holds {info.dtype}, or bytes (uint8); the given array is {buffer.dtype}")
    if not buffer.flags.c_contiguous:
        raise InvalidArgument(f"{info.name!r}: the array is not contiguous; see numpy.ascontiguousarray")
    if is_output and not buffer.flags.writeable:
        raise InvalidArgument(f"{info.name!r} is an output: the array must be writable")
    if not buffer.nbytes:
        raise InvalidArgument(f"{info.name!r}: the array has no elements; None omits an argument")
    return buffer.reshape(-1).view(np.uint8)


# ----------------------------------------------------------------------------------------------------------------------
# AssembledRequest: the HAL request of an execution whose arguments are set, with memory for those in arrays.


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


# ----------------------------------------------------------------------------------------------------------------------
# RequestSender: sends the request of an execution to the driver, in each of NNAPI's modes.


class TimedResult(NamedTuple):
    """The reported shapes (empty if none are), and the times from the launch and from the last fence."""

    shapes: tuple[OutputShape, ...]
    launched: Timing
    fenced: Timing


class PendingResult(NamedTuple):
    """The result of an execution that was started; `fence` is signaled at its end, if there is one.

    `result` returns it or raises the execution's error, once `done` returns True; `wait` blocks until then. `close`
    releases the driver's part of it.
    """

    done: Callable[[], bool]
    wait: Callable[[], object]
    result: Callable[[], TimedResult]
    close: Callable[[], object]
    fence: Fence | None = None


class RequestSender:
    """Executes one request any number of times, one at a time. Close it; it closes the request.

    Args:
        model: The model.
        assembled: The request. This object owns it.
        config: The configuration of its executions.
        is_reusable: Make the driver bind the request once, if its interface version can (RUX-1).
    """

    def __init__(
        self, model: CompiledModel, assembled: AssembledRequest, config: ExecutionConfig, is_reusable: bool
    ) -> None:
        self._model = model
        self.assembled = assembled
        self._config = config
        self._is_reusable = is_reusable
        self._bound: BoundRequest | None = None

    def execute(self, timeout: float | None) -> ExecutionResult:
        """Execute the request; blocks. Raises as `PreparedModel.execute_request`."""
        bound = self._bind(timeout)
        if bound is not None:
            return bound.compute(timeout=timeout)
        return self._model.execute_request(self.assembled.request, self._config, timeout=timeout)

    def _bind(self, timeout: float | None) -> BoundRequest | None:
        if self._is_reusable and self._bound is None:
            self._bound = self._model.create_reusable_request(self.assembled.request, self._config, timeout=timeout)
        return self._bound

    def execute_in(self, burst: BurstBuilder, timeout: float | None) -> ExecutionResult:
        """Execute the request with a burst; blocks. Raises as `Burst.execute_request`."""
        return burst.execute(self.assembled.request, self._config, timeout)

    def start(self, timeout: float | None) -> PendingResult:
        """Start to execute the request. Raises as `PreparedModel.execute_request_async`."""
        pending = self._model.execute_request_async(self.assembled.request, self._config, timeout=timeout)
        return PendingResult(pending.done, pending.wait, lambda: _timed(pending.result()), _nothing)

    def launch(self, fences: Sequence[HasFileno], timeout: float | None, duration: float | None) -> PendingResult:
        """Execute the request behind fences; blocks until launched. Raises as `PreparedModel.execute_request_fenced`.

        An interface version older than HIDL 1.3 has no fences: this then blocks until the execution is done.
        """
        if isinstance(self._model, PreparedModel) and self._model.connection.level < FeatureLevel.V1_3:
            return self._execute_after(fences, timeout)
        bound = self._bind(timeout)
        if bound is not None:
            return _launched(bound.compute_fenced(fences, timeout=timeout, duration=duration))
        request = self.assembled.request
        return _launched(
            self._model.execute_request_fenced(
                request, self._config, wait_for=fences, timeout=timeout, duration=duration
            )
        )

    def _execute_after(self, fences: Sequence[HasFileno], timeout: float | None) -> PendingResult:
        for fence in fences:
            if sync_wait(fence.fileno()) is not FenceState.SIGNALED:
                raise InvalidArgument("a fence on which the computation depends is in error (FEN-5)")
        result = _timed(self.execute(timeout))
        return PendingResult(lambda: True, _nothing, lambda: result, _nothing)

    def close(self) -> None:
        """Release what the driver has bound, and the request's own memory. Idempotent."""
        bound, self._bound = self._bound, None
        if bound is not None:
            bound.close()
        self.assembled.close()


def _timed(result: ExecutionResult) -> TimedResult:
    return TimedResult(result.shapes, result.timing, result.timing)


def _launched(execution: FencedExecution[FencedTiming]) -> PendingResult:
    try:
        fence = Fence.adopt(os.dup(execution.fence.fileno()))
    except BaseException:
        execution.close()
        raise

    def is_done() -> bool:
        return fence.state is not FenceState.ACTIVE

    return PendingResult(is_done, fence.wait, lambda: TimedResult((), *execution.result()), execution.close, fence)


def _nothing() -> None:
    """Nothing is to be waited for or released."""
