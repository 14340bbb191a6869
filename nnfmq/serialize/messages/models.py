"""Messages that prepare, query and release models and driver-managed buffers (IDevice, IBuffer)."""

from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize.messages.common import (
    I32,
    I64,
    MAX_FDS,
    MAX_NAME,
    MAX_ROLES,
    U32,
    U63,
    Call,
    Data,
    Dimensions,
    FdCount,
    Hints,
    MemoryData,
    MemoryList,
    Name,
    Prefixes,
    StatusReply,
    Text,
)

__all__ = [
    "Allocate",
    "Allocated",
    "CachesData",
    "Consumers",
    "CopyFrom",
    "CopyTo",
    "DescribeFile",
    "FileDescription",
    "GetSupportedOperations",
    "PreparationProgress",
    "PrepareModel",
    "PrepareModelFromCache",
    "PreparedModelReady",
    "ReleaseBuffer",
    "ReleaseModel",
    "RoleData",
    "Roles",
    "SupportedOperations",
]

Consumers: TypeAlias = tuple[tuple[U32, ...], ...]
"""HIDL's numberOfConsumers: counts of the operands of each subgraph, the main subgraph first. Empty for AIDL."""


class CachesData(Data, frozen=True):
    """The cache files that come with a message, after its pools: the model's files, then the data's."""

    token: Annotated[bytes, Meta(max_length=MAX_NAME)] = b""
    model_count: FdCount = 0
    data_count: FdCount = 0


class GetSupportedOperations(Call, frozen=True):
    """Ask which operations of the main subgraph the device supports; the model's pools come with the message."""

    trace_phase: ClassVar = "PC"
    device: Name
    model: bytes
    pools: MemoryList = ()
    consumers: Consumers = ()


class SupportedOperations(Call, frozen=True):
    """One flag for each operation, in order; none if `status` is an error."""

    supported: tuple[bool, ...]
    status: ErrorStatus = ErrorStatus.NONE
    message: Text = ""


class DescribeFile(Call, frozen=True):
    """Ask what a device of `nnfmq.hosted` finds in a model file, whose bytes are the pools, in order.

    `file` is the JSON of a `hal.hosted.HostedCall` without inputs and outputs. `deadline_ns` -1 = none.
    """

    trace_phase: ClassVar = "PC"
    device: Name
    deadline_ns: I64
    file: bytes
    pools: MemoryList = ()


class FileDescription(StatusReply, frozen=True):
    """The JSON of a `hal.hosted.HostedDescription`; empty if `status` is an error.

    `replaced` are indexes of the call's pools: with the reply comes, for each, sealed memory with the same bytes, which
    the driver shares among clients.
    """

    description: bytes = b""
    replaced: Annotated[tuple[U32, ...], Meta(max_length=MAX_FDS)] = ()


class PrepareModel(Call, frozen=True):
    """Prepare a model for execution; `deadline_ns` -1 = none. The model's pools come with the message.

    The driver saves the compilation to the cache files that come after the pools, if there are any. If
    `tells_progress` is set, it sends `PreparationProgress`. `name` is what statistics call the model; `version` is that
    of a model of the model repository, otherwise 0.
    """

    trace_phase: ClassVar = "PC"
    device: Name
    preference: I32
    priority: I32
    deadline_ns: I64
    model: bytes
    pools: MemoryList = ()
    consumers: Consumers = ()
    caches: CachesData = CachesData()
    hints: Hints = ()
    extensions: Prefixes = ()
    tells_progress: bool = False
    name: Name = ""
    version: U63 = 0

    @property
    def fd_count(self) -> int:
        """The number of pools and cache files."""
        return len(self.pools) + self.caches.model_count + self.caches.data_count


class PrepareModelFromCache(Call, frozen=True):
    """Prepare the model whose compilation was saved to the files that come with it; `deadline_ns` -1 = none.

    `name` is what statistics call the model.
    """

    trace_phase: ClassVar = "PC"
    device: Name
    deadline_ns: I64
    caches: CachesData
    name: Name = ""

    @property
    def fd_count(self) -> int:
        """The number of cache files."""
        return self.caches.model_count + self.caches.data_count


class PreparedModelReady(StatusReply, frozen=True):
    """The callback of both preparations, sent exactly once; `model_id` is 0 after an error.

    If preparing fails early, it precedes the Reply. `program` is a `hal.preparation.ProgramKind`, and `compiled` the
    number of operations of the main subgraph that machine code executes. `calls_row` is the row of the client's page of
    statistics for the executions of this model.
    """

    model_id: U63
    program: U32 = 0
    compiled: U32 = 0
    calls_row: U32 = 0


class PreparationProgress(Call, frozen=True):
    """Progress of a preparation: `done` of `total` kernels are compiled. Sent only if the call asked for it.

    `is_kept`: the program will be in a cache, so that the next preparation of the model compiles nothing.
    """

    done: U32
    total: U32
    is_kept: bool = False


class ReleaseModel(Call, frozen=True):
    """Release a prepared model."""

    trace_phase: ClassVar = "PT"
    model_id: U63


# ----------------------------------------------------------------------------------------------------------------------
# Messages about driver-managed buffers (IDevice.allocate and IBuffer).


class RoleData(Data, frozen=True):
    """The HAL's BufferRole."""

    model_index: U32
    io_index: U32
    probability: float


Roles: TypeAlias = Annotated[tuple[RoleData, ...], Meta(max_length=MAX_ROLES)]


class Allocate(Call, frozen=True):
    """Allocate a driver-managed buffer; a role's `model_index` is an index of `model_ids`, models of the device."""

    trace_phase: ClassVar = "PIO"
    device: Name
    dimensions: Dimensions
    model_ids: Annotated[tuple[U63, ...], Meta(max_length=MAX_ROLES)]
    inputs: Roles
    outputs: Roles


class Allocated(StatusReply, frozen=True):
    """The id of the buffer, and its token for requests; both are 0 after an error."""

    buffer_id: U63
    token: I32


class CopyFrom(Call, frozen=True):
    """Copy the memory that comes with the message into a buffer; `dimensions` () = those of the buffer."""

    trace_phase: ClassVar = "PIO"
    buffer_id: U63
    memory: MemoryData
    dimensions: Dimensions


class CopyTo(Call, frozen=True):
    """Copy a buffer into the memory that comes with the message."""

    trace_phase: ClassVar = "PIO"
    buffer_id: U63
    memory: MemoryData


class ReleaseBuffer(Call, frozen=True):
    """Release a buffer; its token is invalid from then on."""

    trace_phase: ClassVar = "PT"
    buffer_id: U63
