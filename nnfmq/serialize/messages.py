"""The control channel's messages and the data inside them: what each field holds, and which numbers it takes.

A message is a msgpack map of its fields and its type's name; the data inside are arrays. Numbers that the HAL judges
by INVALID_ARGUMENT (preference, priority, deadlines) pass; those that no HAL type can hold do not. Who may send which
when, with how many file descriptors, is `control`'s business; what the calls mean, that of `service` and `runtime`.
docs/reference/protocol.md describes the same for readers. Long because it is one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import Meta

from nnfmq.hal.capabilities import Capabilities
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.types import (
    BufferToken,
    DeviceStatus,
    DeviceType,
    ExecutionConfig,
    ExtensionNameAndPrefix,
    MeasureTiming,
    OperandType,
    OutputShape,
    Pool,
    Protection,
    Request,
    RequestArgument,
    SharedPool,
    TokenValuePair,
)
from nnfmq.serialize.execution_stats import STATS_WORDS

MAX_FDS = 250  # per message: Linux passes 253 at a time (SCM_MAX_FD), and a body may travel in one more
MAX_POOLS = 65536  # of a request, driver's buffers among them
MAX_ROLES = 65536  # of a buffer, of each kind
MAX_NAME = 256
MAX_HINTS = 256  # of each kind
MAX_HINT_BYTES = 64 * 1024
MAX_TEXT = 4096  # of an error message; a longer one is cut when it is encoded

U32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
U63: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
I64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Duration: TypeAlias = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Word: TypeAlias = Annotated[int, Meta(ge=0)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
FdCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_FDS)]
Consumers: TypeAlias = tuple[tuple[U32, ...], ...]
Tokens: TypeAlias = Annotated[tuple[I64, ...], Meta(max_length=65536)]
Dimensions: TypeAlias = Annotated[tuple[U32, ...], Meta(max_length=1024)]


# ------------------------------------------------------------------------------------------------ data inside messages


class _Data(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array of its fields, in their order."""


class OperandTypeData(_Data, frozen=True):
    """One operand type of an extension; `dtype` is numpy's name of its elements."""

    type: Annotated[int, Meta(ge=0, le=2**16 - 1)]
    is_tensor: bool
    byte_size: U32
    dtype: Name


class ExtensionData(_Data, frozen=True):
    """An extension that a device supports."""

    name: Name
    operand_types: Annotated[tuple[OperandTypeData, ...], Meta(max_length=65536)]


class DeviceInfo(_Data, frozen=True):
    """One device of the driver, with the extensions that it supports and how many cache files it needs."""

    name: Name
    type: DeviceType
    version: Name
    feature_level: U32
    status: DeviceStatus
    extensions: Annotated[tuple[ExtensionData, ...], Meta(max_length=1024)]
    model_cache_files: U32 = 0
    data_cache_files: U32 = 0


class PerformanceData(_Data, frozen=True):
    """hal PerformanceInfo."""

    exec_time: float
    power_usage: float


class OperandPerformanceData(_Data, frozen=True):
    """hal OperandPerformance."""

    type: OperandType
    info: PerformanceData


class CapabilitiesData(_Data, frozen=True):
    """hal Capabilities."""

    operand_performance: Annotated[tuple[OperandPerformanceData, ...], Meta(max_length=256)]
    relaxed_float32_to_float16_scalar: PerformanceData
    relaxed_float32_to_float16_tensor: PerformanceData
    if_performance: PerformanceData
    while_performance: PerformanceData


class GrantorData(_Data, frozen=True):
    """One part of a queue: a range of the memory at `fd_index`."""

    fd_index: U32
    offset: U32
    extent: U63


class MQDescriptorData(_Data, frozen=True):
    """A queue's descriptor; the memory it counts from is sent beside the message."""

    grantors: Annotated[tuple[GrantorData, ...], Meta(max_length=16)]
    quantum: U32
    flags: U32


class LocationData(_Data, frozen=True):
    """hal DataLocation."""

    pool_index: U32
    offset: U32
    length: U32
    padding: U32


class ArgumentData(_Data, frozen=True):
    """hal RequestArgument, see `arguments_to_data`."""

    has_no_value: bool
    location: LocationData
    dimensions: Dimensions


