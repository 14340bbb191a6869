"""The command `nnfmq` in a child process, which is killed if the test fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 60

_IGNORE = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def ignoring_signals(*arguments: str | Path) -> list[str]:
    """Return arguments of Python that run it with `arguments` as nohup, and `&` in a script, start a program.

    SIGINT, SIGQUIT and SIGHUP are ignored.
    """
    return ["-P", "-c", _IGNORE, *map(str, arguments)]


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
