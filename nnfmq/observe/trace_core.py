"""The core that writes and reads trace rings: `_trace_core` (compiled) or `_pytrace_core` (Python).

It is selected at import, as `nnfmq.base.cores` documents. Callers import the names from here.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nnfmq.base.cores import CorePair

__all__ = ["CORES", "ExchangeTrace", "StepTrace", "TraceRing", "copy_names", "copy_records"]

CORES: CorePair[ModuleType] = CorePair(compiled="nnfmq.observe._trace_core", python="nnfmq.observe._pytrace_core")
_active = CORES.load(CORES.choose()[0])

if TYPE_CHECKING:
    from nnfmq.observe._pytrace_core import ExchangeTrace, StepTrace, TraceRing, copy_names, copy_records
else:
    ExchangeTrace, StepTrace, TraceRing = _active.ExchangeTrace, _active.StepTrace, _active.TraceRing
    copy_names, copy_records = _active.copy_names, _active.copy_records
