"""The processes of a crash test: client processes, clients in this process, and the suite's own driver.

Both kinds of clients send messages over a pipe, which the runner polls. Processes run in sessions of their own, so that
Ctrl-C reaches the runner alone, which ends them. They end by themselves when the runner is killed: a client because its
stdin is closed, the driver see `driver_program`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from nnfmq.hal.errors import DeadObject, NnfmqError
from nnfmq.mlts.crash_client import run_client
from nnfmq.mlts.crash_context import WorkloadContext
from nnfmq.mlts.crash_messages import LINE_BYTES_MAX, ClientMessage, ClientState, ClientTask, decode_message, encode

DRIVER_START_S = 60.0
_DRIVER_END_S = 10.0  # it gives its workers 4 s
_CLIENT_END_S = 5.0


class ClientMessages:
    """The receiving end of a client's messages. Owns the fd; close it."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._received = b""
        self.is_closed = False
        """Whether the client has closed its end: it sends no more messages."""

    def fileno(self) -> int:
        """Return the fd, to poll it."""
        return self._fd

    def read(self) -> list[ClientMessage]:
        """Return the complete messages that have arrived, without blocking.

        Raises:
            msgspec.DecodeError: If the client wrote something else.
            DeadObject: If a message is too long.
        """
        with suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                self._received += data
                if len(self._received) > LINE_BYTES_MAX:
                    raise DeadObject(f"a client sent a message of more than {LINE_BYTES_MAX} bytes")
            self.is_closed = True
        *lines, self._received = self._received.split(b"\n")
        return [decode_message(line) for line in lines]

    def close(self) -> None:
        """Close the fd. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class CrashClient(Protocol):
    """A client of a crash test. Close it: that ends it if it still runs."""

    pipe: ClientMessages

    def kill(self) -> None:
        """End the client now."""
        ...

    def exit_text(self) -> str:
        """Return how the client ended; "" if it ended normally. Blocks a moment."""
        ...

    def close(self) -> None:
        """End the client and release its resources. Idempotent."""
        ...


class ClientChild:
    """A client in a process of its own, whose stderr is appended to a file."""

    def __init__(self, task: ClientTask, log: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", "-m", "nnfmq.mlts.crash_client"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pipe = ClientMessages(os.dup(self._process.stdout.fileno()))
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # it has exited, which its pipe shows
            self._process.stdin.write(encode(task))
            self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def exit_text(self) -> str:
        """Return the signal or exit status; a process that does not exit after its last message is killed."""
        try:
            status = self._process.wait(_CLIENT_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return f"did not exit within {_CLIENT_END_S:g} s after it had closed its output"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"exited with status {status}" if status else ""

    def close(self) -> None:
        """Kill and reap the process."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


class ClientThread:
    """A client in this process. `kill` closes its connection, which ends all of its calls."""

    def __init__(self, task: ClientTask) -> None:
        fd, self._sink = os.pipe()
        self.pipe = ClientMessages(fd)
        self._lock = threading.Lock()
        self._context: WorkloadContext | None = None
        self._is_killed = False
        self._thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._thread.start()

    def _run(self, task: ClientTask) -> None:
        try:
            context = WorkloadContext.open(task)
            with self._lock:
                self._context = context
                if self._is_killed:
                    context.close()
            try:
                run_client(context, self._send)
            finally:
                context.close()
        except (NnfmqError, OSError) as error:
            self._send(ClientMessage(ClientState.FAILURE, f"{type(error).__name__}: {error}"))
        finally:
            os.close(self._sink)

    def _send(self, message: ClientMessage) -> None:
        with suppress(BrokenPipeError):
            os.write(self._sink, encode(message))

    def kill(self) -> None:
        """Close the client's connection."""
        with self._lock:
            self._is_killed = True
            if self._context is not None:
                self._context.close()

    def exit_text(self) -> str:
        """Return "": a thread has no exit status."""
        return ""

    def close(self) -> None:
        """Close the connection and wait for the thread."""
        self.kill()
        self._thread.join(_CLIENT_END_S)
        self.pipe.close()


class OwnDriver:
    """A driver that the suite has started: socket, pid and log."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
        self._process = process
        self.pid = process.pid
        self.socket = socket
        self.log = log

    def kill(self) -> None:
        """Send SIGKILL, for tests."""
        self._process.kill()


@contextmanager
def own_driver(folder: Path, variables: Mapping[str, str]) -> Iterator[OwnDriver]:
    """Start `nnfmq serve` in a folder until the block ends, with more environment variables. Blocks.

    Raises:
        DeadObject: If it does not listen in time.
    """
    socket, log = folder / "d.sock", folder / "driver.log"
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nnfmq.mlts.driver_program", str(socket)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env=_environment() | dict(variables), start_new_session=True,
        )  # fmt: skip
        stack.callback(_end_driver, process)
        assert process.stdout is not None
        if not _has_line(process.stdout, DRIVER_START_S):
            text = log.read_text(errors="replace").strip()
            raise DeadObject(f"the driver does not listen within {DRIVER_START_S:g} s: {text or 'its log is empty'}")
        yield OwnDriver(process, socket, log)


def _has_line(stream: IO[bytes], limit_s: float) -> bool:
    """Wait for a line; return False if the limit passes or the stream ends."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(limit_s * 1000)) and bool(os.read(stream.fileno(), 4096))


def _end_driver(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_DRIVER_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def _environment() -> dict[str, str]:
    """Return an environment in which children import the same packages as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
