"""The core that writes and reads the statistics area: `_recorder` (Cython) or `_pyrecorder` (Python).

It is selected at import, as `nnfmq.base.cores` documents. Callers import the classes and functions from here.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nnfmq.base.cores import CorePair

__all__ = [
    "CORES",
    "BurstCalls",
    "BurstRecorder",
    "Calls",
    "ModelRecorder",
    "SendClock",
    "begin_change",
    "end_change",
    "snapshot",
]

CORES: CorePair[ModuleType] = CorePair(compiled="nnfmq.observe._recorder", python="nnfmq.observe._pyrecorder")
_active = CORES.load(CORES.choose()[0])

if TYPE_CHECKING:
    from nnfmq.observe._pyrecorder import (
        BurstCalls,
        BurstRecorder,
        Calls,
        ModelRecorder,
        SendClock,
        begin_change,
        end_change,
        snapshot,
    )
else:
    BurstCalls, Calls = _active.BurstCalls, _active.Calls
    BurstRecorder, ModelRecorder, SendClock = _active.BurstRecorder, _active.ModelRecorder, _active.SendClock
    begin_change, end_change, snapshot = _active.begin_change, _active.end_change, _active.snapshot
