"""The tables of the control channel: who may send which message when, with how many file descriptors; and its bytes.

Rules of this file: everything about the order of messages is in TRANSITIONS, REPLIES, NOTIFICATIONS and FD_COUNTS,
which do not know which side they run on; what is not in a table is refused. A message is decoded as exactly one of the
types that its sender may send. Whoever breaks the rules is told by ProtocolError, and that connection ends. Left out:
the fields (`messages`), sockets, descriptors, waiting (`channel`), the state of one connection (`connection_state`),
and the meaning of the calls (`service`, `runtime`). docs/reference/protocol.md describes the same for readers.
"""

from __future__ import annotations

import functools
import operator
from enum import Enum

import msgspec

from nnfmq.hal.errors import InvalidArgument, ProtocolError
from nnfmq.serialize.messages import (
    MAX_NAME,
    MAX_TEXT,
    Allocate,
    Allocated,
    BurstConfigured,
    BurstError,
    Call,
    CloseBurst,
    ConfigureAidlBurst,
    ConfigureBurst,
    CopyFrom,
    CopyTo,
    CreateExecution,
    DeviceCapabilities,
    DeviceList,
    Execute,
    ExecuteAidlBurst,
    ExecuteAsynchronously,
    Executed,
    ExecuteFenced,
    ExecutionCreated,
    ExecutionFinished,
    FencedExecutionInfo,
    FencedLaunched,
    FreeMemory,
    GetBurstError,
    GetCapabilities,
    GetExecutionInfo,
    GetMemories,
    GetSupportedOperations,
    Goodbye,
    Hello,
    HelloReply,
    ListDevices,
    Memories,
    Message,
    PreparationProgress,
    PreparedModelReady,
    PrepareModel,
    PrepareModelFromCache,
    Refused,
    ReleaseBuffer,
    ReleaseCallback,
    ReleaseExecution,
    ReleaseMemoryResource,
    ReleaseModel,
    Reply,
    RunExecution,
    RunExecutionFenced,
    SetDeviceStatus,
    SupportedOperations,
)  # fmt: skip
from nnfmq.serialize.packets import BytesLike

PROTOCOL = 1  # of both files; HelloReply and Refused must stay readable for every other version
MAX_BODY_BYTES = 256 << 20  # as the channel's own limits, which a test compares


class PeerRole(Enum):
    """Who sent a message."""

    CLIENT = "client"
    DRIVER = "driver"

    @property
    def peer(self) -> PeerRole:
        """The other one."""
        return PeerRole.DRIVER if self is PeerRole.CLIENT else PeerRole.CLIENT


# ------------------------------------------------------------------------------------------------ the tables


class Phase(Enum):
    """Of a connection_state."""

    NEW = "new"
    GREETED = "greeted"
    OPEN = "open"
    CLOSED = "closed"


# Every answer that a call gets, each once, in any order except that a failed Reply comes last.
REPLIES: dict[type[Call], tuple[type[Call], ...]] = {
    ListDevices: (DeviceList,),
    GetCapabilities: (DeviceCapabilities,),
    SetDeviceStatus: (Reply,),
    GetSupportedOperations: (SupportedOperations,),
    PrepareModel: (PreparedModelReady, Reply),
    PrepareModelFromCache: (PreparedModelReady, Reply),
    ReleaseModel: (Reply,),
    Execute: (Executed,),
    ExecuteAsynchronously: (ExecutionFinished, Reply),
    ExecuteFenced: (FencedLaunched,),
    GetExecutionInfo: (FencedExecutionInfo,),
    ReleaseCallback: (Reply,),
    CreateExecution: (ExecutionCreated,),
    RunExecution: (Executed,),
    RunExecutionFenced: (FencedLaunched,),
    ReleaseExecution: (Reply,),
    ConfigureBurst: (BurstConfigured,),
    GetBurstError: (BurstError,),
    CloseBurst: (Reply,),
    ConfigureAidlBurst: (BurstConfigured,),
    ExecuteAidlBurst: (Executed,),
    ReleaseMemoryResource: (Reply,),
    Allocate: (Allocated,),
    CopyFrom: (Reply,),
    CopyTo: (Reply,),
    ReleaseBuffer: (Reply,),
    GetMemories: (Memories,),
}
# What may come, any number of times, while of a call this answer alone is missing.
NOTIFICATIONS: dict[type[Call], type[Call]] = {PreparationProgress: PreparedModelReady}
_DRIVER_CALLS = (GetMemories,)  # all others are the client's

_CLIENT_CALLS = [call for call in REPLIES if call not in _DRIVER_CALLS]
_DRIVER_REPLIES = [*(answer for call in _CLIENT_CALLS for answer in REPLIES[call]), *NOTIFICATIONS]

