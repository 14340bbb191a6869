"""An interactive shell on a terminal, to which a test types."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 30
READY = "ready-to-type"


@dataclass
class Terminal:
    """The test's end of a pseudo-terminal with a shell at the other end."""

    fd: int

    def type(self, text: str) -> None:
        """Send `text` as if it were typed."""
        os.write(self.fd, text.encode())

    def read_until(self, *expected: str) -> str:
        """Return what appears until all of `expected` have; fails after LIMIT_S seconds."""
        seen, deadline = b"", time.monotonic() + LIMIT_S
        while not all(text.encode() in seen for text in expected):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.fd], [], [], max(left, 0))
            assert ready, f"{expected} did not appear in {seen.decode(errors='replace')!r}"
            seen += os.read(self.fd, 1 << 16)
        return seen.decode(errors="replace")


@contextmanager
def shell(command: list[str], start: str, folder: Path) -> Iterator[Terminal]:
    """Start a shell in `folder`, let it run the line `start`, and yield its terminal. Kills the shell at the end."""
    controller, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 100, 200, 0, 0))
        environment = {**os.environ, "TERM": "vt100", "HOME": str(folder)}
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                opened = Terminal(controller)
                opened.type(f"{start}; echo ready-to''-type\n")
                opened.read_until(READY)
                yield opened
            finally:
                process.kill()
    finally:
        os.close(controller)
        os.close(terminal)
