"""The error classes form one tree, and statuses become errors and errors become statuses in one place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import nnfmq
from nnfmq.hal import errors
from nnfmq.hal.errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    HalError,
    MissedDeadline,
    NnfmqError,
    OutputInsufficientSize,
    ProtocolError,
    QueueCorrupted,
    ResourceExhausted,
    TransportError,
    error_for_status,
    status_for_error,
)


def subclasses(kind: type[NnfmqError]) -> Iterator[type[NnfmqError]]:
    for direct in kind.__subclasses__():
        if direct.__module__ == errors.__name__:
            yield direct
            yield from subclasses(direct)


def test_every_error_is_a_hal_error_or_a_transport_error_and_is_public() -> None:
    classes = set(subclasses(NnfmqError))
    assert classes == {HalError, TransportError, *subclasses(HalError), *subclasses(TransportError)}
    assert not set(subclasses(HalError)) & set(subclasses(TransportError))
    assert {kind.__name__ for kind in classes} | {"NnfmqError", "ErrorStatus", "ModelProblem"} == set(errors.__all__)
    assert all(getattr(nnfmq, kind.__name__) is kind for kind in classes)


@pytest.mark.parametrize("status", [status for status in ErrorStatus if status is not ErrorStatus.NONE])
def test_the_mapping_of_statuses_to_errors_is_invertible(status: ErrorStatus) -> None:
    error = error_for_status(status, "why")
    assert status_for_error(error) is error.status is status
    assert str(error) == "why"


def test_the_status_none_is_no_error() -> None:
    with pytest.raises(KeyError):
        error_for_status(ErrorStatus.NONE, "")


@pytest.mark.parametrize("kind", sorted(subclasses(HalError), key=lambda kind: kind.__name__))
def test_a_hal_error_has_the_status_of_its_class(kind: type[HalError]) -> None:
    assert status_for_error(kind("why")) is kind.status


@pytest.mark.parametrize("kind", sorted(subclasses(TransportError), key=lambda kind: kind.__name__))
def test_a_transport_error_has_no_status_in_its_class(kind: type[TransportError]) -> None:
    expected = ErrorStatus.DEAD_OBJECT if issubclass(kind, DeadObject) else ErrorStatus.GENERAL_FAILURE
    assert not isinstance(kind.status, ErrorStatus)
    assert status_for_error(kind("why")) is kind("why").status is expected


def test_error_classes_that_share_a_status() -> None:
    assert BadState.status is ErrorStatus.INVALID_ARGUMENT
    assert MissedDeadline.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    assert ResourceExhausted.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


@pytest.mark.parametrize("error", [NnfmqError(), ValueError(), MemoryError(), QueueCorrupted(), ProtocolError("why")])
def test_any_other_exception_is_a_general_failure(error: BaseException) -> None:
    assert status_for_error(error) is ErrorStatus.GENERAL_FAILURE


def test_errors_derive_from_builtin_exceptions() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(MissedDeadline, TimeoutError)
    assert issubclass(DeadObject, ConnectionError)


def test_errors_carry_details() -> None:
    assert OutputInsufficientSize("why").output_shapes == ()
    assert (str(ProtocolError("why", 7)), ProtocolError("why", 7).offset) == ("why (at byte 7)", 7)
    assert ProtocolError("why").offset is None


def test_the_text_of_a_peer_is_escaped_and_cut_in_a_protocol_error() -> None:
    assert str(ProtocolError("a\nb\x1b[31m\u202ec é", 7)) == r"a\nb\x1b[31m\u202ec é (at byte 7)"
    assert str(ProtocolError("x" * 501)) == "x" * 500 + " ..."
