"""Reading the statistics of a driver that is not trusted, and of a real session."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from support.executors import LIMIT_S
from support.protocol import ProtocolPeer

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.memory import Memory
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.statistics import driver_statistics, statistics_memory
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import ErrorStatus, GeneralFailure, ProtocolError
from nnfmq.observe import statistics_layout as layout
from nnfmq.serialize import messages

Start = Callable[..., Future[Any]]
Read = Callable[[Connection, int | None], object]


@pytest.fixture(params=[driver_statistics, statistics_memory], ids=["values", "memory"])
def read(request: pytest.FixtureRequest) -> Read:
    """Both ways to read: the values now, and the memory that stays current."""
    found: Read = request.param
    return found


def reply_with(
    driver: ProtocolPeer, connection: Connection, start: Start, read: Read, fd: int, size: int
) -> Future[Any]:
    reading = start(read, connection, deadline_after(LIMIT_S))
    call = driver.receive(messages.GetStatistics).call
    data = (messages.MemoryData(size),)
    driver.send(messages.StatisticsMemory(call, ErrorStatus.NONE, "", data), [fd])
    return reading


@pytest.mark.parametrize("size", [8, layout.area_bytes(1)], ids=["too short", "another layout"])
def test_memory_that_is_no_statistics_area_is_a_protocol_error(
    driver: ProtocolPeer, connection: Connection, start: Start, read: Read, size: int
) -> None:
    with Memory.create(size) as memory:
        reading = reply_with(driver, connection, start, read, memory.fileno(), size)
        with pytest.raises(ProtocolError, match="cannot be read"):
            reading.result(LIMIT_S)


def test_a_file_that_could_shrink_is_a_protocol_error(
    driver: ProtocolPeer, connection: Connection, start: Start, read: Read
) -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.area_bytes(1))
        reading = reply_with(driver, connection, start, read, fd, layout.area_bytes(1))
        with pytest.raises(ProtocolError, match="cannot be read"):
            reading.result(LIMIT_S)
    finally:
        os.close(fd)


def test_a_reply_without_memory_is_a_protocol_error(driver: ProtocolPeer, connection: Connection, start: Start) -> None:
    reading = start(driver_statistics, connection, deadline_after(LIMIT_S))
    call = driver.receive(messages.GetStatistics).call
    driver.send(messages.StatisticsMemory(call, ErrorStatus.NONE, ""))
    with pytest.raises(ProtocolError, match="0 memories"):
        reading.result(LIMIT_S)


def test_an_error_that_comes_with_memory_closes_it(driver: ProtocolPeer, connection: Connection, start: Start) -> None:
    reading = start(driver_statistics, connection, deadline_after(LIMIT_S))
    call = driver.receive(messages.GetStatistics).call
    with Memory.create(8) as memory:
        data = (messages.MemoryData(8),)
        driver.send(messages.StatisticsMemory(call, ErrorStatus.GENERAL_FAILURE, "no", data), [memory.fileno()])
        with pytest.raises(GeneralFailure, match="no"):
            reading.result(LIMIT_S)


def test_another_user_may_not_read(real: tuple[Connection, Session]) -> None:
    connection, session = real
    session.client_uid = os.getuid() + 1
    with pytest.raises(GeneralFailure, match="does not administer this driver"):
        driver_statistics(connection, deadline_after(LIMIT_S))


@pytest.mark.parametrize("uid", [0, os.getuid()])
def test_root_and_the_driver_s_user_may_read(real: tuple[Connection, Session], uid: int) -> None:
    connection, session = real
    session.client_uid = uid
    assert driver_statistics(connection, deadline_after(LIMIT_S)).pid == os.getpid()


def test_calls_that_run_are_counted_as_open(real: tuple[Connection, Session]) -> None:
    (client,) = driver_statistics(real[0], deadline_after(LIMIT_S)).clients
    assert client.open_calls == 1  # this one
    assert client.quota_bytes == real[1].quota.limit_bytes
