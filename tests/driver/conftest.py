"""Fixtures of the driver's tests: a burst's client, servers and executors, and a running session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support import bursts, models
from support.executors import UncachedExecutor
from support.protocol import ProtocolPeer
from support.sessions import HELLO, Running

from nnfmq.base.memory import Memory
from nnfmq.driver.execution.burst import BurstServer
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.serialize import messages


@pytest.fixture
def client(resources: ExitStack) -> bursts.BurstClient:
    return resources.enter_context(bursts.BurstClient.create())


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


@pytest.fixture
def greeted(running: Running) -> ProtocolPeer:
    """The client's end of a session after the greeting."""
    running.client.send(HELLO)
    running.client.receive(messages.HelloReply)
    return running.client


Serve = Callable[..., BurstServer]


@pytest.fixture
def serve(resources: ExitStack) -> Serve:
    """Start a burst server for a client and an executor; closes it when the test ends."""

    def serve(client: bursts.BurstClient, executor: Any, **options: Any) -> BurstServer:
        options = {"polling_window_us": 0, **options}
        server = BurstServer.create(client.get_memories, *client.server_ends(), executor, **options)
        resources.callback(server.close)
        return server

    return serve


@pytest.fixture(params=["of a prepared model", "that caches nothing"])
def form(request: pytest.FixtureRequest) -> Callable[[DriverPreparedModel], Any]:
    """Return what makes a burst's executor: the driver's, and one that executes every request synchronously."""
    return UncachedExecutor if request.param == "that caches nothing" else lambda model: model


@pytest.fixture
def adding(client: bursts.BurstClient) -> tuple[Memory, Memory]:
    """The client's memories, slots 0 and 1, for `models.add_model()`: 1 2 3 4 + 10 20 30 40."""
    inputs, outputs = bursts.give_pools(client, models.add_model())
    np.frombuffer(inputs.view, np.float32, 4)[:] = [1, 2, 3, 4]
    np.frombuffer(inputs.view, np.float32, 4, offset=64)[:] = [10, 20, 30, 40]
    return inputs, outputs
