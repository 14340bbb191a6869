"""The control channel's protocol: who may send which message when, with how many file descriptors; and its encoding.

Everything about the order of messages is in the tables TRANSITIONS, REPLIES, NOTIFICATIONS and FD_COUNTS, which are the
same for both sides; a message that no table allows is rejected. A received message is decoded as one of the types that
its sender may send. A violation raises ProtocolError, and the connection is closed.

The fields are in `messages`, the phase and the pending calls of one connection below, sockets and
waiting in `channel`; `driver` and `client` implement the calls. docs/reference/protocol.md documents the protocol.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, ProtocolError
from nnfmq.serialize import messages
from nnfmq.serialize.message_codec import DECODE_ERRORS, MessageCodec
from nnfmq.serialize.messages.common import U63
from nnfmq.serialize.models import DECODED_BYTES_PER_BYTE
from nnfmq.serialize.packets import BytesLike

__all__ = [
    "NO_RESULT",
    "ConnectionState",
    "MessageSize",
    "PeerRole",
    "Phase",
    "call_type",
    "decode",
    "encode",
    "error_replies",
    "fd_count",
    "message_size",
    "message_types_of",
]

PROTOCOL = 1  # the version; every other version must be able to decode Hello, HelloReply and Refused
MAX_BODY_BYTES = 256 << 20  # `channel` has the same limit, which a test compares


class PeerRole(Enum):
    """A side of the control channel."""

    CLIENT = "client"
    DRIVER = "driver"

    @property
    def peer(self) -> PeerRole:
        """The other side."""
        return PeerRole.DRIVER if self is PeerRole.CLIENT else PeerRole.CLIENT


# ------------------------------------------------------------------------------------------------ the tables


class Phase(Enum):
    """The phase of a connection."""

    NEW = "new"
    GREETED = "greeted"
    OPEN = "open"
    CLOSED = "closed"


# The replies to each call: each comes once, in any order, except that a Reply with an error comes last.
REPLIES: dict[type[messages.Call], tuple[type[messages.Call], ...]] = {
    messages.ListDevices: (messages.DeviceList,),
    messages.GetCapabilities: (messages.DeviceCapabilities,),
    messages.SetDeviceStatus: (messages.Reply,),
    messages.SetClientClass: (messages.Reply,),
    messages.GetStatistics: (messages.StatisticsMemory,),
    messages.GetSupportedOperations: (messages.SupportedOperations,),
    messages.DescribeFile: (messages.FileDescription,),
    messages.PrepareModel: (messages.PreparedModelReady, messages.Reply),
    messages.PrepareModelFromCache: (messages.PreparedModelReady, messages.Reply),
    messages.ReleaseModel: (messages.Reply,),
    messages.Execute: (messages.Executed,),
    messages.ExecuteAsynchronously: (messages.ExecutionFinished, messages.Reply),
    messages.ExecuteFenced: (messages.FencedLaunched,),
    messages.GetExecutionInfo: (messages.FencedExecutionInfo,),
    messages.ReleaseCallback: (messages.Reply,),
    messages.CreateExecution: (messages.ExecutionCreated,),
    messages.RunExecution: (messages.Executed,),
    messages.RunExecutionFenced: (messages.FencedLaunched,),
    messages.ReleaseExecution: (messages.Reply,),
    messages.ConfigureBurst: (messages.BurstConfigured,),
    messages.GetBurstError: (messages.BurstError,),
    messages.CloseBurst: (messages.Reply,),
    messages.ConfigureAidlBurst: (messages.BurstConfigured,),
    messages.ExecuteAidlBurst: (messages.Executed,),
    messages.ReleaseMemoryResource: (messages.Reply,),
    messages.Allocate: (messages.Allocated,),
    messages.CopyFrom: (messages.Reply,),
    messages.CopyTo: (messages.Reply,),
    messages.ReleaseBuffer: (messages.Reply,),
    messages.StartTrace: (messages.Reply,),
    messages.TraceDriver: (messages.DriverTraced,),
    messages.GetMemories: (messages.Memories,),
}
# Messages that may come any number of times while this reply is the only one of a call that has not arrived.
NOTIFICATIONS: dict[type[messages.Call], type[messages.Call]] = {
    messages.PreparationProgress: messages.PreparedModelReady
}
MONITOR_CALLS = frozenset(
    (
        messages.ListDevices,
        messages.GetCapabilities,
        messages.SetDeviceStatus,
        messages.GetStatistics,
        messages.SetClientClass,
        messages.TraceDriver,
    )
)
"""What a client may call that has said in its Hello that it only looks at the driver."""
_DRIVER_CALLS = (messages.GetMemories,)  # the client sends all others

_CLIENT_CALLS = [call for call in REPLIES if call not in _DRIVER_CALLS]
_DRIVER_REPLIES = [*(reply for call in _CLIENT_CALLS for reply in REPLIES[call]), *NOTIFICATIONS]

TRANSITIONS: dict[PeerRole, dict[Phase, dict[type[messages.Message], Phase]]] = {
    PeerRole.CLIENT: {
        Phase.NEW: {messages.Hello: Phase.GREETED},
        Phase.OPEN: {
            **dict.fromkeys(_CLIENT_CALLS, Phase.OPEN),
            messages.Memories: Phase.OPEN,
            messages.FreeMemory: Phase.OPEN,
            messages.Leave: Phase.OPEN,
            messages.Goodbye: Phase.CLOSED,
        },
    },
    PeerRole.DRIVER: {
        # Sent before the greeting was read: by the supervisor, or by an embedded driver that has no devices.
        Phase.NEW: {messages.Refused: Phase.CLOSED},
        Phase.GREETED: {messages.HelloReply: Phase.OPEN, messages.Refused: Phase.CLOSED},
        Phase.OPEN: dict.fromkeys((*_DRIVER_REPLIES, *_DRIVER_CALLS, messages.GoAway), Phase.OPEN),
        # Messages that were sent before the client's Goodbye arrived.
        Phase.CLOSED: dict.fromkeys((*_DRIVER_REPLIES, *_DRIVER_CALLS, messages.GoAway), Phase.CLOSED),
    },
}

# The number of file descriptors that come with a message: a number, or the field or property that has it. If that is a
# list, its length counts.
FD_COUNTS: dict[type[messages.Message], int | str] = {
    messages.HelloReply: "pages",
    messages.StatisticsMemory: "memories",
    messages.GetSupportedOperations: "pools",
    messages.DescribeFile: "pools",
    messages.FileDescription: "replaced",
    messages.PrepareModel: "fd_count",
    messages.PrepareModelFromCache: "fd_count",
    messages.ConfigureBurst: 2,
    messages.Memories: "memories",
    messages.Execute: "memories",
    messages.ExecuteAidlBurst: "memories",
    messages.CopyFrom: 1,
    messages.CopyTo: 1,
    messages.ExecuteAsynchronously: "memories",
    messages.ExecuteFenced: "memories_and_fences",
    messages.FencedLaunched: "fence_count",
    messages.CreateExecution: "memories",
    messages.RunExecutionFenced: "fence_count",
    messages.StartTrace: 1,
    messages.DriverTraced: "fd_count",
}


# What the fields that a reply cannot leave out are after an error: no id is 0.
NO_RESULT: dict[str, Any] = {
    **dict.fromkeys(("model_id", "burst_id", "execution_id", "callback_id", "buffer_id"), 0),
    "token": 0,
    "sequence": 0,
    "supported": (),
}


def message_types_of(sender: PeerRole) -> tuple[type[messages.Message], ...]:
    """Return every type that `sender` may send in some phase, in the order of the table."""
    return tuple(dict.fromkeys(kind for allowed in TRANSITIONS[sender].values() for kind in allowed))


def error_replies(kind: type[messages.Call], call: int, status: ErrorStatus, text: str) -> list[messages.Call]:
    """Return all replies to a call that failed: each has the status and the text, and no result."""
    fields = {**NO_RESULT, "call": call, "status": status, "message": text}
    return [
        reply(**{name: fields[name] for name in reply.__struct_fields__ if name in fields}) for reply in REPLIES[kind]
    ]


# ------------------------------------------------------------------------------------------------ encoding


class MessageSize(msgspec.Struct, frozen=True):
    """The type, the call and the model of a message that is not decoded yet; they tell the memory for decoding.

    Attributes:
        type: The type's name; it is not checked.
        call: The call id; 0 if the message has none.
        model: The encoded model, without a copy; empty if the message has none.
    """

    type: str
    call: U63 = 0
    model: msgspec.Raw = msgspec.Raw()

    def decoded_bytes(self, encoded_bytes: int) -> int:
        """Return the most memory that decoding the message takes; a model stays as it is."""
        model_bytes = memoryview(self.model).nbytes
        return model_bytes + (encoded_bytes - model_bytes) * DECODED_BYTES_PER_BYTE


def _describe(data: BytesLike) -> str:
    try:
        return f"this {_size_decoder.decode(data).type[: messages.MAX_NAME]!r} message of {len(data)} bytes"
    except DECODE_ERRORS:
        return f"these {len(data)} bytes ({bytes(data[:16]).hex(' ')} ...)"


_size_decoder = msgspec.msgpack.Decoder(MessageSize)
_codec: MessageCodec[messages.Message] = MessageCodec(
    {role: message_types_of(role) for role in PeerRole}, FD_COUNTS, _describe
)
_senders = {kind: role for role in PeerRole for kind in message_types_of(role)}
fd_count = _codec.fd_count


def encode(message: messages.Message) -> bytes:
    """Return the bytes of `message`; its error text is cut to MAX_TEXT characters.

    Raises:
        InvalidArgument: If the receiver would reject the message. The text has the reason.
    """
    try:
        data = _codec.encode(_with_sendable_text(message))
        decode(data, sender=_senders[type(message)], fds=fd_count(message))
    except (ProtocolError, ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"{type(message).__name__} cannot be sent: {error}") from error
    return data


def decode(data: BytesLike, *, sender: PeerRole, fds: int | None = 0) -> messages.Message:
    """Return the message in `data`, which `sender` sent with `fds` file descriptors.

    If `fds` is None, the number of file descriptors is not checked. Constants and models are copied out of `data`.
    `ConnectionState` checks whether the message may be sent in the current phase.

    Raises:
        ProtocolError: If `sender` may never send this message. The text has what was received.
    """
    if len(data) > MAX_BODY_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes from the {sender.value}; the limit is {MAX_BODY_BYTES}")
    return _codec.decode(data, sender=sender, fds=fds)


def message_size(data: BytesLike) -> MessageSize:
    """Return the parts of a message that decoding needs memory for. Creates no objects of its contents.

    Raises:
        ProtocolError: If `data` is not a message.
    """
    try:
        return _size_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"these {len(data)} bytes are not a message: {error}") from error


def call_type(name: str, sender: PeerRole) -> type[messages.Call] | None:
    """Return the call of `sender` whose type has this name, or None."""
    return next((kind for kind in REPLIES if kind.__name__ == name and _senders[kind] is sender), None)


def _with_sendable_text(message: messages.Message) -> messages.Message:
    """Return `message` with its error text cut, and without lone surrogates (undecodable bytes of file names)."""
    text = getattr(message, "message", "")
    sendable = text[: messages.MAX_TEXT].encode("utf-8", "replace").decode()
    return message if sendable == text else msgspec.structs.replace(message, message=sendable)


# ----------------------------------------------------------------------------------------------------------------------
# Sans-I/O state machine of one control connection: its phase, and the pending calls in both directions.
#
# Client and driver each keep a `ConnectionState` and pass it every message that they send or receive. It compares the
# message with the tables of `control_protocol` and raises ProtocolError if the message is not allowed in the current
# phase. It performs no I/O and stores no payload.


class _PendingCall(NamedTuple):
    """The type of a call, and the types of the replies that have not arrived."""

    kind: type[messages.Call]
    missing: tuple[type[messages.Call], ...]


class ConnectionState:
    """The phase of one connection, and its pending calls in both directions. Thread-safe.

    A sender passes its message *before* it sends it: otherwise the peer's reply could be processed first.
    """

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self._lock = threading.Lock()
        self._last_call_id = dict.fromkeys(PeerRole, 0)
        self._pending: dict[PeerRole, dict[int, _PendingCall]] = {role: {} for role in PeerRole}

    def next_call_id(self, caller: PeerRole) -> int:
        """Return the id for a new call of `caller`: 1, 2, 3, ...; an id is never reused."""
        with self._lock:
            self._last_call_id[caller] += 1
            return self._last_call_id[caller]

    def process_message(self, message: messages.Message, sender: PeerRole) -> None:
        """Record that `sender` sent `message`. An error changes nothing.

        Raises:
            ProtocolError: If the message is not allowed in this phase, or a call uses the id of a pending call, or a
                reply belongs to no pending call or has the wrong type for it.
        """
        kind = type(message)
        with self._lock:
            next_phase = self._next_phase(kind, sender)
            if isinstance(message, messages.Call):
                if kind in REPLIES:
                    self._begin_call(kind, message.call, sender)
                else:
                    _process_reply(message, self._pending[sender.peer])
            self.phase = next_phase

    def process_call(self, kind: type[messages.Call], call: int, sender: PeerRole) -> None:
        """Record a call of `sender` whose message is not decoded. An error changes nothing.

        Raises:
            ProtocolError: As `process_message`.
        """
        with self._lock:
            self._next_phase(kind, sender)  # which is the same: calls do not change the phase
            self._begin_call(kind, call, sender)

    def _next_phase(self, kind: type[messages.Message], sender: PeerRole) -> Phase:
        next_phase = TRANSITIONS[sender].get(self.phase, {}).get(kind)
        if next_phase is None:
            raise ProtocolError(
                f"the {sender.value} may not send {kind.__name__} while the connection is {self.phase.value}"
            )
        return next_phase

    def _begin_call(self, kind: type[messages.Call], call: int, sender: PeerRole) -> None:
        pending = self._pending[sender]
        if call in pending:
            raise ProtocolError(f"{kind.__name__} uses call id {call}, which is still pending")
        pending[call] = _PendingCall(kind, REPLIES[kind])

    def cancel_call(self, message: messages.Call, sender: PeerRole) -> None:
        """Remove a call that could not be sent after all. Replies, and calls that are not pending, change nothing."""
        if type(message) in REPLIES:
            with self._lock:
                self._pending[sender].pop(message.call, None)

    def pending_calls(self, caller: PeerRole) -> tuple[type[messages.Call], ...]:
        """Return the types of the pending calls of `caller`, oldest first."""
        with self._lock:
            return tuple(pending.kind for pending in self._pending[caller].values())


def _process_reply(reply: messages.Call, pending: dict[int, _PendingCall]) -> None:
    """Record a reply or notification to one of these pending calls, and remove the call after its last reply."""
    call = pending.get(reply.call)
    if call is None:
        raise ProtocolError(f"{_name(reply)} replies to call {reply.call}, which is not pending")
    kind = type(reply)
    if call.missing == (NOTIFICATIONS.get(kind),):
        return
    if kind not in call.missing:
        raise ProtocolError(f"{_name(reply)} is no reply to {call.kind.__name__} (call {reply.call}) now")
    missing = tuple(other for other in call.missing if other is not kind)
    if not missing:
        del pending[reply.call]
    elif isinstance(reply, messages.Reply) and reply.status is not ErrorStatus.NONE:
        failed = call.kind.__name__
        raise ProtocolError(f"{failed} (call {reply.call}) failed before its {missing[0].__name__} came")
    else:
        pending[reply.call] = call._replace(missing=missing)


def _name(message: messages.Message) -> str:
    return type(message).__name__