class ShapeData(_Data, frozen=True):
    """hal OutputShape, see `shapes_to_data`."""

    dimensions: Dimensions
    is_sufficient: bool


Arguments: TypeAlias = Annotated[tuple[ArgumentData, ...], Meta(max_length=65536)]
Shapes: TypeAlias = Annotated[tuple[ShapeData, ...], Meta(max_length=65536)]


class MemoryData(_Data, frozen=True, tag="memory"):
    """A memory whose descriptor comes beside the message: which bytes of it, and what may be done with them."""

    size_bytes: U63
    offset: U63 = 0
    protection: U32 = Protection.READ_WRITE.value


class TokenData(_Data, frozen=True, tag="buffer"):
    """hal BufferToken."""

    token: I32


LentMemories: TypeAlias = Annotated[tuple[MemoryData, ...], Meta(max_length=MAX_FDS)]


class RequestData(_Data, frozen=True):
    """hal Request, see `request_to_data`; the memories among its pools are sent beside the message."""

    inputs: Arguments
    outputs: Arguments
    pools: Annotated[tuple[MemoryData | TokenData, ...], Meta(max_length=MAX_POOLS)]

    @property
    def memories(self) -> LentMemories:
        """Those of its pools that come beside the message."""
        return tuple(pool for pool in self.pools if isinstance(pool, MemoryData))


class HintData(_Data, frozen=True):
    """hal TokenValuePair."""

    token: I32
    value: Annotated[bytes, Meta(max_length=MAX_HINT_BYTES)]


class PrefixData(_Data, frozen=True):
    """hal ExtensionNameAndPrefix."""

    name: Name
    prefix: U32


class RoleData(_Data, frozen=True):
    """hal BufferRole."""

    model_index: U32
    io_index: U32
    probability: float


Roles: TypeAlias = Annotated[tuple[RoleData, ...], Meta(max_length=MAX_ROLES)]
Hints: TypeAlias = Annotated[tuple[HintData, ...], Meta(max_length=MAX_HINTS)]
Prefixes: TypeAlias = Annotated[tuple[PrefixData, ...], Meta(max_length=MAX_HINTS)]


class ConfigData(_Data, frozen=True):
    """hal ExecutionConfig, see `config_to_data`."""

    measure: MeasureTiming
    loop_timeout_ns: I64
    hints: Hints = ()
    extensions: Prefixes = ()


class CachesData(_Data, frozen=True):
    """The cache files beside a message, behind its pools: those of the model, then those of the data."""

    token: Annotated[bytes, Meta(max_length=MAX_NAME)] = b""
    model_count: FdCount = 0
    data_count: FdCount = 0


