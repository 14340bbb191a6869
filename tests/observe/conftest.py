"""Areas of statistics in private memory, and both cores of the recorders."""

from __future__ import annotations

from types import ModuleType

import pytest

from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.recorder_core import CORES
from nnfmq.observe.statistics_writer import SlotWriter


@pytest.fixture(params=CORES.available())
def recorders(request: pytest.FixtureRequest) -> ModuleType:
    return CORES.load(request.param)


@pytest.fixture
def area() -> memoryview:
    """An area with two slots, as a supervisor begins it."""
    view = memoryview(bytearray(layout.area_bytes(2)))
    words = view.cast("Q")
    words[layout.HEADER_MAGIC], words[layout.HEADER_SLOTS] = layout.MAGIC, 2
    words[layout.DRIVER_PID], words[layout.DRIVER_START] = 4321, 1_000
    return view


@pytest.fixture
def writer(area: memoryview) -> SlotWriter:
    """The writer of slot 1, for client 77 of uid 1000."""
    made = SlotWriter(area, 1)
    made.open(77, 1000, 5_000_000)
    return made
