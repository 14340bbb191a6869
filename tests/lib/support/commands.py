"""`nnfmq` as a process of its own, which a failing test does not wait for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIMIT_S = 60


@contextmanager
def started(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start `nnfmq WORDS` with pipes; afterwards it must end by itself, and is killed where the block failed."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "nnfmq", *words], **pipes | options) as process:
        try:
            yield process
            process.wait(LIMIT_S)
        finally:
            process.kill()