def _to_data(value: Any, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(value, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the {what} cannot be written: {error}") from error


def request_to_data(request: Request) -> RequestData:
    """Return the wire form of a request, without its pools; raises InvalidArgument for numbers out of range."""
    pools = tuple(
        TokenData(pool.token) if isinstance(pool, BufferToken) else memory_to_data(pool) for pool in request.pools
    )
    sides = (request.inputs, request.outputs)
    inputs, outputs = (_to_data(arguments, tuple[ArgumentData, ...], "request") for arguments in sides)
    return RequestData(inputs, outputs, pools)


def memory_to_data(pool: Pool) -> MemoryData:
    """Return the wire form of a memory that is lent. Raises InvalidArgument for a pool that cannot be."""
    if not hasattr(pool, "fileno"):  # a stand-in for tests, or a driver's private copy
        raise InvalidArgument(f"pools must be nnfmq memory to be sent, not {type(pool).__name__}")
    shared = cast(SharedPool, pool)
    return MemoryData(shared.size_bytes, shared.offset, int(shared.protection))


def request_from_data(data: RequestData, memories: Sequence[Pool]) -> Request:
    """Return the hal form of a received request over the memories that came with it, in their order."""
    received = iter(memories)
    pools = (BufferToken(pool.token) if isinstance(pool, TokenData) else next(received) for pool in data.pools)
    inputs, outputs = (
        msgspec.convert(arguments, tuple[RequestArgument, ...], from_attributes=True)
        for arguments in (data.inputs, data.outputs)
    )
    return Request(inputs, outputs, tuple(pools))


def config_to_data(config: ExecutionConfig) -> ConfigData:
    """Return the wire form of a configuration; raises InvalidArgument for numbers out of range."""
    data: ConfigData = _to_data(config, ConfigData, "configuration")
    return data


def config_from_data(data: ConfigData) -> ExecutionConfig:
    """Return the hal form of a received configuration."""
    return msgspec.convert(data, ExecutionConfig, from_attributes=True)


def hints_to_data(
    hints: Sequence[TokenValuePair], extensions: Sequence[ExtensionNameAndPrefix]
) -> tuple[Hints, Prefixes]:
    """Return the wire form of hints and of the prefixes in them; raises InvalidArgument for numbers out of range."""
    return _to_data(tuple(hints), Hints, "hints"), _to_data(tuple(extensions), Prefixes, "extensions")


def hints_from_data(
    hints: Hints, extensions: Prefixes
) -> tuple[tuple[TokenValuePair, ...], tuple[ExtensionNameAndPrefix, ...]]:
    """Return the hal form of received hints."""
    return (
        msgspec.convert(hints, tuple[TokenValuePair, ...], from_attributes=True),
        msgspec.convert(extensions, tuple[ExtensionNameAndPrefix, ...], from_attributes=True),
    )


def capabilities_to_data(capabilities: Capabilities) -> CapabilitiesData:
    """Return the wire form of capabilities, which are valid."""
    return msgspec.convert(capabilities, CapabilitiesData, from_attributes=True)


def capabilities_from_data(data: CapabilitiesData) -> Capabilities:
    """Return the hal form of received capabilities, which nobody has judged."""
    return msgspec.convert(data, Capabilities, from_attributes=True)


def shapes_to_data(shapes: Sequence[OutputShape]) -> tuple[ShapeData, ...]:
    """Return the wire form of output shapes; raises InvalidArgument for numbers out of range."""
    data: tuple[ShapeData, ...] = _to_data(shapes, tuple[ShapeData, ...], "output shapes")
    return data


def shapes_from_data(shapes: Sequence[ShapeData]) -> tuple[OutputShape, ...]:
    """Return the hal form of received output shapes."""
    return msgspec.convert(shapes, tuple[OutputShape, ...], from_attributes=True)


# msgspec looks at a dataclass when it is converted to for the first time. A second thread that comes in the middle of
# that finds it half done, and the process dies; so it is done here, while there is one thread.
msgspec.convert((), tuple[RequestArgument, ...])
msgspec.convert((), tuple[OutputShape, ...])
msgspec.convert((), tuple[ExecutionConfig, ...])
msgspec.convert((), tuple[TokenValuePair, ...])
msgspec.convert((), tuple[ExtensionNameAndPrefix, ...])
msgspec.convert((), tuple[Capabilities, ...])


# ------------------------------------------------------------------------------------------------ messages


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Greeting(Message, frozen=True, forbid_unknown_fields=False):
    """Base of the three that other protocol versions must be able to read: what they added is skipped."""


class Call(Message, frozen=True):
    """Base of what waits for an answer, and of the answers: both carry the caller's number."""

    call: U63


class Answer(Call, frozen=True):
    """Base of the answers that say how the call ended."""

    status: ErrorStatus
    message: Text


class Hello(Greeting, frozen=True):
    """The client's first message: the protocol and the HAL interface that it speaks."""

    protocol: U32
    interface: Name
    client_name: Name


class HelloReply(Greeting, frozen=True):
    """The driver agrees; `core` is which queue core it runs on."""

    protocol: U32
    interface: Name
    driver_name: Name
    pid: U32
    core: Name


class Refused(Greeting, frozen=True):
    """The driver does not want this client, and closes the connection."""

    status: ErrorStatus
    message: Text


class ListDevices(Call, frozen=True):
    """Ask for the devices."""


class DeviceList(Call, frozen=True):
    """The devices."""

    devices: Annotated[tuple[DeviceInfo, ...], Meta(max_length=256)]


class GetCapabilities(Call, frozen=True):
    """Ask how fast a device is."""

    device: Name


class DeviceCapabilities(Answer, frozen=True):
    """How fast a device is, unless `status` is an error."""

    capabilities: CapabilitiesData | None = None


class SetDeviceStatus(Call, frozen=True):
    """Make a device available, busy or offline for all clients of the driver; for an administrator."""

    device: Name
    status: DeviceStatus


class GetSupportedOperations(Call, frozen=True):
    """Ask which operations of the main subgraph the device supports; the model's pools come beside it.

    `consumers` is HIDL's numberOfConsumers: the counts of each subgraph's operands, the main one's first; AIDL: none.
    """

    device: Name
    model: bytes
    pools: LentMemories = ()
    consumers: Consumers = ()


class SupportedOperations(Call, frozen=True):
    """One answer for each operation, in order; none if `status` is an error."""

    supported: tuple[bool, ...]
    status: ErrorStatus = ErrorStatus.NONE
    message: Text = ""


class PrepareModel(Call, frozen=True):
    """Prepare a model for execution; `deadline_ns` -1 = none; the model's pools come beside it.

    Its compilation is saved to the cache files that come after them, if any. With `tells_progress` the driver says how
    far it is.
    """

    device: Name
    preference: I32
    priority: I32
    deadline_ns: I64
    model: bytes
    pools: LentMemories = ()
    consumers: Consumers = ()
    caches: CachesData = CachesData()
    hints: Hints = ()
    extensions: Prefixes = ()
    tells_progress: bool = False

    @property
    def fd_count(self) -> int:
        """Pools and cache files."""
        return len(self.pools) + self.caches.model_count + self.caches.data_count


class PrepareModelFromCache(Call, frozen=True):
    """Prepare the model whose compilation was saved to the files beside it; `deadline_ns` -1 = none."""

    device: Name
    deadline_ns: I64
    caches: CachesData

    @property
    def fd_count(self) -> int:
        """All cache files."""
        return self.caches.model_count + self.caches.data_count


class Reply(Answer, frozen=True):
    """The call is done, or begun."""


class PreparedModelReady(Answer, frozen=True):
    """The callback of both preparations: exactly once, before the Reply if that is an error; `model_id` is then 0."""

    model_id: U63


class PreparationProgress(Call, frozen=True):
    """How far a preparation is that was begun and asked for it: so many pieces of code are compiled, of so many."""

    done: U32
    total: U32


class ReleaseModel(Call, frozen=True):
    """The client needs the prepared model no more."""

    model_id: U63


class ConfigureBurst(Call, frozen=True):
    """Create a burst over two queues of the client's, whose memories come beside it: the request's, the result's."""

    model_id: U63
    request: MQDescriptorData
    result: MQDescriptorData


class BurstConfigured(Answer, frozen=True):
    """The burst, or why not; `burst_id` is then 0."""

    burst_id: U63


class GetMemories(Call, frozen=True):
    """The driver asks for the memories of slots that it does not know."""

    burst_id: U63
    slots: Annotated[tuple[I32, ...], Meta(max_length=MAX_FDS)]


class Memories(Answer, frozen=True):
    """One memory for each slot, in order, beside it; none after an error."""

    memories: LentMemories = ()


class FreeMemory(Message, frozen=True):
    """The slot stands for nothing any more. No answer, and no harm if it never stood for anything."""

    burst_id: U63
    slot: I32


class CloseBurst(Call, frozen=True):
    """End a burst: its thread, its queues, its memories."""

    burst_id: U63


class GetBurstError(Call, frozen=True):
    """Ask what a result packet cannot say about the execution that failed last."""

    burst_id: U63


class BurstError(Answer, frozen=True):
    """Exact status and text of the last failed execution; `sequence` is its number on the burst, 0 if none failed."""

    sequence: U63


class _WithRequest(Call, frozen=True):
    """Base of the calls that carry a request, whose memories come beside the message."""

    model_id: U63
    request: RequestData
    config: ConfigData

    @property
    def memories(self) -> LentMemories:
        """Those of the request's pools that come beside the message."""
        return self.request.memories


class Execute(_WithRequest, frozen=True):
    """Execute once and answer when it is done; `deadline_ns` -1 = none."""

    deadline_ns: I64


class ConfigureAidlBurst(Call, frozen=True):
    """Create a burst whose executions travel as messages, with their memories (AIDL IBurst); no queues."""

    model_id: U63


class ExecuteAidlBurst(Call, frozen=True):
    """Execute once on such a burst; one token for each pool: from 0 on the memory's identity, -1 = it has none."""

    burst_id: U63
    request: RequestData
    tokens: Tokens
    config: ConfigData
    deadline_ns: I64

    @property
    def memories(self) -> LentMemories:
        """Those of the request's pools that come beside the message."""
        return self.request.memories


class ReleaseMemoryResource(Call, frozen=True):
    """The driver may forget the memory of a token; an unknown token, and -1, are no error."""

    burst_id: U63
    token: I64


class _Result(Answer, frozen=True):
    """Base of what says how an execution went; times -1 = not measured."""

    shapes: Shapes = ()
    time_on_device_ns: Duration = -1
    time_in_driver_ns: Duration = -1


class Executed(_Result, frozen=True):
    """How it went; `stages` = the stage slots as beside a ring, from slot 0 on."""

    stages: Annotated[tuple[Word, ...], Meta(max_length=STATS_WORDS)] = ()


class ExecuteAsynchronously(_WithRequest, frozen=True):
    """Execute once: the Reply says at once whether it will be done, ExecutionFinished how it went."""

    deadline_ns: I64


class ExecutionFinished(_Result, frozen=True):
    """The callback of ExecuteAsynchronously: exactly once, and before the Reply if that is an error."""


class ExecuteFenced(_WithRequest, frozen=True):
    """Execute once all of `fence_count` fences are signalled, which come beside the message behind the memories.

    `duration_ns` counts from that moment; -1 = no limit, as in `deadline_ns`.
    """

    deadline_ns: I64
    duration_ns: I64
    fence_count: FdCount = 0

    @property
    def memories_and_fences(self) -> int:
        """How many descriptors come beside the message."""
        return len(self.memories) + self.fence_count


class FencedLaunched(Answer, frozen=True):
    """A fence, beside the message, that tells when the execution is done; `callback_id` knows more. None on error."""

    callback_id: U63
    fence_count: FdCount = 0


class GetExecutionInfo(Call, frozen=True):
    """Ask how a fenced execution went."""

    callback_id: U63


class FencedExecutionInfo(Answer, frozen=True):
    """Its status, GENERAL_FAILURE before its end; times from the call and from the last fence on; -1 = not measured."""

    launched_on_device_ns: Duration = -1
    launched_in_driver_ns: Duration = -1
    fenced_on_device_ns: Duration = -1
    fenced_in_driver_ns: Duration = -1


class ReleaseCallback(Call, frozen=True):
    """The client will not ask about this fenced execution any more; it goes on."""

    callback_id: U63


class CreateExecution(_WithRequest, frozen=True):
    """Check a request and keep it, to be run any number of times."""


class ExecutionCreated(Answer, frozen=True):
    """The reusable execution, or why not; `execution_id` is then 0."""

    execution_id: U63


class RunExecution(Call, frozen=True):
    """Run a reusable execution and answer when it is done; one run at a time."""

    execution_id: U63
    deadline_ns: I64


class RunExecutionFenced(Call, frozen=True):
    """Run a reusable execution once all fences are signalled; as ExecuteFenced."""

    execution_id: U63
    deadline_ns: I64
    duration_ns: I64
    fence_count: FdCount = 0


class ReleaseExecution(Call, frozen=True):
    """The client needs the reusable execution no more; a run that was begun goes on."""

    execution_id: U63


class Allocate(Call, frozen=True):
    """Ask for a buffer of the driver's; `model_ids` are prepared models of the device, `model_index` counts in them."""

    device: Name
    dimensions: Dimensions
    model_ids: Annotated[tuple[U63, ...], Meta(max_length=MAX_ROLES)]
    inputs: Roles
    outputs: Roles


class Allocated(Answer, frozen=True):
    """The buffer, and the token that stands for it in requests; or why not: both are then 0."""

    buffer_id: U63
    token: I32


class CopyFrom(Call, frozen=True):
    """Fill a buffer from the memory that comes beside it; `dimensions` () = those of the buffer."""

    buffer_id: U63
    memory: MemoryData
    dimensions: Dimensions


class CopyTo(Call, frozen=True):
    """Copy a buffer into the memory that comes beside it."""

    buffer_id: U63
    memory: MemoryData


class ReleaseBuffer(Call, frozen=True):
    """The client needs the buffer no more: its token is worth nothing from now on."""

    buffer_id: U63


class Goodbye(Message, frozen=True):
    """The client closes on purpose."""