TRANSITIONS: dict[PeerRole, dict[Phase, dict[type[Message], Phase]]] = {
    PeerRole.CLIENT: {
        Phase.NEW: {Hello: Phase.GREETED},
        Phase.OPEN: {
            **dict.fromkeys(_CLIENT_CALLS, Phase.OPEN),
            Memories: Phase.OPEN,
            FreeMemory: Phase.OPEN,
            Goodbye: Phase.CLOSED,
        },
    },
    PeerRole.DRIVER: {
        # Before it has read the greeting: the supervisor, or an embedded driver that has no devices to offer.
        Phase.NEW: {Refused: Phase.CLOSED},
        Phase.GREETED: {HelloReply: Phase.OPEN, Refused: Phase.CLOSED},
        Phase.OPEN: dict.fromkeys((*_DRIVER_REPLIES, *_DRIVER_CALLS), Phase.OPEN),
        # What was on its way when the client said goodbye.
        Phase.CLOSED: dict.fromkeys((*_DRIVER_REPLIES, *_DRIVER_CALLS), Phase.CLOSED),
    },
}

# How many descriptors come with a message: a number, or the field or property that says it (a number, or their list).
FD_COUNTS: dict[type[Message], int | str] = {
    GetSupportedOperations: "pools",
    PrepareModel: "fd_count",
    PrepareModelFromCache: "fd_count",
    ConfigureBurst: 2,
    Memories: "memories",
    Execute: "memories",
    ExecuteAidlBurst: "memories",
    CopyFrom: 1,
    CopyTo: 1,
    ExecuteAsynchronously: "memories",
    ExecuteFenced: "memories_and_fences",
    FencedLaunched: "fence_count",
    CreateExecution: "memories",
    RunExecutionFenced: "fence_count",
}


def message_types_of(sender: PeerRole) -> tuple[type[Message], ...]:
    """Return every type that `sender` ever sends, in the order of the table."""
    return tuple(dict.fromkeys(kind for allowed in TRANSITIONS[sender].values() for kind in allowed))


def fd_count(message: Message) -> int:
    """Return how many file descriptors must come beside `message`."""
    count = FD_COUNTS.get(type(message), 0)
    if isinstance(count, str):
        value = getattr(message, count)
        return value if isinstance(value, int) else len(value)
    return count


# ------------------------------------------------------------------------------------------------ bytes


class _Envelope(msgspec.Struct):
    """What is read of a refused message, to say what it was."""

    type: str


def _decoder(sender: PeerRole) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, message_types_of(sender)))


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(_Envelope)
_decoders = {role: _decoder(role) for role in PeerRole}
_senders = {kind: role for role in PeerRole for kind in message_types_of(role)}
_NOT_A_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(message: Message) -> bytes:
    """Return the bytes of `message`; its error text is cut to MAX_TEXT characters.

    Whatever the receiver would refuse is not sent: raises InvalidArgument and says what is wrong with it.
    """
    try:
        data = _encoder.encode(_with_sendable_text(message))
        decode(data, sender=_senders[type(message)], fds=fd_count(message))
    except (ProtocolError, ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"{type(message).__name__} cannot be sent: {error}") from error
    return data


def decode(data: BytesLike, *, sender: PeerRole, fds: int | None = 0) -> Message:
    """Return the message in `data`, which came from `sender` with `fds` file descriptors; None: as many as it needs.

    Constants and models are copied out of `data`. Raises ProtocolError, saying what was received, for anything that
    `sender` may never send; whether it may be sent now is ConnectionState's question.
    """
    if len(data) > MAX_BODY_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes from the {sender.value}; the limit is {MAX_BODY_BYTES}")
    try:
        message = _decoders[sender].decode(data)
    except _NOT_A_MESSAGE as error:
        raise ProtocolError(f"the {sender.value} may not send {_described(data)}: {error}") from error
    require_fd_count(message, fds, fd_count(message))
    return message


def require_fd_count(message: object, given: int | None, needed: int) -> None:
    """Raise ProtocolError unless a message came with as many file descriptors as it needs; None: it did."""
    if given is not None and given != needed:
        raise ProtocolError(f"{type(message).__name__} came with {given} file descriptors instead of {needed}")


def _with_sendable_text(message: Message) -> Message:
    """Return `message` with its error text cut to size and without lone surrogates (from odd file names)."""
    text = getattr(message, "message", "")
    sendable = text[:MAX_TEXT].encode("utf-8", "replace").decode()
    return message if sendable == text else msgspec.structs.replace(message, message=sendable)


def _described(data: BytesLike) -> str:
    try:
        return f"this {_envelope.decode(data).type[:MAX_NAME]!r} message of {len(data)} bytes"
    except _NOT_A_MESSAGE:
        return f"these {len(data)} bytes ({bytes(data[:16]).hex(' ')} ...)"
