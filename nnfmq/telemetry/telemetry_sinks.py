"""Sinks of telemetry: where lines of JSON go. An application may have its own: any object with the two methods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from nnfmq.hal.errors import InvalidArgument
from nnfmq.telemetry.collector_socket import CollectorSocket

__all__ = ["FileSink", "SocketSink", "TelemetrySink", "open_sink"]

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
