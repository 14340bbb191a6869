"""RunProfile: the durations of a session's runs, written in the format of Chrome's traces, as ONNX Runtime does."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import datetime
from pathlib import Path

__all__ = ["RunProfile"]

_MAX_EVENTS = 1_000_000  # ONNX Runtime's limit


class RunProfile:
    """Events since a session was made. `write` ends it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._events: list[tuple[str, int, int, int]] = []
        self.start_ns = time.monotonic_ns()

    def add(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Add an event of this thread; without effect after a million of them."""
        if len(self._events) < _MAX_EVENTS:
            self._events.append((name, begin_ns, end_ns, threading.get_native_id()))

    def write(self) -> str:
        """Write the events to a file in the current folder and return its name."""
        path = Path(f"{self._prefix}_{datetime.now():%Y-%m-%d_%H-%M-%S}.json".replace("__", "_"))
        events = [
            {
                "cat": "Session",
                "pid": os.getpid(),
                "tid": thread,
                "dur": (end_ns - begin_ns) // 1000,
                "ts": (begin_ns - self.start_ns) // 1000,
                "ph": "X",
                "name": name,
                "args": {},
            }
            for name, begin_ns, end_ns, thread in self._events
        ]
        path.write_text(json.dumps(events), encoding="utf-8")
        return str(path)
