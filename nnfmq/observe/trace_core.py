"""The core that writes and reads trace rings: `_trace_core` (compiled) or `_pytrace_core` (Python).

It is selected at import, as `nnfmq.base.cores` documents. Callers import the names from here.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nnfmq.base.cores import CorePair

__all__ = ["ExchangeTrace", "StepTrace", "TraceRing", "available", "copy_names", "copy_records", "load"]

_CORES = CorePair(compiled="nnfmq.observe._trace_core", python="nnfmq.observe._pytrace_core")


def load(name: str) -> ModuleType:
    """Import and return the core `name` (`compiled` or `python`).

    Raises:
        ImportError: If there is no core of that name, or the compiled one is not built.
    """
    return _CORES.load(name)


def available() -> tuple[str, ...]:
    """Return the names of the cores that can be loaded, the faster one first."""
    return _CORES.available()


_active = load(_CORES.choose()[0])

if TYPE_CHECKING:
    from nnfmq.observe._pytrace_core import ExchangeTrace, StepTrace, TraceRing, copy_names, copy_records
else:
    ExchangeTrace, StepTrace, TraceRing = _active.ExchangeTrace, _active.StepTrace, _active.TraceRing
    copy_names, copy_records = _active.copy_names, _active.copy_records
