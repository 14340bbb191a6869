"""The check between parts of long work: the session, the client's process, and the deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from nnfmq.driver.session import model_calls
from nnfmq.driver.session.model_calls import Checkpoint
from nnfmq.hal.errors import DeadObject, MissedDeadlinePersistent, MissedDeadlineTransient

FAR_NS = 3600 * 10**9


@dataclass
class Session:
    is_closed: bool = False
    was_killed: bool = False
    looks: int = 0

    def client_was_killed(self) -> bool:
        self.looks += 1
        return self.was_killed

    def stop(self) -> None:
        self.is_closed = True


@pytest.fixture
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_calls, "_LOOK_INTERVAL_NS", 0)


def test_work_goes_on_without_a_reason_to_end() -> None:
    check = Checkpoint(Session(), time.monotonic_ns() + FAR_NS)
    check()
    check()


def test_work_goes_on_without_a_deadline() -> None:
    Checkpoint(Session())()


def test_the_end_of_the_session_ends_the_work() -> None:
    session = Session()
    check = Checkpoint(session)
    session.is_closed = True
    with pytest.raises(DeadObject):
        check()


@pytest.mark.usefixtures("always_looks")
def test_SIGKILL_of_the_client_ends_the_work_and_the_session() -> None:
    session = Session()
    check = Checkpoint(session)
    check()
    session.was_killed = True
    with pytest.raises(DeadObject, match="killed"):
        check()
    assert session.is_closed


def test_the_client_is_not_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_calls, "_LOOK_INTERVAL_NS", FAR_NS)
    session = Session()
    check = Checkpoint(session)
    for _ in range(1000):
        check()
    assert session.looks == 0


def test_a_deadline_that_had_passed_before_is_persistent() -> None:
    with pytest.raises(MissedDeadlinePersistent):
        Checkpoint(Session(), time.monotonic_ns() - 1)()


def test_a_deadline_that_passes_meanwhile_is_transient() -> None:
    deadline_ns = time.monotonic_ns() + FAR_NS
    check = Checkpoint(Session(), deadline_ns)
    check._deadline_ns = time.monotonic_ns()
    with pytest.raises(MissedDeadlineTransient):
        check()
