"""is_observed: whether preparations have to be shown to observers, found out without an import of those."""

from __future__ import annotations

import sys

from nnfmq import settings

__all__ = ["is_observed"]

_MODULE = "nnfmq.execution_observers"  # without it nothing can have added an observer


def is_observed() -> bool:
    """Return whether this process may have observers, or its settings ask for some.

    Raises:
        InvalidArgument: If a configuration file is not valid.
    """
    return _MODULE in sys.modules or bool(settings.RECORD.value() or settings.TELEMETRY.value())
