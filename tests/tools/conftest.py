"""The tools are scripts beside the package: their folder goes on the path, as when they are run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.places import ROOT

sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture
def stopped_tracker() -> Iterator[None]:
    """Stop the process that `multiprocess` leaves behind in a process which has started others."""
    yield
    from bench_support import stop_tracker

    stop_tracker()
