"""Messages about bursts: over two queues (HIDL's IBurstContext), and over messages (AIDL's IBurst)."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from nnfmq.serialize.messages.common import I32, I64, MAX_FDS, U32, U63, Call, Data, MemoryList, Message, StatusReply
from nnfmq.serialize.messages.execution_messages import ConfigData, RequestData

__all__ = [
    "BurstConfigured",
    "BurstError",
    "CloseBurst",
    "ConfigureAidlBurst",
    "ConfigureBurst",
    "ExecuteAidlBurst",
    "FreeMemory",
    "GetBurstError",
    "GetMemories",
    "GrantorData",
    "MQDescriptorData",
    "Memories",
    "ReleaseMemoryResource",
    "Tokens",
]

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

    model_id: U63
    request: MQDescriptorData
    result: MQDescriptorData


class BurstConfigured(StatusReply, frozen=True):
    """The id of the burst; 0 after an error."""

    burst_id: U63


class GetMemories(Call, frozen=True):
    """The driver requests the memories of slots that it does not have (IBurstCallback.getMemories)."""

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

    burst_id: U63


class GetBurstError(Call, frozen=True):
    """Request what a result packet cannot contain about the last failed execution: the exact status and a text."""

    burst_id: U63


class BurstError(StatusReply, frozen=True):
    """Status and text of the last failed execution; `sequence` is its number on the burst, 0 if none has failed."""

    sequence: U63


class ConfigureAidlBurst(Call, frozen=True):
    """Create a burst without queues, whose executions are messages (IPreparedModel.configureExecutionBurst)."""

    model_id: U63


class ExecuteAidlBurst(Call, frozen=True):
    """Execute once on an AIDL burst, with one memory identifier token for each pool; -1 = no token."""

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

    burst_id: U63
    token: I64
