"""is_observed: whether preparations have to be shown to observers, found out without an import."""

from __future__ import annotations

import sys

from nnfmq import settings

__all__ = ["is_observed"]

_MODULE = "nnfmq.execution_observers"  # without it nothing can have added an observer


def is_observed() -> bool:
    """Return whether this process may have observers, or its settings ask for some."""
    return _MODULE in sys.modules or settings.RECORD.value() is not None or settings.TELEMETRY.value() is not None
