"""Loggers whose warnings are limited in rate, because clients and compromised workers can cause them.

Of each kind of line, which is a format string, BURST are logged in INTERVAL_S; the next one after that says how many
were left out. So nothing of a client may be in a format string.
"""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["BURST", "INTERVAL_S", "LIMITS", "RateLimit", "rate_limited"]

BURST, INTERVAL_S = 20, 5.0


class _Kind:
    __slots__ = ("begin_s", "count")

    def __init__(self) -> None:
        self.begin_s = float("-inf")
        self.count = 0


class RateLimit(logging.Filter):
    """Passes BURST warnings of a kind in INTERVAL_S. Thread-safe. Other levels pass."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Forget what was logged."""
        with self._lock:
            self._kinds.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; the first one after others were left out says how many."""
        if record.levelno < logging.WARNING:
            return True
        with self._lock:
            kind = self._kinds.setdefault(str(record.msg), _Kind())
            kind.count += 1
            now_s = time.monotonic()
            if now_s < kind.begin_s + INTERVAL_S:
                return kind.count <= BURST
            omitted, kind.begin_s, kind.count = max(kind.count - 1 - BURST, 0), now_s, 1
        if omitted:
            record.msg, record.args = f"{record.getMessage()}; {omitted} more before this one", ()
        return True


LIMITS: dict[str, RateLimit] = {}
"""Those of this process, by the names of their loggers."""


def rate_limited(name: str) -> logging.Logger:
    """Return the logger of this name, limited in rate. Idempotent."""
    logger = logging.getLogger(name)
    if name not in LIMITS:
        logger.addFilter(LIMITS.setdefault(name, RateLimit()))
    return logger
