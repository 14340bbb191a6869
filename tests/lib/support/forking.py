"""fork(2) in a process with threads."""

from __future__ import annotations

import os
import warnings


def fork() -> int:
    """Return os.fork(), without the warning that a process with threads gets from Python 3.12 on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()
