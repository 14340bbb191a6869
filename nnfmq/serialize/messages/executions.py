"""Messages that execute a prepared model, in each mode, and those about bursts."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from nnfmq.hal.types import (
    BufferToken,
    ExecutionConfig,
    MeasureTiming,
    OutputShape,
    Pool,
    Request,
    RequestArgument,
)
from nnfmq.serialize.messages.common import (
    I32,
    I64,
    MAX_FDS,
    MAX_POOLS,
    U32,
    U63,
    Call,
    Data,
    Dimensions,
    Duration,
    FdCount,
    Hints,
    MemoryData,
    MemoryList,
    Message,
    Prefixes,
    StatusReply,
    memory_to_data,
    to_data,
)

__all__ = [
    "ArgumentData",
    "Arguments",
    "BurstConfigured",
    "BurstError",
    "CloseBurst",
    "ConfigData",
    "ConfigureAidlBurst",
    "ConfigureBurst",
    "CreateExecution",
    "Execute",
    "ExecuteAidlBurst",
    "ExecuteAsynchronously",
    "ExecuteFenced",
    "Executed",
    "ExecutionCreated",
    "ExecutionFinished",
    "FencedExecutionInfo",
    "FencedLaunched",
    "FreeMemory",
    "GetBurstError",
    "GetExecutionInfo",
    "GetMemories",
    "GrantorData",
    "LocationData",
    "MQDescriptorData",
    "Memories",
    "ReleaseCallback",
    "ReleaseExecution",
    "ReleaseMemoryResource",
    "RequestData",
    "RunExecution",
    "RunExecutionFenced",
    "ShapeData",
    "Shapes",
    "TokenData",
    "Tokens",
    "config_from_data",
    "config_to_data",
    "request_from_data",
    "request_to_data",
    "shapes_from_data",
    "shapes_to_data",
]

# ------------------------------------------------------------------------------------------------ data


class LocationData(Data, frozen=True):
    """The HAL's DataLocation."""

    pool_index: U32
    offset: U32
    length: U32
    padding: U32


class ArgumentData(Data, frozen=True):
    """The HAL's RequestArgument."""

    has_no_value: bool
    location: LocationData
    dimensions: Dimensions


class ShapeData(Data, frozen=True):
    """The HAL's OutputShape."""

    dimensions: Dimensions
    is_sufficient: bool


Arguments: TypeAlias = Annotated[tuple[ArgumentData, ...], Meta(max_length=65536)]
Shapes: TypeAlias = Annotated[tuple[ShapeData, ...], Meta(max_length=65536)]


class TokenData(Data, frozen=True, tag="buffer"):
    """The HAL's BufferToken: a driver-managed buffer."""

    token: I32


class RequestData(Data, frozen=True):
    """The HAL's Request; the file descriptors of the memories among its pools come with the message."""

    inputs: Arguments
    outputs: Arguments
    pools: Annotated[tuple[MemoryData | TokenData, ...], Meta(max_length=MAX_POOLS)]

    @property
    def memories(self) -> MemoryList:
        """The pools whose file descriptors come with the message."""
        return tuple(pool for pool in self.pools if isinstance(pool, MemoryData))


class ConfigData(Data, frozen=True):
    """The HAL's ExecutionConfig."""

    measure: MeasureTiming
    loop_timeout_ns: I64
    hints: Hints = ()
    extensions: Prefixes = ()


def request_to_data(request: Request) -> RequestData:
    """Return the wire form of a request.

    Raises:
        InvalidArgument: If a number is out of the range of its field, or a pool has no file descriptor.
    """
    pools = tuple(
        TokenData(pool.token) if isinstance(pool, BufferToken) else memory_to_data(pool) for pool in request.pools
    )
    arguments = (request.inputs, request.outputs)
    inputs, outputs = (to_data(side, tuple[ArgumentData, ...], "request") for side in arguments)
    return RequestData(inputs, outputs, pools)


def request_from_data(data: RequestData, memories: Sequence[Pool]) -> Request:
    """Return a received request over `memories`, the ones that came with the message, in their order."""
    received = iter(memories)
    pools = (BufferToken(pool.token) if isinstance(pool, TokenData) else next(received) for pool in data.pools)
    inputs, outputs = (
        msgspec.convert(arguments, tuple[RequestArgument, ...], from_attributes=True)
        for arguments in (data.inputs, data.outputs)
    )
    return Request(inputs, outputs, tuple(pools))


