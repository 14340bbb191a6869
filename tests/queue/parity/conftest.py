"""Set-ups of libfmq's own tests: {AIDL, HIDL} × {ring in the same fd, in a second} on each core."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from support.queues import CORES, CUSTOM_NOT_FULL, FORMS, PLACES, Setup

from nnfmq.queue import EventFlag


@pytest.fixture(params=product(CORES, FORMS, PLACES), ids="-".join)
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    """Each of libfmq's four set-ups."""
    made = Setup(*request.param)
    with made.stack:
        yield made


@pytest.fixture(params=CORES)
def plain(request: pytest.FixtureRequest) -> Iterator[Setup]:
    """One set-up, for what libfmq tests once."""
    made = Setup(request.param)
    with made.stack:
        yield made


@pytest.fixture
def word(setup: Setup) -> EventFlag:
    """An event flag over a private word that says that the queue is not full."""
    flag = setup.stack.enter_context(EventFlag.from_buffer(memoryview(bytearray(4)), core=setup.core))
    flag.wake(CUSTOM_NOT_FULL)
    return flag
