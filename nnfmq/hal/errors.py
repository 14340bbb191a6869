"""The errors that nnfmq raises deliberately, and their translation from and to HAL statuses.

Each error is a `HalError` or a `TransportError`. A HAL error is a result of the HAL: its class has the `ErrorStatus`
that travels in replies. A transport error means that the channel or queue to the peer failed; the HAL has no status for
that. `error_for_status` and `status_for_error` are the only translation between statuses and errors. To add a transport
error, define a subclass of TransportError here and list it in `__all__`: the package `nnfmq` exports all of `__all__`,
and the status reported for it is GENERAL_FAILURE unless `_TRANSPORT_STATUSES` has another one.

Messages state the received value and the allowed ones, and name the operand or operation.

Source: the HAL's ErrorStatus (HIDL 1.0 and 1.3). BAD_STATE and DEAD_OBJECT are NNAPI's; no driver returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nnfmq.hal.types import OutputShape

__all__ = [
    "BadState",
    "DeadObject",
    "DeviceUnavailable",
    "ErrorStatus",
    "GeneralFailure",
    "HalError",
    "InvalidArgument",
    "MissedDeadline",
    "MissedDeadlinePersistent",
    "MissedDeadlineTransient",
    "ModelNotFound",
    "ModelProblem",
    "NnfmqError",
    "OutputInsufficientSize",
    "ProtocolError",
    "QueueCorrupted",
    "ResourceExhausted",
    "ResourceExhaustedPersistent",
    "ResourceExhaustedTransient",
    "TransportError",
    "UnsupportedModel",
]


class ErrorStatus(IntEnum):
    """The HAL's status codes. A burst packet never contains DEAD_OBJECT (10000)."""

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
    """Base class of all errors that nnfmq raises deliberately."""

    @property
    def status(self) -> ErrorStatus:
        """The HAL status that is reported for this error, see `status_for_error`."""
        return status_for_error(self)


# ------------------------------------------------------------------------------------------------ results of the HAL


class HalError(NnfmqError):
    """Base class of the errors that stand for a HAL status; each subclass has its `status`."""

    status: ErrorStatus = ErrorStatus.GENERAL_FAILURE  # a constant, in place of the base class's property


class InvalidArgument(HalError, ValueError):
    """INVALID_ARGUMENT: an argument is invalid. Nothing was changed."""

    status = ErrorStatus.INVALID_ARGUMENT


class BadState(InvalidArgument):
    """INVALID_ARGUMENT: the object's state does not allow this call (NNAPI: BAD_STATE). The driver was not called."""


class ModelProblem(NamedTuple):
    """Why an importer cannot convert an operator of a model file, or the whole model: then `operator` is "".

    `types` has the element types of the operator's inputs and outputs, as the file names them: "FLOAT32 → INT8".
    """

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    operator: str
    types: str
    reason: str


class UnsupportedModel(InvalidArgument):
    """INVALID_ARGUMENT: nnfmq's own engine does not support a model; a hosted runtime may run it.

    A file that is corrupt raises InvalidArgument instead.

    Attributes:
        problems: All operators and tensors concerned; empty if the whole file is.
        advice: What the message ends with: how to run the model, or why hosted runtimes reject it.
    """

    def __init__(self, message: str, problems: tuple[ModelProblem, ...] = (), advice: str = "") -> None:
        super().__init__(f"{message}\n{advice}" if advice else message)
        self.problems, self.advice = problems, advice


class ModelNotFound(InvalidArgument):
    """There is no model of this name, or no such version of it, in the driver's model repository."""


class DeviceUnavailable(HalError):
    """DEVICE_UNAVAILABLE: the device is offline or busy, or no driver can be reached."""

    status = ErrorStatus.DEVICE_UNAVAILABLE


class GeneralFailure(HalError):
    """GENERAL_FAILURE: a failure for which the HAL has no more specific status."""

    status = ErrorStatus.GENERAL_FAILURE