def config_to_data(config: ExecutionConfig) -> ConfigData:
    """Return the wire form of a configuration.

    Raises:
        InvalidArgument: If a number is out of the range of its field.
    """
    data: ConfigData = to_data(config, ConfigData, "configuration")
    return data


def config_from_data(data: ConfigData) -> ExecutionConfig:
    """Return a received configuration as a value of the HAL."""
    return msgspec.convert(data, ExecutionConfig, from_attributes=True)


def shapes_to_data(shapes: Sequence[OutputShape]) -> tuple[ShapeData, ...]:
    """Return the wire form of output shapes.

    Raises:
        InvalidArgument: If a number is out of the range of its field.
    """
    data: tuple[ShapeData, ...] = to_data(shapes, tuple[ShapeData, ...], "output shapes")
    return data


def shapes_from_data(shapes: Sequence[ShapeData]) -> tuple[OutputShape, ...]:
    """Return received output shapes as values of the HAL."""
    return msgspec.convert(shapes, tuple[OutputShape, ...], from_attributes=True)


# While there is one thread, see `common`.
msgspec.convert((), tuple[RequestArgument, ...])
msgspec.convert((), tuple[OutputShape, ...])
msgspec.convert((), tuple[ExecutionConfig, ...])


# ------------------------------------------------------------------------------------------------ messages


class _RequestCall(Call, frozen=True):
    """Base class of the calls that contain a request, whose memories come with the message."""

    model_id: U63
    request: RequestData
    config: ConfigData

    @property
    def memories(self) -> MemoryList:
        """The request's pools whose file descriptors come with the message."""
        return self.request.memories


class Execute(_RequestCall, frozen=True):
    """Execute once; the reply comes after the execution. `deadline_ns` -1 = none."""

    trace_phase: ClassVar = "PE"
    deadline_ns: I64


class _ExecutionReply(StatusReply, frozen=True):
    """Base class of the replies with the result of an execution; a time of -1 = not measured.

    `driver_ns` is the time from receiving the request to the result, for the client's statistics, whether or not the
    HAL's times were asked for.
    """

    shapes: Shapes = ()
    time_on_device_ns: Duration = -1
    time_in_driver_ns: Duration = -1
    driver_ns: Duration = -1


class Executed(_ExecutionReply, frozen=True):
    """The result of an execution."""


class ExecuteAsynchronously(_RequestCall, frozen=True):
    """Execute once: Reply reports immediately whether it was launched, ExecutionFinished its result."""

    trace_phase: ClassVar = "PE"
    deadline_ns: I64


class ExecutionFinished(_ExecutionReply, frozen=True):
    """The callback of ExecuteAsynchronously, sent exactly once; it precedes the Reply if that is an error."""


class ExecuteFenced(_RequestCall, frozen=True):
    """Execute once `fence_count` fences, which come after the memories, are signaled.

    `duration_ns` limits the time from then on; -1 = no limit, as in `deadline_ns`.
    """

    trace_phase: ClassVar = "PE"
    deadline_ns: I64
    duration_ns: I64
    fence_count: FdCount = 0

    @property
    def memories_and_fences(self) -> int:
        """The number of file descriptors that come with the message."""
        return len(self.memories) + self.fence_count


class FencedLaunched(StatusReply, frozen=True):
    """The launch status of a fenced execution and its fence, which comes with the message; no fence after an error.

    The fence is signaled when the execution finishes. `callback_id` is the argument of GetExecutionInfo.
    """

    callback_id: U63
    fence_count: FdCount = 0


class GetExecutionInfo(Call, frozen=True):
    """Request the result of a fenced execution (IFencedExecutionCallback)."""

    trace_phase: ClassVar = "PU"
    callback_id: U63


class FencedExecutionInfo(StatusReply, frozen=True):
    """The status of a fenced execution, GENERAL_FAILURE before its end, and two timings; -1 = not measured.

    One timing starts at the launch, the other when the last fence was signaled.
    """

    launched_on_device_ns: Duration = -1
    launched_in_driver_ns: Duration = -1
    fenced_on_device_ns: Duration = -1
    fenced_in_driver_ns: Duration = -1


