"""A process for the tests of what is measured of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.drivers import Process

from nnfmq.lab.child_processes import started_child


@pytest.fixture
def child() -> Iterator[Process]:
    """Yield a process that computes."""

    def compute(connection: Any) -> None:
        connection.send("ready")
        while True:
            pass

    with ExitStack() as stack:
        started = stack.enter_context(started_child(compute))
        stack.callback(started.kill)
        started.receive(60.0)
        yield stack.enter_context(Process(started.pid))
