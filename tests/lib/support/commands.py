"""The command `nnfmq` in a child process, which is killed if the test fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIMIT_S = 60


@contextmanager
def started(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start `nnfmq WORDS` with pipes; after the block it must exit by itself, and is killed if the block failed."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "nnfmq", *words], **pipes | options) as process:
        try:
            yield process
            process.wait(LIMIT_S)
        finally:
            process.kill()
