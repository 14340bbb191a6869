"""A JSON file to which several runs of a tool add their results, also at the same time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["changed", "content"]


def content(path: Path, empty: dict[str, Any]) -> dict[str, Any]:
    """Return what the file has; `empty` if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty
    return found


@contextmanager
def changed(path: Path, empty: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the file has, and replace the file by what the block makes of that. Another process waits meanwhile.

    A process that is killed leaves the file as it was, or complete.
    """
    folder = os.open(path.absolute().parent, os.O_RDONLY)  # the file is replaced, so it cannot be locked
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        found = content(path, empty)
        yield found
        made = path.with_suffix(".new")
        made.write_text(json.dumps(found) + "\n")
        made.replace(path)
    finally:
        os.close(folder)