class OutputInsufficientSize(HalError):
    """OUTPUT_INSUFFICIENT_SIZE: an output buffer is too small.

    `output_shapes` has one shape for each output, as far as they are known.
    """

    status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE

    def __init__(self, message: str, output_shapes: tuple[OutputShape, ...] = ()) -> None:
        super().__init__(message)
        self.output_shapes = output_shapes


class MissedDeadline(HalError, TimeoutError):
    """The deadline passed before the work was finished. Base class of the two below."""

    status = ErrorStatus.MISSED_DEADLINE_TRANSIENT


class MissedDeadlineTransient(MissedDeadline):
    """MISSED_DEADLINE_TRANSIENT: the same call may succeed later."""


class MissedDeadlinePersistent(MissedDeadline):
    """MISSED_DEADLINE_PERSISTENT: the same call with the same limit will miss its deadline again."""

    status = ErrorStatus.MISSED_DEADLINE_PERSISTENT


class ResourceExhausted(HalError):
    """The driver lacks memory or another resource. Base class of the two below."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


class ResourceExhaustedTransient(ResourceExhausted):
    """RESOURCE_EXHAUSTED_TRANSIENT: the same call may succeed later."""


class ResourceExhaustedPersistent(ResourceExhausted):
    """RESOURCE_EXHAUSTED_PERSISTENT: the same call will fail again."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT


# ------------------------------------------------------------------------------------------------ transport


class TransportError(NnfmqError):
    """Base class of the errors of a connection or queue: the peer died, or sent or wrote invalid data."""


class DeadObject(TransportError, ConnectionError):
    """The peer process has exited, or closed the connection; all objects that it held for this process are lost."""


class ProtocolError(TransportError):
    """The peer sent bytes that the protocol does not allow; `offset` counts from the start of the message, if known.

    `message` may contain text of the peer. Characters that are not printable are escaped, and long text is cut, because
    the error is logged and shown in terminals.
    """

    def __init__(self, message: str, offset: int | None = None) -> None:
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message[:_PEER_TEXT_MAX])
        cut = " ..." if len(message) > _PEER_TEXT_MAX else ""
        super().__init__(printable + cut + ("" if offset is None else f" (at byte {offset})"))
        self.offset = offset


_PEER_TEXT_MAX = 500  # characters


class QueueCorrupted(TransportError):
    """The descriptor or the counters of a queue, which the peer can write, are invalid."""


# ------------------------------------------------------------------------------------------------ translation

_ERRORS: Mapping[ErrorStatus, Callable[[str], NnfmqError]] = {
    ErrorStatus.DEVICE_UNAVAILABLE: DeviceUnavailable,
    ErrorStatus.GENERAL_FAILURE: GeneralFailure,
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: OutputInsufficientSize,
    ErrorStatus.INVALID_ARGUMENT: InvalidArgument,
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: MissedDeadlineTransient,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT: MissedDeadlinePersistent,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: ResourceExhaustedTransient,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: ResourceExhaustedPersistent,
    ErrorStatus.DEAD_OBJECT: DeadObject,
}
_TRANSPORT_STATUSES: Mapping[type[TransportError], ErrorStatus] = {DeadObject: ErrorStatus.DEAD_OBJECT}


def error_for_status(status: ErrorStatus, message: str) -> NnfmqError:
    """Return the exception for a status that a peer reported.

    Raises:
        KeyError: If `status` is NONE, which is no error.
    """
    return _ERRORS[status](message)


def status_for_error(error: BaseException) -> ErrorStatus:
    """Return the status to report to a peer for `error`: GENERAL_FAILURE unless its class has a more specific one."""
    if isinstance(error, HalError):
        return error.status
    found = (_TRANSPORT_STATUSES[kind] for kind in type(error).__mro__ if kind in _TRANSPORT_STATUSES)
    return next(found, ErrorStatus.GENERAL_FAILURE)
