"""Sinks of telemetry: where lines of JSON go. An application may have its own: any object with the two methods."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Protocol

from nnfmq.hal.errors import InvalidArgument

__all__ = ["CollectorSocket", "FileSink", "SocketSink", "TelemetrySink", "open_sink"]


# ----------------------------------------------------------------------------------------------------------------------
# CollectorSocket: a stream connection to a process of this machine that collects lines, at an AF_UNIX path.


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


# ----------------------------------------------------------------------------------------------------------------------
# Sinks of telemetry: where lines of JSON go. An application may have its own: any object with the two methods.


_SOCKET_PREFIX = "unix:"


class TelemetrySink(Protocol):
    """Takes lines, on one thread. May block; the executions do not wait for it."""

    def write(self, line: str, /) -> None:
        """Take one line, without its end. An OSError counts the line as lost."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class FileSink:
    """Appends to a file, one write(2) for each line, so that several processes can share it. Creates it, mode 0600."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(Path(path), flags, 0o600)

    def write(self, line: str) -> None:
        """Append a line. Raises OSError."""
        os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SocketSink:
    """Sends to a collector that listens at an AF_UNIX path (stream). Lines are lost while none listens."""

    def __init__(self, path: str) -> None:
        self._collector = CollectorSocket(path)

    def write(self, line: str) -> None:
        """Send a line; blocks at most about 2 s. Raises OSError."""
        self._collector.send_line(line)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._collector.close()


def open_sink(target: str) -> TelemetrySink:
    """Return the sink that a text names: the path of a file, or `unix:PATH`.

    Raises:
        InvalidArgument: If the path is empty.
        OSError: If the file cannot be opened. A socket is connected later.
    """
    if not target.startswith(_SOCKET_PREFIX):
        return FileSink(target)
    path = target.removeprefix(_SOCKET_PREFIX)
    if not path:
        raise InvalidArgument(f"telemetry to {target!r}: give the path of a file, or unix:PATH")
    return SocketSink(path)
