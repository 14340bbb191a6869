"""A driver for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drivers import LIMIT_S, Daemon, running_daemon, short_folder

import nnfmq


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock") as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client that recovers."""
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=True) as client:
        yield client
