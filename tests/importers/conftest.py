"""A driver for all tests of a file: an embedded one of each session would be a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drivers import Daemon

import nnfmq


@pytest.fixture(scope="module")
def client(shared_daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client of a driver, to which `nnfmq.compat` connects as well."""
    with pytest.MonkeyPatch.context() as patch, nnfmq.connect(shared_daemon.path) as connected:
        patch.setenv("NNFMQ_SOCKET", str(shared_daemon.path))
        yield connected
