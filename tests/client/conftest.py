"""Drivers for tests of the client: a fake one that sends what a test wants, and a real session in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import models
from support.connections import open_connection
from support.executors import LIMIT_S
from support.protocol import ProtocolPeer

from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.session.calls import HANDLERS
from nnfmq.driver.session.session import Session
from nnfmq.hal.types import Request
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole

GREETING = messages.HelloReply(control_protocol.PROTOCOL, "AIDL v4", "fake", 4711, 4712, "python")


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    """Run a call in a new thread; the future gets its result.

    The functions are kept until the test ends: a dropped model would be released, by a message that no test expects.
    """
    kept: list[Callable[..., Any]] = []
    with ThreadPoolExecutor(8) as pool:

        def submit(function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
            kept.append(function)
            return pool.submit(function, *arguments, **named)

        yield submit


@pytest.fixture
def driver(resources: ExitStack) -> ProtocolPeer:
    """A fake driver's end of a channel; the other end is `driver.other`."""
    theirs, ours = Channel.pair()
    peer = ProtocolPeer(theirs, PeerRole.DRIVER)
    resources.callback(peer.close)
    peer.other = ours  # type: ignore[attr-defined]
    return peer


@pytest.fixture
def connection(driver: ProtocolPeer, resources: ExitStack) -> Connection:
    """A connection to the fake driver, after the handshake."""
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_connection, driver.other, time.monotonic_ns() + LIMIT_S * 10**9)  # type: ignore[attr-defined]
        driver.receive(messages.Hello)
        driver.send(GREETING)
        connection = opening.result(LIMIT_S)
    resources.callback(connection.close)
    return connection


@pytest.fixture
def real(speaking: Callable[[str], tuple[Connection, Session]]) -> tuple[Connection, Session]:
    """A connection to a real session, which runs in a thread of this process, and that session."""
    return speaking("AIDL v4")


@pytest.fixture
def client(real: tuple[Connection, Session]) -> Client:
    """A client of the real session."""
    return Client(real[0], None)


@pytest.fixture
def device(client: Client) -> Device:
    """The session's reference device."""
    return client.device("reference")


@pytest.fixture
def adding(device: Device) -> PreparedModel:
    """A prepared model that adds two tensors of four floats."""
    return device.prepare(models.add_model())


@pytest.fixture
def pools(resources: ExitStack) -> tuple[Memory, Memory]:
    """Memory for that model: 1 2 3 4 + 10 20 30 40."""
    source, sink = (resources.enter_context(Memory.create(size)) for size in models.pool_bytes(models.add_model()))
    np.frombuffer(source.view, np.float32, 4)[:] = [1, 2, 3, 4]
    np.frombuffer(source.view, np.float32, 4, offset=64)[:] = [10, 20, 30, 40]
    return source, sink


@pytest.fixture
def request_(pools: tuple[Memory, Memory]) -> Request:
    """The request of that model over these memories."""
    return models.request_for(models.add_model(), pools)


@pytest.fixture
def speaking(resources: ExitStack) -> Callable[[str], tuple[Connection, Session]]:
    """Make a connection to a real session with a given interface version."""
    return partial(connected, resources)


def connected(resources: ExitStack, interface: str) -> tuple[Connection, Session]:
    theirs, ours = Channel.pair()
    session = Session(theirs, "real", HANDLERS)
    thread = threading.Thread(target=session.run, name="session under test")
    thread.start()

    def end() -> None:
        session.stop()
        thread.join(LIMIT_S)
        session.join()  # before the bursts are listed: a thread may be configuring one
        for burst in (*session.bursts.values(), *session.aidl_bursts.values()):
            burst.close()  # a driver process leaves these to the kernel

    resources.callback(end)
    connection = open_connection(ours, time.monotonic_ns() + LIMIT_S * 10**9, interface=interface)
    resources.callback(connection.close)
    return connection, session
