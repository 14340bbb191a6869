"""Every error that nnfmq raises on purpose. Who is at fault is in the type, and each carries its ErrorStatus.

    NnfmqError                             status
    ├── InvalidArgument                    INVALID_ARGUMENT: our caller's mistake (also a ValueError)
    │   └── BadState                       the call is right, but not now: it never left this process
    ├── DeviceUnavailable                  DEVICE_UNAVAILABLE: offline, busy, or no driver to be had
    ├── GeneralFailure                     GENERAL_FAILURE: anything unspecified
    │   ├── ProtocolError                  the peer's bytes are wrong; its connection ends. `offset` says where
    │   └── QueueCorrupted                 the peer's counters or descriptor are impossible
    ├── OutputInsufficientSize             OUTPUT_INSUFFICIENT_SIZE: `output_shapes` says what was needed
    ├── MissedDeadline                     (also a TimeoutError)
    │   ├── MissedDeadlineTransient        MISSED_DEADLINE_TRANSIENT: may succeed later
    │   └── MissedDeadlinePersistent       MISSED_DEADLINE_PERSISTENT: will not, with such a limit
    ├── ResourceExhausted
    │   ├── ResourceExhaustedTransient     RESOURCE_EXHAUSTED_TRANSIENT
    │   └── ResourceExhaustedPersistent    RESOURCE_EXHAUSTED_PERSISTENT
    └── DeadObject                         DEAD_OBJECT: the peer process is gone

Messages say what was given and what is allowed, and name the operand or operation. Source: the HAL's
ErrorStatus (1.0 and 1.3); DEAD_OBJECT exists only in the runtime's canonical form.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from nnfmq.hal.types import OutputShape


class ErrorStatus(IntEnum):
    """The HAL's status codes; DEAD_OBJECT (10000) never travels in a burst packet."""

    NONE = 0
    DEVICE_UNAVAILABLE = 1
    GENERAL_FAILURE = 2
    OUTPUT_INSUFFICIENT_SIZE = 3
    INVALID_ARGUMENT = 4
    MISSED_DEADLINE_TRANSIENT = 5
    MISSED_DEADLINE_PERSISTENT = 6
    RESOURCE_EXHAUSTED_TRANSIENT = 7
    RESOURCE_EXHAUSTED_PERSISTENT = 8
    DEAD_OBJECT = 10000


class NnfmqError(Exception):
    """Base of all errors raised on purpose; `status` is the HAL's code for it."""

    status: ClassVar[ErrorStatus] = ErrorStatus.GENERAL_FAILURE


class InvalidArgument(NnfmqError, ValueError):
    """The caller's mistake; nothing was changed."""

    status = ErrorStatus.INVALID_ARGUMENT


class BadState(InvalidArgument):
    """A call that may not be made now: NNAPI's BAD_STATE, which no driver says."""


class DeviceUnavailable(NnfmqError):
    """The device is offline or busy, or no driver can be reached."""

    status = ErrorStatus.DEVICE_UNAVAILABLE


class GeneralFailure(NnfmqError):
    """What the HAL does not name more exactly."""

    status = ErrorStatus.GENERAL_FAILURE


class ProtocolError(GeneralFailure):
    """The peer's bytes are not what the protocol allows at `offset` (bytes from the start of the message)."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset})")
        self.offset = offset


class QueueCorrupted(GeneralFailure):
    """A queue's descriptor or counters are impossible: the peer wrote them, or its memory is not what it says."""


class OutputInsufficientSize(NnfmqError):
    """An output buffer is too small; `output_shapes` holds one shape per output, as far as known."""

    status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE

    def __init__(self, message: str, output_shapes: tuple[OutputShape, ...] = ()) -> None:
        super().__init__(message)
        self.output_shapes = output_shapes


class MissedDeadline(NnfmqError, TimeoutError):
    """The caller's deadline passed before the work was done."""

    status = ErrorStatus.MISSED_DEADLINE_TRANSIENT


class MissedDeadlineTransient(MissedDeadline):
    """Missed now; the same call may succeed later."""


class MissedDeadlinePersistent(MissedDeadline):
    """Will not succeed with such a limit."""

    status = ErrorStatus.MISSED_DEADLINE_PERSISTENT


class ResourceExhausted(NnfmqError):
    """The driver gave up for lack of resources."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


class ResourceExhaustedTransient(ResourceExhausted):
    """Out of resources now."""


class ResourceExhaustedPersistent(ResourceExhausted):
    """Out of resources for good."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT


class DeadObject(NnfmqError, ConnectionError):
    """The peer process is gone, and everything it held with it."""

    status = ErrorStatus.DEAD_OBJECT


_BY_STATUS: dict[ErrorStatus, type[NnfmqError]] = {
    cls.status: cls
    for cls in (
        DeviceUnavailable,
        GeneralFailure,
        OutputInsufficientSize,
        InvalidArgument,
        MissedDeadlineTransient,
        MissedDeadlinePersistent,
        ResourceExhaustedTransient,
        ResourceExhaustedPersistent,
        DeadObject,
    )
}


def error_for(status: ErrorStatus, message: str) -> NnfmqError:
    """Return the exception that stands for `status`. Raises KeyError for NONE, which is no error."""
    return _BY_STATUS[status](message)


def status_of(error: BaseException) -> ErrorStatus:
    """Return the status that a peer is told for `error`; anything unforeseen is GENERAL_FAILURE."""
    return error.status if isinstance(error, NnfmqError) else ErrorStatus.GENERAL_FAILURE
