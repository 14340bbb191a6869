"""The control channel's messages, and the tables that say who may send which when, with how many file descriptors.

Rules of this file: everything about the order of messages is in TRANSITIONS, REPLIES and FILE_DESCRIPTORS, which do
not know which side they run on; what is not in a table is refused. A message is a msgpack map of its fields and its
type's name (the data inside are arrays), decoded as exactly one of the types that its sender may send. Whoever breaks
the rules is told by ProtocolError, and that connection ends. Numbers that the HAL judges by INVALID_ARGUMENT
(preference, priority, deadlines) pass; those that no HAL type can hold do not. Left out: sockets, descriptors, waiting
(`channel`), the state of one connection (`conversation`), and the meaning of the calls (`service`, `runtime`).
docs/protocol.md describes the same for readers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, ProtocolError
from nnfmq.hal.types import DeviceStatus, DeviceType, MeasureTiming, OutputShape, RequestArgument
from nnfmq.serialize.packet import Buffer
from nnfmq.serialize.stages import STAGE_SLOTS

INTERFACE = "AIDL v4"  # the HAL interface that both sides speak
PROTOCOL = 1  # of this file; HelloReply and Refused must stay readable for every other version
MAX_BODY_BYTES = 256 << 20  # as the channel's own limits, which a test compares
MAX_FDS = 250  # per message: Linux passes 253 at a time (SCM_MAX_FD), and a body may travel in one more
MAX_NAME = 256
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
Sizes: TypeAlias = Annotated[tuple[U63, ...], Meta(max_length=MAX_FDS)]
Dimensions: TypeAlias = Annotated[tuple[U32, ...], Meta(max_length=1024)]


class Role(Enum):
    """Who sent a message."""

    CLIENT = "client"
    DRIVER = "driver"

    @property
    def peer(self) -> Role:
        """The other one."""
        return Role.DRIVER if self is Role.CLIENT else Role.CLIENT


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
    """One device of the driver, with the extensions that it supports."""

    name: Name
    type: DeviceType
    version: Name
    feature_level: U32
    status: DeviceStatus
    extensions: Annotated[tuple[ExtensionData, ...], Meta(max_length=1024)]


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


def arguments_to_data(arguments: Sequence[RequestArgument]) -> tuple[ArgumentData, ...]:
    """Return the wire form of a request's inputs or outputs; raises InvalidArgument for numbers out of range."""
    try:
        return msgspec.convert(arguments, tuple[ArgumentData, ...], from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the request cannot be written: {error}") from error


def arguments_from_data(arguments: Sequence[ArgumentData]) -> tuple[RequestArgument, ...]:
    """Return the hal form of received inputs or outputs."""
    return msgspec.convert(arguments, tuple[RequestArgument, ...], from_attributes=True)


def shapes_to_data(shapes: Sequence[OutputShape]) -> tuple[ShapeData, ...]:
    """Return the wire form of output shapes; raises InvalidArgument for numbers out of range."""
    try:
        return msgspec.convert(shapes, tuple[ShapeData, ...], from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the output shapes cannot be written: {error}") from error


def shapes_from_data(shapes: Sequence[ShapeData]) -> tuple[OutputShape, ...]:
    """Return the hal form of received output shapes."""
    return msgspec.convert(shapes, tuple[OutputShape, ...], from_attributes=True)


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


class GetSupportedOperations(Call, frozen=True):
    """Ask which operations of the main subgraph the device supports; `pool_count` pools of the model come beside it."""

    device: Name
    model: bytes
    pool_count: FdCount = 0


class SupportedOperations(Call, frozen=True):
    """One answer for each operation, in order; none if `status` is an error."""

    supported: tuple[bool, ...]
    status: ErrorStatus = ErrorStatus.NONE
    message: Text = ""


class PrepareModel(Call, frozen=True):
    """Prepare a model for execution; `deadline_ns` -1 = none; `pool_count` pools of the model come beside it."""

    device: Name
    preference: I32
    priority: I32
    deadline_ns: I64
    model: bytes
    pool_count: FdCount = 0


class Reply(Answer, frozen=True):
    """The call is done, or begun."""


class PreparedModelReady(Answer, frozen=True):
    """The callback of PrepareModel: exactly once, and before the Reply if that is an error; `model_id` is then 0."""

    model_id: U63


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
    """One memory for each slot, in order, beside it, with its size in bytes; none after an error."""

    sizes: Sizes = ()


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


class Execute(Call, frozen=True):
    """Execute once, the ordinary way; the request's pools come beside it, of `pool_sizes` bytes."""

    model_id: U63
    inputs: Arguments
    outputs: Arguments
    measure: MeasureTiming
    deadline_ns: I64
    loop_timeout_ns: I64
    pool_sizes: Sizes = ()


class Executed(Answer, frozen=True):
    """How it went; times -1 = not measured; `stages` = the stage slots as beside a ring, from slot 0 on."""

    shapes: Shapes = ()
    time_on_device_ns: Duration = -1
    time_in_driver_ns: Duration = -1
    stages: Annotated[tuple[Word, ...], Meta(max_length=STAGE_SLOTS)] = ()


class Goodbye(Message, frozen=True):
    """The client closes on purpose."""


# ------------------------------------------------------------------------------------------------ the tables


class State(Enum):
    """Of a conversation."""

    NEW = "new"
    GREETED = "greeted"
    OPEN = "open"
    CLOSED = "closed"


_CLIENT_CALLS = (
    ListDevices, GetSupportedOperations, PrepareModel, ReleaseModel, ConfigureBurst, CloseBurst, GetBurstError, Execute,
)  # fmt: skip
_DRIVER_REPLIES = (
    DeviceList, SupportedOperations, Reply, PreparedModelReady, BurstConfigured, BurstError, Executed,
)  # fmt: skip

TRANSITIONS: dict[Role, dict[State, dict[type[Message], State]]] = {
    Role.CLIENT: {
        State.NEW: {Hello: State.GREETED},
        State.OPEN: {
            **dict.fromkeys(_CLIENT_CALLS, State.OPEN),
            Memories: State.OPEN,
            FreeMemory: State.OPEN,
            Goodbye: State.CLOSED,
        },
    },
    Role.DRIVER: {
        # The supervisor refuses without having read the greeting.
        State.NEW: {Refused: State.CLOSED},
        State.GREETED: {HelloReply: State.OPEN, Refused: State.CLOSED},
        State.OPEN: {**dict.fromkeys(_DRIVER_REPLIES, State.OPEN), GetMemories: State.OPEN},
        # What was on its way when the client said goodbye.
        State.CLOSED: {**dict.fromkeys(_DRIVER_REPLIES, State.CLOSED), GetMemories: State.CLOSED},
    },
}

# Every answer that a call gets, each once, in any order except that a failed Reply comes last.
REPLIES: dict[type[Call], tuple[type[Call], ...]] = {
    ListDevices: (DeviceList,),
    GetSupportedOperations: (SupportedOperations,),
    PrepareModel: (PreparedModelReady, Reply),
    ReleaseModel: (Reply,),
    ConfigureBurst: (BurstConfigured,),
    CloseBurst: (Reply,),
    GetBurstError: (BurstError,),
    Execute: (Executed,),
    GetMemories: (Memories,),
}

# How many descriptors come with a message: a number, or the field that says it (itself a number, or a list of them).
FILE_DESCRIPTORS: dict[type[Message], int | str] = {
    GetSupportedOperations: "pool_count",
    PrepareModel: "pool_count",
    ConfigureBurst: 2,
    Memories: "sizes",
    Execute: "pool_sizes",
}


def messages_of(sender: Role) -> tuple[type[Message], ...]:
    """Return every type that `sender` ever sends, in the order of the table."""
    return tuple(dict.fromkeys(kind for allowed in TRANSITIONS[sender].values() for kind in allowed))


def fd_count(message: Message) -> int:
    """Return how many file descriptors must come beside `message`."""
    count = FILE_DESCRIPTORS.get(type(message), 0)
    if isinstance(count, str):
        value = getattr(message, count)
        return value if isinstance(value, int) else len(value)
    return count


# ------------------------------------------------------------------------------------------------ bytes


class _Envelope(msgspec.Struct):
    """What is read of a refused message, to say what it was."""

    type: str


def _decoder(sender: Role) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, messages_of(sender)))


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(_Envelope)
_decoders = {role: _decoder(role) for role in Role}
_senders = {kind: role for role in Role for kind in messages_of(role)}
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


