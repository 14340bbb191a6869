"""is_observed: whether preparations have to be shown to observers, found out without an import."""

from __future__ import annotations

import os
import sys

__all__ = ["VARIABLES", "is_observed"]

VARIABLES = ("NNFMQ_RECORD", "NNFMQ_TELEMETRY")
"""The environment variables that add observers."""

_MODULE = "nnfmq.execution_observers"  # without it nothing can have added an observer


def is_observed() -> bool:
    """Return whether this process may have observers, or its environment asks for some."""
    return _MODULE in sys.modules or any(os.environ.get(name) for name in VARIABLES)
