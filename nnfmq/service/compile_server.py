"""The compile server and its compile processes: where models become machine code, beside the worker.

LLVM is slow, holds one lock for all threads, and what goes wrong in it ends the process. So a worker forks a server as
its first act, while it has one thread and nothing of its client's, and the server forks a process for whatever is to
be compiled: that takes milliseconds, since all that they need is imported already, or is on `WARM`. (An interpreter
of its own for each would first import for as long as a small model takes to compile.) Nothing is sent to the server
but descriptors:

    worker ── WARM ──────────────> server          import now, as something is to be compiled soon
    worker ── FORK + 2 fds ──────> server          its end of a connection, and of a pipe for the process's end
    worker ── description ───────> process         kernels as data; the next one when the last is answered
    worker <─ answer ───────────── process         object code, or why there is none

Server and processes have a session of their own, no descriptor but their connection and the standard three, and end
with the worker, as their connections do: a process has a thread for that, which works while LLVM does. The server
waits for its processes, and writes how each ended into its pipe. Left out: what to compile (`compile_jobs`).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
from contextlib import suppress
from typing import NoReturn

import msgspec

from nnfmq.channel import NOW, Channel, Frame
from nnfmq.hal.errors import DeadObject, ErrorStatus, MissedDeadlineTransient, NnfmqError, status_for_error

__all__ = ["FORK", "WARM", "Answer", "start_server"]

WARM, FORK = b"warm", b"fork"
_BUG_STATUS = 70
_PREFER_TO_KILL = "500"  # of 1000: where memory runs out, a compile process goes before a client's worker
_log = logging.getLogger("nnfmq.compiler")


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a compile process made of a description: `code` where `status` is NONE."""

    status: ErrorStatus
    message: str = ""
    code: bytes = b""


def start_server() -> Channel | None:
    """Fork a server and return the connection to it, which the caller owns; the server ends with it.

    None where this process has threads already, which a fork would leave in the middle of something, or none can be
    forked.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        _log.warning("no compile server: this process has threads already")
        return None
    ours, theirs = Channel.pair()
    fd = theirs.detach()
    try:
        if os.fork() == 0:
            _end_after(_Server, fd)
    except OSError as error:
        ours.close()
        _log.warning("no compile server: %s", error.strerror)
        return None
    finally:
        os.close(fd)
    return ours


def _end_after(kind: type[_Server] | type[_CompileProcess], fd: int) -> NoReturn:
    """Be a server or a compile process over the connection `fd` until that ends, and end: never return."""
    status = _BUG_STATUS
    try:
        _keep_only(fd)
        kind(Channel.adopt(fd)).run()
    except DeadObject:
        status = 0
    except BaseException:  # noqa: BLE001  nobody is above this: say what it was
        _log.critical("a bug in the compiler ends this process", exc_info=True)
    finally:
        os._exit(status)


def _keep_only(fd: int) -> None:
    """Close what the fork copied but `fd` and the standard three. Objects that hold the rest are never collected."""
    gc.disable()
    gc.freeze()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != fd:
            with suppress(OSError):  # the descriptor that listed the folder
                os.close(int(name))


class _Server:
    """Forks a process for each FORK, and tells how it ended."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._processes: dict[int, tuple[int, int]] = {}  # pidfd → pid, and where its status is written
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def run(self) -> None:
        """Serve until the worker is gone: raises DeadObject then."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._processes:
                    self._reap(fd)
                else:
                    self._serve()

    def _serve(self) -> None:
        with suppress(MissedDeadlineTransient), self._channel.receive(NOW) as frame:
            from nnfmq.engines.compiled.compiler import warm_up

            warm_up()
            if frame.data == FORK and not frame.lacks_fds:  # else the connection's end says that there is no process
                self._fork(frame)

    def _fork(self, frame: Frame) -> None:
        connection, status = frame.fds
        try:
            pid = os.fork()
        except OSError as error:
            _log.warning("no compile process: %s", error.strerror)
            return
        if pid == 0:
            _end_after(_CompileProcess, connection)
        pidfd = os.pidfd_open(pid)
        frame.fds = [connection]
        self._processes[pidfd] = (pid, status)
        self._poll.register(pidfd, select.POLLIN)

    def _reap(self, pidfd: int) -> None:
        pid, status = self._processes.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):
            os.write(status, str(code).encode())
        os.close(status)


class _CompileProcess:
    """Compiles what it is sent, one description after the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def run(self) -> None:
        """Compile until the worker wants no more: raises DeadObject then, or ends in the middle."""
        threading.Thread(target=self._end_with_the_worker, daemon=True).start()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(_PREFER_TO_KILL)
        while True:
            with self._channel.receive() as frame:
                self._channel.send(msgspec.msgpack.encode(_answer(frame.data)))

    def _end_with_the_worker(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), 0)  # the end alone
        poll.poll()
        os._exit(0)


def _answer(description: bytearray) -> Answer:
    from nnfmq.engines.compiled.kernel_serialization import decode_kernels
    from nnfmq.engines.compiled.objects import compile_kernels

    try:
        return Answer(ErrorStatus.NONE, code=compile_kernels(*decode_kernels(description)))
    except MemoryError:
        return Answer(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, "there is not enough memory to compile the model")
    except NnfmqError as error:
        return Answer(status_for_error(error), str(error))
    except Exception as error:  # noqa: BLE001  LLVM's too: it fails one model
        _log.exception("compiling failed")
        return Answer(ErrorStatus.GENERAL_FAILURE, f"compiling failed: {error!r}")
