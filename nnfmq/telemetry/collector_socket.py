"""CollectorSocket: a stream connection to a process of this machine that collects lines, at an AF_UNIX path."""

from __future__ import annotations

import socket

__all__ = ["CollectorSocket"]

_TIMEOUT_S = 1.0  # of connecting, and of sending one line


class CollectorSocket:
    """Sends lines to a collector. Connects when a line is sent, and again after the collector has gone. Close it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket: socket.socket | None = None

    def send_line(self, line: str) -> None:
        """Send one line; blocks at most about 2 s.

        Raises:
            OSError: If nothing listens, or the collector does not read. The line is lost, the next one connects again.
        """
        if self._socket is None:
            self._socket = _connected(self.path)
        try:
            self._socket.sendall(line.encode() + b"\n")
        except OSError:
            self.close()  # part of the line may have been sent: only a new connection begins a new line
            raise

    def close(self) -> None:
        """Close the connection. Idempotent."""
        opened, self._socket = self._socket, None
        if opened is not None:
            opened.close()


def _connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(_TIMEOUT_S)
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return made