class ReleaseCallback(Call, frozen=True):
    """Release the callback of a fenced execution, which continues."""

    trace_phase: ClassVar = "PT"
    callback_id: U63


class CreateExecution(_RequestCall, frozen=True):
    """Validate a request and create a reusable execution of it (IPreparedModel.createReusableExecution)."""

    trace_phase: ClassVar = "PE"


class ExecutionCreated(StatusReply, frozen=True):
    """The id of the reusable execution; 0 after an error."""

    execution_id: U63


class RunExecution(Call, frozen=True):
    """Run a reusable execution; the reply comes after it. One run at a time."""

    trace_phase: ClassVar = "PE"
    execution_id: U63
    deadline_ns: I64


class RunExecutionFenced(Call, frozen=True):
    """Run a reusable execution once all fences are signaled, as ExecuteFenced."""

    trace_phase: ClassVar = "PE"
    execution_id: U63
    deadline_ns: I64
    duration_ns: I64
    fence_count: FdCount = 0


class ReleaseExecution(Call, frozen=True):
    """Release a reusable execution; a run in progress continues."""

    trace_phase: ClassVar = "PT"
    execution_id: U63


# ----------------------------------------------------------------------------------------------------------------------
# Messages about bursts: over two queues (HIDL's IBurstContext), and over messages (AIDL's IBurst).


Tokens: TypeAlias = Annotated[tuple[I64, ...], Meta(max_length=65536)]


class GrantorData(Data, frozen=True):
    """The location of one part of a queue: a range of the memory at `fd_index`."""

    fd_index: U32
    offset: U32
    extent: U63


class MQDescriptorData(Data, frozen=True):
    """The MQDescriptor of a queue; the file descriptor of its memory comes with the message."""

    grantors: Annotated[tuple[GrantorData, ...], Meta(max_length=16)]
    quantum: U32
    flags: U32


class ConfigureBurst(Call, frozen=True):
    """Create a burst over two queues of the client; their memories come with the message, the request queue's first."""

    trace_phase: ClassVar = "PE"
    model_id: U63
    request: MQDescriptorData
    result: MQDescriptorData


class BurstConfigured(StatusReply, frozen=True):
    """The id of the burst; 0 after an error."""

    burst_id: U63


class GetMemories(Call, frozen=True):
    """The driver requests the memories of slots that it does not have (IBurstCallback.getMemories)."""

    trace_phase: ClassVar = "PU"
    burst_id: U63
    slots: Annotated[tuple[I32, ...], Meta(max_length=MAX_FDS)]


class Memories(StatusReply, frozen=True):
    """One memory for each slot, in order, whose file descriptors come with the message; none after an error."""

    memories: MemoryList = ()


class FreeMemory(Message, frozen=True):
    """Remove a slot from the driver's cache; an unknown slot is no error. There is no reply."""

    burst_id: U63
    slot: I32


class CloseBurst(Call, frozen=True):
    """Close a burst of either kind, with its thread, queues and memories."""

    trace_phase: ClassVar = "PT"
    burst_id: U63


class GetBurstError(Call, frozen=True):
    """Request what a result packet cannot contain about the last failed execution: the exact status and a text."""

    trace_phase: ClassVar = "PU"
    burst_id: U63


class BurstError(StatusReply, frozen=True):
    """Status and text of the last failed execution; `sequence` is its number on the burst, 0 if none has failed."""

    sequence: U63


class ConfigureAidlBurst(Call, frozen=True):
    """Create a burst without queues, whose executions are messages (IPreparedModel.configureExecutionBurst)."""

    trace_phase: ClassVar = "PE"
    model_id: U63


class ExecuteAidlBurst(Call, frozen=True):
    """Execute once on an AIDL burst, with one memory identifier token for each pool; -1 = no token."""

    trace_phase: ClassVar = "PE"
    burst_id: U63
    request: RequestData
    tokens: Tokens
    config: ConfigData
    deadline_ns: I64

    @property
    def memories(self) -> MemoryList:
        """The request's pools whose file descriptors come with the message."""
        return self.request.memories


class ReleaseMemoryResource(Call, frozen=True):
    """Remove a token's memory from the driver's cache (IBurst.releaseMemoryResource); unknown tokens are no error."""

    trace_phase: ClassVar = "PT"
    burst_id: U63
    token: I64
