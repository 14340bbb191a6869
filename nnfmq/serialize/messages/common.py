"""The common parts of all messages: limits, field types, base classes, memories, hints; and those of the handshake."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeAlias, cast

import msgspec
from msgspec import Meta

from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import ErrorStatus, InvalidArgument
from nnfmq.hal.types import ExtensionNameAndPrefix, Pool, Protection, SharedPool, TokenValuePair

__all__ = [
    "I32",
    "I64",
    "MAX_FDS",
    "MAX_HINTS",
    "MAX_HINT_BYTES",
    "MAX_NAME",
    "MAX_POOLS",
    "MAX_ROLES",
    "MAX_TEXT",
    "U32",
    "U63",
    "Call",
    "Data",
    "Dimensions",
    "Duration",
    "FdCount",
    "GoAway",
    "Goodbye",
    "Greeting",
    "Hello",
    "HelloReply",
    "HintData",
    "Hints",
    "Leave",
    "MemoryData",
    "MemoryList",
    "Message",
    "Name",
    "PrefixData",
    "Prefixes",
    "Refused",
    "Reply",
    "StatusReply",
    "Text",
    "Word",
    "hints_from_data",
    "hints_to_data",
    "memory_to_data",
    "to_data",
]

MAX_FDS = 250  # per message: Linux passes up to 253 at once (SCM_MAX_FD), and a large body travels in one more
MAX_POOLS = 65536  # of a request, driver-managed buffers included
MAX_ROLES = 65536  # of a buffer: inputs and outputs each
MAX_NAME = 256  # characters
MAX_HINTS = 256  # of a call: hints and prefixes each
MAX_HINT_BYTES = 64 * 1024
MAX_TEXT = 4096  # characters of an error message; the sender cuts longer ones

U32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
U63: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
I64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Duration: TypeAlias = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""Nanoseconds; -1 = not measured."""
Word: TypeAlias = Annotated[int, Meta(ge=0)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
FdCount: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_FDS)]
Dimensions: TypeAlias = Annotated[tuple[U32, ...], Meta(max_length=1024)]


# ------------------------------------------------------------------------------------------------ base classes


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base class of all messages."""


class Greeting(Message, frozen=True, forbid_unknown_fields=False):
    """Base class of the messages that every protocol version must be able to decode: unknown fields are ignored."""


class Call(Message, frozen=True):
    """Base class of calls and of their replies: both contain the call id that the caller chose."""

    call: U63

    trace_phase: ClassVar[str]
    """The phase of a call in traces, of `phase_table.PHASES`. Each call declares its own; replies have none."""

    @classmethod
    def trace_name(cls, layer: str) -> str:
        """Return the name of the slice of a call in `layer`."""
        return f"[NN_{layer}_{cls.trace_phase}]{cls.__name__}"


class StatusReply(Call, frozen=True):
    """Base class of the replies that have a status and, if it is an error, a text."""

    status: ErrorStatus
    message: Text


class Data(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the data inside messages: an array of the fields in their order."""


def to_data(value: Any, kind: Any, what: str) -> Any:
    """Convert values of the HAL to the Data type `kind`.

    Raises:
        InvalidArgument: If a number is out of the range of its field. The text names `what`.
    """
    try:
        return msgspec.convert(value, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the {what} cannot be written: {error}") from error


# ------------------------------------------------------------------------------------------------ memories and hints


class MemoryData(Data, frozen=True, tag="memory"):
    """A memory whose file descriptor comes with the message: a range of that file, and the allowed access."""

    size_bytes: U63
    offset: U63 = 0
    protection: U32 = Protection.READ_WRITE.value


MemoryList: TypeAlias = Annotated[tuple[MemoryData, ...], Meta(max_length=MAX_FDS)]


class HintData(Data, frozen=True):
    """The HAL's TokenValuePair."""

    token: I32
    value: Annotated[bytes, Meta(max_length=MAX_HINT_BYTES)]


class PrefixData(Data, frozen=True):
    """The HAL's ExtensionNameAndPrefix."""

    name: Name
    prefix: U32


Hints: TypeAlias = Annotated[tuple[HintData, ...], Meta(max_length=MAX_HINTS)]
Prefixes: TypeAlias = Annotated[tuple[PrefixData, ...], Meta(max_length=MAX_HINTS)]


def memory_to_data(pool: Pool) -> MemoryData:
    """Return the description of a memory whose file descriptor is sent with the message.

    Raises:
        InvalidArgument: If the pool has no file descriptor.
    """
    if not hasattr(pool, "fileno"):  # a test double, or a private copy in the driver
        raise InvalidArgument(f"pools must be nnfmq memory to be sent, not {type(pool).__name__}")
    shared = cast(SharedPool, pool)
    return MemoryData(shared.size_bytes, shared.offset, int(shared.protection))


def hints_to_data(
    hints: Sequence[TokenValuePair], extensions: Sequence[ExtensionNameAndPrefix]
) -> tuple[Hints, Prefixes]:
    """Return the wire form of hints, and of the prefixes that they use.

    Raises:
        InvalidArgument: If a number is out of the range of its field.
    """
    return to_data(tuple(hints), Hints, "hints"), to_data(tuple(extensions), Prefixes, "extensions")


def hints_from_data(
    hints: Hints, extensions: Prefixes
) -> tuple[tuple[TokenValuePair, ...], tuple[ExtensionNameAndPrefix, ...]]:
    """Return received hints, and the prefixes that they use, as values of the HAL."""
    return (
        msgspec.convert(hints, tuple[TokenValuePair, ...], from_attributes=True),
        msgspec.convert(extensions, tuple[ExtensionNameAndPrefix, ...], from_attributes=True),
    )


# msgspec inspects a struct at the first conversion to it. If a second thread converts to it meanwhile, msgspec reads
# a half-built description and the process crashes. So every module converts once at import, while there is one thread.
msgspec.convert((), tuple[TokenValuePair, ...])
msgspec.convert((), tuple[ExtensionNameAndPrefix, ...])


# ------------------------------------------------------------------------------------------------ handshake and end


class Hello(Greeting, frozen=True):
    """The client's first message, with its protocol version and HAL interface.

    `client_class` is the class that it asks for; None = the driver decides. `is_monitor`: it only looks at the driver,
    and may send no other calls than those of `control_protocol.MONITOR_CALLS`.
    """

    protocol: U32
    interface: Name
    client_name: Name
    client_class: ClientClass | None = None
    is_monitor: bool = False


class HelloReply(Greeting, frozen=True):
    """The driver accepts the client; `core` is the queue core that it runs on.

    `driver_pid` is the supervisor's pid and `worker_pid` that of the process that serves this client; an embedded
    driver is both. `pages`: whether the memory comes with it in which the client counts its executions, 0 or 1.
    """

    protocol: U32
    interface: Name
    driver_name: Name
    driver_pid: U32
    worker_pid: U32
    core: Name
    pages: Annotated[int, Meta(ge=0, le=1)] = 0


class Refused(Greeting, frozen=True):
    """The driver rejects the client, and closes the connection."""

    status: ErrorStatus
    message: Text


class GoAway(Message, frozen=True):
    """The driver wants the client to move to its successor; `message` says why. Calls in progress get their replies.

    `is_replaced`: the successor listens already, and this driver serves the client until that has moved.
    """

    message: Text
    is_replaced: bool = False


class Leave(Message, frozen=True):
    """The client has moved: it begins nothing more over this connection, and waits for what is in progress."""


class Goodbye(Message, frozen=True):
    """The client is about to close the connection."""


class Reply(StatusReply, frozen=True):
    """The reply to calls without a result, and the launch status of calls with a callback."""