def decode(data: Buffer, *, sender: Role, fds: int = 0) -> Message:
    """Return the message in `data`, which came from `sender` with `fds` file descriptors.

    Constants and models are copied out of `data`. Raises ProtocolError, saying what was received, for anything that
    `sender` may never send; whether it may be sent now is Conversation's question.
    """
    if len(data) > MAX_BODY_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes from the {sender.value}; the limit is {MAX_BODY_BYTES}")
    try:
        message = _decoders[sender].decode(data)
    except _NOT_A_MESSAGE as error:
        raise ProtocolError(f"the {sender.value} may not send {_described(data)}: {error}") from error
    if fds != fd_count(message):
        kind = type(message).__name__
        raise ProtocolError(f"{kind} came with {fds} file descriptors instead of {fd_count(message)}")
    return message


def _with_sendable_text(message: Message) -> Message:
    """Return `message` with its error text cut to size and without lone surrogates (from odd file names)."""
    text = getattr(message, "message", "")
    sendable = text[:MAX_TEXT].encode("utf-8", "replace").decode()
    return message if sendable == text else msgspec.structs.replace(message, message=sendable)


def _described(data: Buffer) -> str:
    try:
        return f"this {_envelope.decode(data).type[:MAX_NAME]!r} message of {len(data)} bytes"
    except _NOT_A_MESSAGE:
        return f"these {len(data)} bytes ({bytes(data[:16]).hex(' ')} ...)"
