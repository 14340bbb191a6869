"""Set-ups of libfmq's own tests: {AIDL, HIDL} × {ring in the same fd, in a second} on each core."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from support.queues import CORES, FORMS, PLACES, Setup


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
